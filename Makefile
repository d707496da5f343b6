# Developer commands. Needs Python 3.11 or newer and make; the rest is installed into .venv from the hash-pinned locks.
# PYTHON=/path/to/python chooses the interpreter, ARGS="..." is handed to the command.

.DEFAULT_GOAL := help
.PHONY: help run test test-long test-oldest-postgres test-containers test-objects trust fuzz check turn format bench bench-peers worst compat oracle lock readme dist third-party audit site test-pipeline pipeline-jars pipeline-demo

VENV := .venv
PIP := $(VENV)/bin/python -m pip --quiet --disable-pip-version-check
UV ?= uv
COMPILE := $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header --no-emit-index-url --no-emit-find-links
ARGS ?=

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/run.stamp ## Serve on 127.0.0.1:9092 with an embedded Postgres, data in ./.sluice
	@exec $(VENV)/bin/sluice serve $(ARGS)

test: $(VENV)/dev.stamp ## Run the suite against a real Postgres, in parallel; ARGS="tests/storage --workers 1"
	@$(VENV)/bin/python -m tests.run $(ARGS)

test-long: $(VENV)/dev.stamp ## Run the tests that take long, which `make test` leaves out; PART=3 for a fifth of them
	@$(VENV)/bin/python -m tests.run --long-tests $(if $(PART),--part $(PART)) $(ARGS)

OLDEST_POSTGRES ?= $(firstword $(shell ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V))
test-oldest-postgres: $(VENV)/dev.stamp ## Run the storage's tests, backup and restore on the oldest Postgres that is installed
	@test -n "$(OLDEST_POSTGRES)" || { echo "No Postgres in /usr/lib/postgresql: name its programs by OLDEST_POSTGRES" >&2; exit 1; }
	@SLUICE_TEST_POSTGRES_BIN=$(OLDEST_POSTGRES) $(VENV)/bin/python -m tests.run \
		--ignore tests/storage/test_embedded.py tests/storage tests/commands/test_moving.py $(ARGS)

test-containers: $(VENV)/dev.stamp ## Build the image, `docker compose up`, and both commands on bare machines (needs root and docker.io); ARGS="-m long" for the walks and a Kubernetes
	@$(VENV)/bin/python -m tests.run --workers 0 -m "not long" tests/containers $(ARGS)

test-objects: $(VENV)/dev.stamp ## Records in a bucket of a real S3 server, built with Go and kept in .compat
	@$(VENV)/bin/python -m tests.run --workers 0 tests/objects $(ARGS)

trust: $(VENV)/dev.stamp ## Attack a cluster and judge what clients were told; ARGS="--minutes 30 --seed 7"
	@$(VENV)/bin/python -m tests.trust $(ARGS)

fuzz: $(VENV)/dev.stamp ## Fuzz every reader of strangers' bytes; ARGS="--seconds 600 --only batches"
	@$(VENV)/bin/python -m tests.fuzz $(ARGS)

check: $(VENV)/dev.stamp ## Lint, formatting, types, import contracts, prose
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python -m tests.prose --check

turn: $(VENV)/dev.stamp ## Before each push: let the next run of continuous integration run the next part of what rotates
	@$(VENV)/bin/python -m tests.rotation

format: $(VENV)/dev.stamp ## Format, and fix what the linter can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/dev.stamp ## Measure speed and size, and report them against the targets
	@$(VENV)/bin/python -m bench $(ARGS)

bench-peers: $(VENV)/dev.stamp ## Measure beside Apache Kafka (from Maven Central), alternating, and print ratios
	@$(VENV)/bin/python -m bench.peers $(ARGS)

worst: $(VENV)/dev.stamp ## Send the worst that is legal on every API, and see how long each holds the event loop
	@$(VENV)/bin/python -m bench.worst $(ARGS)

compat: $(VENV)/dev.stamp ## Run stock clients of every language here against a gateway; SUITE=sarama for one
	@$(VENV)/bin/python -m tests.compat.run $(SUITE) $(ARGS)

pipeline-jars: $(VENV)/pipeline.stamp ## Fetch the jars of the data pipeline with Maven, from where its settings say
	@$(VENV)/bin/sluice-pipeline jars

test-pipeline: pipeline-jars ## Check the data pipeline's types and run its tests (needs Java 17); ARGS="--long" adds the long fault runs
	@$(VENV)/bin/pyright -p pyright.pipeline.json --pythonpath $(VENV)/bin/python
	@$(VENV)/bin/python -m tests.run --workers 0 tests/pipeline $(ARGS)

pipeline-demo: pipeline-jars ## A gateway, a million real records, archived, verified, analysed, with plots; under five minutes
	@$(VENV)/bin/python -m pipeline.demo $(ARGS)

oracle: $(VENV)/dev.stamp ## Ask Apache Kafka (from Maven Central) what the compatibility suites ask a gateway
	@$(VENV)/bin/python -m tests.compat.run --broker kafka $(SUITE) --report $(ARGS)

lock: ## Resolve the dependencies anew (needs uv); UPGRADE=1 takes the newest
	$(COMPILE) $(if $(UPGRADE),--upgrade) pyproject.toml --extra embedded --group dev --group build -o requirements-dev.lock
	$(COMPILE) pyproject.toml --extra embedded -c requirements-dev.lock -o requirements.lock
	$(COMPILE) --group build -c requirements-dev.lock -o requirements-build.lock
	$(COMPILE) $(if $(UPGRADE),--upgrade) --group docs -c requirements-dev.lock -o requirements-docs.lock
	$(COMPILE) $(if $(UPGRADE),--upgrade) pyproject.toml --extra embedded --extra pipeline --extra demo --group readers -c requirements-dev.lock -o requirements-pipeline.lock

site: $(VENV)/docs.stamp ## Build the documentation's site into build/site; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

dist: $(VENV)/dev.stamp ## Build the last commit's wheel, source distribution, bill of materials and checksums into dist/
	@$(VENV)/bin/python -m release dist

third-party: $(VENV)/dev.stamp ## Bring THIRD-PARTY.md up to date with the run-time lock
	@$(VENV)/bin/python -m release third-party

audit: ## Ask for known vulnerabilities of the locked packages (needs uv and the network)
	@$(UV) tool run pip-audit==2.9.0 --require-hashes --disable-pip -r requirements.lock -r requirements-pipeline.lock

readme: $(VENV)/dev.stamp ## Bring the table of APIs in docs/apis.md up to date
	@$(VENV)/bin/sluice apis --markdown > $(VENV)/apis.md
	@sed -i -e '/<!-- apis:begin/,/<!-- apis:end/{//!d}' -e '/<!-- apis:begin/r $(VENV)/apis.md' docs/apis.md

$(VENV)/run.stamp: pyproject.toml requirements.lock requirements-build.lock | $(VENV)/bin/pip
	@echo "Installing Sluice into $(VENV) ..."
	@$(PIP) install --require-hashes -r requirements.lock -r requirements-build.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/dev.stamp: pyproject.toml requirements-dev.lock | $(VENV)/bin/pip
	@echo "Installing Sluice and its development tools into $(VENV) ..."
	@$(PIP) install --require-hashes -r requirements-dev.lock
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/docs.stamp: pyproject.toml requirements-docs.lock $(VENV)/dev.stamp
	@$(PIP) install --require-hashes -r requirements-docs.lock
	@touch $@

# The pipeline is an extra: its packages come on top of the development tools.
$(VENV)/pipeline.stamp: pyproject.toml requirements-pipeline.lock $(VENV)/dev.stamp
	@echo "Installing the data pipeline into $(VENV) ..."
	@$(PIP) install --require-hashes -r requirements-pipeline.lock
	@touch $@

# pip comes last into a virtual environment, so a creation that was interrupted is done again.
$(VENV)/bin/pip:
	@python=; for candidate in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
			python=$$candidate; break; fi; done; \
	if [ -z "$$python" ]; then \
		echo "Sluice needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	if ! "$$python" -c 'import ensurepip' >/dev/null 2>&1; then \
		echo "$$python cannot make a virtual environment: install its venv package (Debian: python3-venv)" >&2; \
		exit 1; fi; \
	"$$python" -m venv $(VENV)
