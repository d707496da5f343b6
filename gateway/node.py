"""The parts of a node behind its listeners and its database: made here once, and started in order.

The one idea: this is the only module that knows all parts. The builders in `gateway/building/` make them, one for each
room; a part receives what it needs, and no part looks up another. `gateway/app.py` imports this module, and with it
nearly all of the program, while Postgres starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from gateway.apis import SERVED, HandlerServices
from gateway.apis.admin.new_topics import make_dead_letter_topic
from gateway.apis.audit import audit_into
from gateway.apis.coordinator_topics import InternalTopics, prepare
from gateway.apis.metadata_cache import DescribedTopics
from gateway.apis.permissions import authorize
from gateway.building.background import build_background
from gateway.building.cluster import ClusterPart, build_cluster
from gateway.building.database import DatabasePart, wait_for_locks
from gateway.building.forwarding import Forwarding, build_forwarding
from gateway.building.groups import GroupPart, build_groups
from gateway.building.listeners import Listeners, build_sasl, connections_from, look_for_itself
from gateway.building.log import LogPart, build_log
from gateway.building.readers import SharePart, build_share, build_transactions
from gateway.building.renewal import INTERVAL_MS as RENEWAL_INTERVAL_MS
from gateway.building.renewal import Renewal
from gateway.building.services import Services
from gateway.building.stores import open_stores
from gateway.building.undo import STEP_TIMEOUT_S, Undo
from gateway.cluster.clock import ClusterClock
from gateway.cluster.histories import Histories
from gateway.cluster.jobs import Job
from gateway.config.broker import BrokerConfig
from gateway.config.broker_parsing import parse_stored
from gateway.config.listeners import render_address
from gateway.config.settings import Settings
from gateway.console.start import start_console
from gateway.groups.groups import Groups
from gateway.log.tail import Tail
from gateway.net.context import Role
from gateway.net.dispatch import Dispatch, Stages, served_as
from gateway.net.requests import Requests
from gateway.net.server import Server
from gateway.operate.audit_log import AuditLog
from gateway.operate.exporter import Exporter
from gateway.operate.metrics import Metrics
from gateway.operate.supervisor import Supervisor
from gateway.quotas.throttles import Throttles
from gateway.security.authenticator import Users, guards
from gateway.security.delegation import DelegationTokens
from gateway.share.dead_letters import DeadLetters
from gateway.sql_door import open_sql_door
from storage.errors import StorageError
from storage.monitor import Monitor
from storage.nodes import NodeStore
from storage.pool import Database
from storage.tokens import TokenStore
from storage.topics import TopicStore

if TYPE_CHECKING:
    from gateway.operate.http import HttpServer
    from gateway.tracing.traces import Traces

logger = structlog.get_logger(__name__)

REMEMBER_INTERVAL_MS = 5_000
"""Interval at which a node writes down what it knows of its history, for its next run."""
CONFIRM_INTERVAL_MS = 5_000
"""Interval at which a node checks by a new connection that its history goes on. Its open connections may lead to a
former primary for as long as that server runs."""


DROP_INTERVAL_MS = 1_000
"""Interval at which a node ends its connections to nodes that are no longer alive."""


class StagesWithFaults(Protocol):
    """The faults of a node that a test starts."""

    def within(self, stages: Stages[HandlerServices]) -> Stages[HandlerServices]: ...


@dataclass(frozen=True, slots=True)
class Serving:
    """A node that serves clients: its groups, the addresses of its listeners, and the URL of its console."""

    groups: Groups
    bootstrap: str
    addresses: Mapping[str, str]
    console_url: str


class Node:
    """Makes and starts the parts. Each part puts the steps of its end into `undo`."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        supervisor: Supervisor,
        undo: Undo,
        faults: StagesWithFaults | None = None,
    ) -> None:
        self.settings = settings
        self.metrics = metrics
        self._supervisor = supervisor
        self._undo = undo
        self._faults = faults
        self._forwarding: Forwarding | None = None

    async def serve(
        self,
        listeners: Listeners,
        http: HttpServer | None,
        opened: DatabasePart,
        audit_log: AuditLog | None,
        traces: Traces | None,
    ) -> Serving:
        """Start the node, and return once it serves clients. Raise StorageError or ConfigError."""
        settings, metrics, undo, start = self.settings, self.metrics, self._undo, self._supervisor.start
        database, history = opened.database, opened.history
        nodes = NodeStore(database)
        topics = TopicStore(database, nodes.registration)
        broker = await _broker(settings, topics)
        clock = ClusterClock()
        await clock.compare(Monitor(database).now_ms)

        stores = await open_stores(settings, broker, database, topics, nodes, undo)
        tail = Tail(settings.tail_bytes)
        cluster = build_cluster(settings, broker, listeners.advertised, stores, tail, metrics.health)
        membership, leases = cluster.membership, cluster.leases
        log = build_log(broker, stores, tail, cluster, metrics, undo, committers=settings.committers, traces=traces)
        undo.push("figures", STEP_TIMEOUT_S, cluster.figures.close)
        await self._join(cluster, log, listeners)

        async def remember() -> None:
            await history.remember(membership.node_id)

        undo.push("memory of the history", STEP_TIMEOUT_S, remember)
        metrics.leases_held.set_function(lambda: leases.held)
        groups = await build_groups(broker, stores, cluster, log, clock, metrics, undo, traces=traces)
        membership.connect(
            cluster.wakeups,
            catalog_revision=lambda: log.catalog.revision,
            catch_up=log.catalog.refresh_if_changed,
            placed=lambda: cluster.jobs.due(Job.METADATA),
        )
        share = build_share(broker, stores, metrics, undo)
        transactions = build_transactions(stores, cluster, log, groups, clock, metrics)
        background = build_background(settings, broker, stores, cluster, log, groups, transactions, clock, metrics)
        start(
            "history",
            Histories(
                *(history, (log, cluster, share, transactions)),
                announce=stores.roller.begin_history,
                begun=background.reconciler.hearing,
            ).follow,
            interval_ms=0,
            regular=False,
        )
        start("memory of the history", remember, interval_ms=REMEMBER_INTERVAL_MS)
        start("check of the history", database.confirm_history, interval_ms=CONFIRM_INTERVAL_MS)
        await wait_for_locks(leases.renew)
        undo.push("leases", STEP_TIMEOUT_S, leases.release)

        throttles = Throttles(
            lambda: log.catalog.quotas,
            throttled=lambda key, seconds: metrics.throttled_seconds.labels(key).inc(seconds),
        )
        services = Services(
            settings=settings,
            catalog=log.catalog,
            topics=topics,
            log=stores.log,
            validator=log.validator,
            recompressor=log.recompressor,
            appender=log.appender,
            tail=tail,
            producers=stores.producers,
            offsets=stores.offsets,
            groups=groups.groups,
            membership=membership,
            metrics=metrics,
            cluster_id=await topics.cluster_id(),
            described_topics=DescribedTopics(),
            internal_topics=InternalTopics(),
            history=history,
            transactions=transactions.transactions,
            throttles=throttles,
            share=share.partitions,
            share_sessions=share.sessions,
            share_store=stores.share,
            users=stores.users,
            delegation=_delegation(settings.broker, database),
            clock=clock,
            internal_logs=transactions.internal_logs,
            marks=groups.marks,
            idle_owners=groups.idle_owners,
            authorizer=groups.authorizer,
            certificates=listeners.certificates,
        )
        start("internal topics", transactions.internal_logs.run, interval_ms=0, regular=False)
        dead_letters = DeadLetters(
            share.partitions,
            log.catalog,
            stores.log,
            log.appender,
            settings_of=lambda group_id: groups.groups.settings.share_for(group_id),
            make_topic=lambda name: make_dead_letter_topic(name, services),
            now_ms=clock.now_ms,
            count_written=metrics.share_dead_letters.inc,
            count_failed=metrics.share_dead_letters_failed.inc,
        )
        share.partitions.report_dead_letters(dead_letters.notice)
        start("dead letters", dead_letters.run, interval_ms=0, regular=False)
        if broker.sql_schema:
            relay = await wait_for_locks(lambda: open_sql_door(database, services, cluster.wakeups))
            start("relay of SQL records", relay.run, interval_ms=0, regular=False)
        if traces is not None:
            start("traces", traces.exporter.run, interval_ms=0, regular=False)
        background.start(self._supervisor, undo)
        if http is not None:
            await self._serve_http(http, database, topics, cluster, listeners.server)
        serving = await self._serve(services, database, listeners, groups, share, cluster, audit_log, traces)
        drain_s = settings.drain_ms / 1000 + 2 * STEP_TIMEOUT_S
        undo.push("requests", drain_s, lambda: self._drain(listeners.server, log, groups, cluster))
        return serving

    async def _join(self, cluster: ClusterPart, log: LogPart, listeners: Listeners) -> None:
        """Register the node, and load the catalog as the node that it has become. Raise StorageError."""
        membership = cluster.membership
        await membership.require_own_addresses()
        self._undo.push("membership", STEP_TIMEOUT_S, membership.withdraw)
        await wait_for_locks(membership.join)
        log.catalog.place_by(lambda: membership.leads)
        await log.catalog.serve_as(lambda: str(membership.node_id))
        await listeners.certificates.begin(log.catalog.broker)

    async def _serve(
        self,
        services: Services,
        database: Database,
        listeners: Listeners,
        groups: GroupPart,
        share: SharePart,
        cluster: ClusterPart,
        audit_log: AuditLog | None,
        traces: Traces | None,
    ) -> Serving:
        """Accept clients."""
        settings, metrics, throttles = self.settings, self.metrics, services.throttles

        def connection_closed(connection_id: str, by_peer: bool) -> None:
            groups.groups.connection_closed(connection_id, by_peer)
            share.connection_closed(connection_id)

        stages: Stages[HandlerServices] = Stages(
            prepare=prepare,
            authorize=None if services.authorizer is None else authorize,
            throttle=throttles.before,
            charge=throttles.around,
            audit={} if audit_log is None else audit_into(audit_log.append, services.membership.address),
            trace=None if traces is None else traces.request,
        )
        if self._faults is not None:
            stages = self._faults.within(stages)
        by_role = {
            role: Dispatch(served_as(role, SERVED), services, metrics, stages, role)
            for role in (Role.BROKER, Role.CONTROLLER)
        }
        requests: dict[str, Requests] = {
            listener.name: by_role[Role.CONTROLLER if listener.is_controller else Role.BROKER]
            for listener in settings.listeners
        }
        self._forwarding = forwarding = await build_forwarding(
            settings,
            by_role[Role.BROKER],
            cluster,
            services.transactions,
            services.users,
            listeners.certificates,
            metrics,
        )
        if forwarding is not None:
            requests |= forwarding.handlers()
        users = Users(services.users, services.delegation)
        console = await start_console(by_role[Role.BROKER], services, users, database, cluster.figures, self._undo.push)
        sasl = build_sasl(settings, requests, users, metrics, self._undo)
        renewal = Renewal(settings, services.catalog, listeners.certificates, sasl, services.broker_configs)
        self._supervisor.start("secrets in files", renewal.look, interval_ms=RENEWAL_INTERVAL_MS)
        await listeners.server.serve(
            by_role[Role.BROKER],
            connection_closed,
            throttles.connection_wait_s,
            guards(sasl) if forwarding is None else forwarding.guards(guards(sasl)),
            requests,
            connections_from(services.catalog),
            {each.name: listeners.advertised[each.name] for each in settings.listeners if each.is_shared},
        )
        if forwarding is not None:
            self._supervisor.start("forwarding", partial(_drop_gone, forwarding, cluster), interval_ms=DROP_INTERVAL_MS)
        look_for_itself(listeners.advertised, self._undo)
        return Serving(
            groups.groups,
            services.membership.address,
            {name: render_address(address) for name, address in listeners.advertised.items()},
            console.url if console is not None else "",
        )

    async def _serve_http(
        self, http: HttpServer, database: Database, topics: TopicStore, cluster: ClusterPart, server: Server
    ) -> None:
        membership, leases, jobs = cluster.membership, cluster.leases, cluster.jobs

        async def answers() -> str | None:
            try:
                await topics.revision()
            except StorageError as error:
                return str(error)
            return None

        async def listener() -> str | None:
            return None if server.is_listening else "not accepting connections"

        async def coordinator() -> str | None:
            if leases.held or membership.has_other_brokers or not membership.roles.is_broker:
                return None
            return "no lease is held"

        # The exporter shares a lease: see Job.METADATA.
        exporter = Exporter(
            Monitor(database),
            membership,
            self.settings.metrics_max_series,
            lambda: jobs.lease(Job.METADATA) is not None,
        )
        checks = {"database": answers, "listener": listener, "coordinator": coordinator}
        await http.serve(exporter.snapshot, checks)

    # --- stopping -------------------------------------------------------------------------------------------------

    async def _drain(self, server: Server, log: LogPart, groups: GroupPart, cluster: ClusterPart) -> None:
        """Answer parked requests now, and let storage finish its work within `drain_ms`."""
        logger.info("draining")
        timeout_s = self.settings.drain_ms / 1000
        server.stop_accepting()
        log.tail.drain()
        # While groups and log drain, requests that were read still use them. So connections stop reading first and
        # close last.
        server.stop_reading()
        if self._forwarding is not None:
            self._forwarding.forwarder.drain()

        async def leave() -> None:
            # The leases are released when the pending steps of their groups are stored.
            await groups.drain(timeout_s)
            await cluster.drain(timeout_s)

        await asyncio.gather(leave(), log.drain(timeout_s))
        await server.drain(STEP_TIMEOUT_S)


async def _drop_gone(forwarding: Forwarding, cluster: ClusterPart) -> None:
    forwarding.forwarder.drop_gone(cluster.membership.alive())


async def _broker(settings: Settings, topics: TopicStore) -> BrokerConfig:
    """Return the broker's settings with those that are stored. Raise StorageError."""
    broker, refused = parse_stored(settings.broker.static, await topics.load_broker_configs())
    for error in refused.values():
        logger.error("stored broker setting refused: change it by kafka-configs", error=str(error))
    return broker


def _delegation(broker: BrokerConfig, database: Database) -> DelegationTokens | None:
    """Return the delegation tokens; None: they are not enabled."""
    if not broker.delegation_token_secret_key:
        return None
    return DelegationTokens(
        TokenStore(database),
        broker.delegation_token_secret_key,
        max_lifetime_ms=broker.delegation_token_max_lifetime_ms,
        expiry_ms=broker.delegation_token_expiry_time_ms,
    )
