"""The log of a node: the topics that it knows, the recent records, and the way into Postgres."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.building.cluster import ClusterPart
from gateway.building.stores import Stores
from gateway.building.undo import STEP_TIMEOUT_S, Undo
from gateway.cluster.jobs import Job
from gateway.config.broker import BrokerConfig
from gateway.log.appender import Appender
from gateway.log.catalog import Catalog
from gateway.log.recompression import Recompressor
from gateway.log.tail import Tail
from gateway.log.validator import BatchValidator
from gateway.operate.metrics import Metrics
from storage.log import LogStore
from storage.types import Topic

if TYPE_CHECKING:
    from gateway.tracing.traces import Traces


@dataclass(frozen=True, slots=True)
class LogPart:
    """Everything between a request and the stored log."""

    store: LogStore
    tail: Tail
    catalog: Catalog
    appender: Appender
    validator: BatchValidator
    recompressor: Recompressor

    def forget(self) -> None:
        """Forget the recent log, the topics, and what the store's reader holds."""
        self.tail.reset()
        self.catalog.reset()
        self.store.reader.forget()

    async def drain(self, timeout_s: float) -> None:
        """Wait until the queued batches are committed."""
        await self.appender.drain(timeout_s)


def build_log(
    broker: BrokerConfig,
    stores: Stores,
    tail: Tail,
    cluster: ClusterPart,
    metrics: Metrics,
    undo: Undo,
    *,
    committers: int,
    traces: Traces | None,
) -> LogPart:
    """Make the parts. `committers` is the number of appends that may run at the same time."""
    metrics.watch_damaged_chunks(lambda: stores.log.damaged_chunks)
    appender = Appender(
        stores.log,
        tail,
        committers=committers,
        gather_s=broker.log_commit_gather_ms / 1000,
        observe_commit=metrics.observe_commit if traces is None else traces.commits(metrics.observe_commit),
        listener=cluster.wakeups,
    )

    def delete_rest(_topic: Topic) -> None:
        cluster.jobs.due(Job.DELETION)

    def forget_series(topic: Topic) -> None:
        metrics.forget_topic(topic.name)

    catalog = Catalog(
        stores.topics,
        tail,
        broker,
        settled=appender.settled,
        removed=(delete_rest, forget_series),
        count_materialised=metrics.partitions_materialised.inc,
        count_removed=metrics.partitions_removed.inc,
    )
    validator = BatchValidator()
    undo.push("validation threads", STEP_TIMEOUT_S, validator.close)
    recompressor = Recompressor()
    undo.push("recompression threads", STEP_TIMEOUT_S, recompressor.close)
    return LogPart(stores.log, tail, catalog, appender, validator, recompressor)
