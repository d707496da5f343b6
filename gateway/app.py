"""The whole node: every part is made here once, started in order and stopped in reverse.

The one idea: this is the only module that knows all parts. A part receives what it needs; no part looks up another.
Stopping keeps one promise: every answered request is durable, every request in work is answered if `drain_ms` allows,
and the node's leases are free at once for the next process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from gateway.apis import SERVED
from gateway.apis.described_topics import DescribedTopics
from gateway.apis.internal_topics import InternalTopics, offsets_partitions, prepare, state_partition
from gateway.apis.permissions import authorize
from gateway.apis.topics import make_dead_letter_topic
from gateway.cluster.clock import ClusterClock
from gateway.cluster.histories import Histories
from gateway.cluster.jobs import Job, Jobs
from gateway.cluster.leases import Leases
from gateway.cluster.membership import Membership
from gateway.cluster.reachability import warn_of_unreachable
from gateway.cluster.reconciler import Reconciler
from gateway.cluster.wakeups import Wakeups
from gateway.config.broker import BrokerConfig, ip_overrides, principals
from gateway.config.broker_parsing import parse_stored
from gateway.config.definition import ConfigError
from gateway.config.listeners import Listener, render_address
from gateway.config.security import listener_security
from gateway.config.settings import Settings, hide_password
from gateway.console.start import start_console
from gateway.groups.cluster_feed import ClusterFeed
from gateway.groups.drains import Drains
from gateway.groups.groups import MACHINES, Groups
from gateway.groups.idle_owners import IdleOwners
from gateway.groups.journal import Journal
from gateway.groups.marks import Marks
from gateway.groups.settings import group_settings
from gateway.internal_log.sources import GroupSource, TransactionSource
from gateway.internal_log.writer import InternalLogs
from gateway.log.appender import Appender
from gateway.log.catalog import Catalog
from gateway.log.recompression import Recompressor
from gateway.log.tail import Tail
from gateway.log.topic_names import CONSUMER_OFFSETS
from gateway.log.validator import BatchValidator
from gateway.net.connection import ConnectionLimits
from gateway.net.context import Role, Services
from gateway.net.dispatch import Dispatch, Stages, served_as
from gateway.net.server import Server, Tls
from gateway.operate.deletions import Deletions
from gateway.operate.exporter import Exporter
from gateway.operate.maintenance import Maintenance
from gateway.operate.metrics import Metrics
from gateway.operate.supervisor import Supervisor
from gateway.quotas.throttles import Throttles
from gateway.security.authenticator import ListenerSasl, Users, guards
from gateway.security.authorizer import Authorizer
from gateway.security.delegation import DelegationTokens
from gateway.security.failures import Failures
from gateway.security.tls import Certificates, identify_by, make_context
from gateway.share.dead_letters import DeadLetters
from gateway.share.partitions import SharePartitions
from gateway.share.sessions import ShareSessions
from gateway.sql_door import open_sql_door
from gateway.transactions.coordinator import Transactions
from storage import notify
from storage.byte_store import ByteStore
from storage.deletion import DeletionStore
from storage.embedded import EmbeddedPostgres, EmbeddedPostgresError, holds_cluster
from storage.errors import StorageError, StorageUnavailable
from storage.groups import GroupStore
from storage.history import HistoryStore
from storage.journal import JournalStore
from storage.log import LogStore
from storage.migrate import has_tables, migrate
from storage.monitor import Monitor
from storage.nodes import NodeStore
from storage.offsets import OffsetStore
from storage.pool import Database
from storage.producers import ProducerStore
from storage.roller import Roller
from storage.share import ShareStore
from storage.store import open_store
from storage.tokens import TokenStore
from storage.topics import TopicStore
from storage.transactions import TransactionStore
from storage.types import Address, CoordinatorLease, Partition, Topic
from storage.users import UserStore

if TYPE_CHECKING:
    from gateway.operate.http import HttpServer
    from gateway.testing.faults import Faults

logger = structlog.get_logger(__name__)

DATABASE_PATIENCE_S = 30.0
"""How long a start waits for a database that does not answer yet."""
DATABASE_RETRY_S = 0.5
DATABASE_REMINDER_S = 10.0
"""Interval between log lines that the start is still waiting for the database."""
LAG_PROBE_INTERVAL_S = 0.5
THREAD_SWITCH_S = 0.0005
"""How long a working thread (validation, compaction) keeps the interpreter from the event loop, which must request
it again after every call into the kernel. Python's own 5 ms would cost a busy loop most of its time."""
REMEMBER_INTERVAL_MS = 5_000
"""Interval at which a node writes down what it knows of its history, for its next run."""
STEP_TIMEOUT_S = 0.3
"""Bound of each step of stopping after the drain. With the drain and Postgres's own stop the total is below 5 s."""
POSTGRES_STOP_TIMEOUT_S = 3.0


class StartError(Exception):
    """The node cannot serve; the message is one line for the person who started it."""


class App:
    """One node. `start` once, `stop` once; both on the same event loop."""

    def __init__(self, settings: Settings, faults: Faults | None = None) -> None:
        """Take the settings and, in a node that a test starts, the faults of its requests."""
        self.settings = settings
        self._faults = faults
        self.metrics = Metrics(settings.metrics_max_series)
        self.bootstrap = ""
        """Address to which clients connect, once started."""
        self.addresses: dict[str, str] = {}
        """These addresses by listener."""
        self.groups: Groups | None = None
        """The groups of a node that serves."""
        self.console_url = ""
        """URL of the console, once started; empty without a console."""
        self._supervisor = Supervisor(self.metrics)
        self._certificates = Certificates()
        self._undo: list[tuple[str, float, Callable[[], Awaitable[object]]]] = []
        """Steps that undo the start, with the time that each may take, newest last."""

    async def start(self) -> None:
        """Start the node; return once it serves clients. Raise StartError; `stop` must be called either way."""
        started = time.monotonic()
        try:
            await self._start()
        except (StorageError, EmbeddedPostgresError, ConfigError) as error:
            raise StartError(str(error)) from error
        logger.info("serving", bootstrap=self.bootstrap, took_ms=round((time.monotonic() - started) * 1000))

    async def stop(self) -> None:
        """Drain and release everything, however far `start` came. A failing step does not keep the others from
        running."""
        while self._undo:
            name, limit_s, undo = self._undo.pop()
            # Wait instead of cancelling: asyncpg waits for an unresponsive Postgres even to cancel a query.
            step = asyncio.ensure_future(undo())
            finished, _ = await asyncio.wait({step}, timeout=limit_s)
            step.add_done_callback(_retrieve_error)
            error = step.exception() if finished else TimeoutError(f"not done in {limit_s} s")
            if isinstance(error, StorageError | OSError):
                logger.warning("a step of the shutdown failed", step=name, error=str(error))
            elif error is not None:
                logger.error("a step of the shutdown failed", step=name, exc_info=error)

    # --- starting -------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        settings, metrics = self.settings, self.metrics
        sys.setswitchinterval(THREAD_SWITCH_S)
        # Bind ports first. So a taken port is found before anything is created or the node joins, and a port that the
        # kernel chose is known when the node joins.
        server = Server(metrics, self._limits())
        self._undo.append(("listeners", 2 * STEP_TIMEOUT_S, server.close))
        advertised = {
            listener.name: await _bind(server, listener, await asyncio.to_thread(self._tls, listener))
            for listener in settings.listeners
        }
        http = await self._bind_http()
        database, history, histories = await self._open_database()
        topics = TopicStore(database)
        broker, refused = parse_stored(settings.broker.static, await topics.load_broker_configs())
        for error in refused.values():
            logger.error("stored broker setting refused: change it by kafka-configs", error=str(error))
        node_store = NodeStore(database)
        clock = ClusterClock()
        await clock.compare(Monitor(database).now_ms)
        cached = broker.log_store_page_cache_bytes
        store = await open_store(database, settings.log_place, page_cache_bytes=None if cached < 0 else cached)
        if store is not None:
            self._undo.append(("store", STEP_TIMEOUT_S, _closing(store)))
        log_store = LogStore(database, store, inline_max_bytes=broker.log_store_inline_max_bytes)
        self._undo.append(("log", STEP_TIMEOUT_S, log_store.close))
        roller = Roller(
            database,
            log_store,
            store,
            max_bytes=broker.log_store_roll_bytes,
            max_age_ms=broker.log_store_roll_ms,
        )
        self._undo.append(("roller", STEP_TIMEOUT_S, roller.close))
        metrics.watch_damaged_chunks(lambda: log_store.damaged_chunks)

        tail = Tail(settings.tail_bytes)
        catalog = Catalog(topics, tail, broker)
        catalog.follows_acls = bool(broker.authorizer_class_name)
        catalog.count_materialised = metrics.partitions_materialised.inc
        catalog.count_removed = metrics.partitions_removed.inc
        appender = Appender(
            log_store,
            tail,
            committers=settings.committers,
            gather_s=broker.log_commit_gather_ms / 1000,
            observe_commit=metrics.observe_commit,
        )
        catalog.settled = appender.settled
        validator = BatchValidator()
        self._undo.append(("validation threads", STEP_TIMEOUT_S, validator.close))
        recompressor = Recompressor()
        self._undo.append(("recompression threads", STEP_TIMEOUT_S, recompressor.close))

        membership = Membership(
            node_store, advertised, settings.rack, settings.node_ttl_ms, broker.node_id, settings.roles
        )
        membership.authorizer = broker.authorizer_class_name
        await membership.require_own_addresses()
        await membership.join()
        catalog.leads = lambda: membership.leads
        await catalog.serve_as(lambda: str(membership.node_id))
        await self._certificates.begin(catalog.broker)
        self._undo.append(("membership", STEP_TIMEOUT_S, membership.withdraw))

        async def remember() -> None:
            await histories.remember(membership.node_id)

        self._undo.append(("memory of the history", STEP_TIMEOUT_S, remember))
        leases = Leases(node_store, membership, settings.node_ttl_ms)
        metrics.leases_held.set_function(lambda: leases.held)
        jobs = Jobs(node_store, membership, settings.node_ttl_ms)

        def removed(topic: Topic) -> None:
            jobs.due(Job.DELETION)
            metrics.forget_topic(topic.name)

        catalog.removed = removed
        membership.placed = lambda: jobs.due(Job.METADATA)
        journal = None
        if broker.group_journal_enable:
            journal = Journal(JournalStore(database), MACHINES, catalog, lambda: membership.node_id or 0, metrics)
            journal.now_ms = clock.now_ms
            self._undo.append(("journal", 2 * STEP_TIMEOUT_S, journal.close))
        group_store = GroupStore(database)
        groups = Groups(
            group_store,
            OffsetStore(database),
            leases,
            group_settings(broker, catalog.group_configs),
            count_rebalance=metrics.group_rebalances.inc,
            count_violation=lambda violation: metrics.group_violations.labels(violation).inc(),
            count_withheld=metrics.group_withheld.inc,
            count_handoff=metrics.count_handoff,
            journal=journal,
            cluster_ms=clock.now_ms,
        )
        authorizer = _authorizer(broker, catalog, metrics)
        ClusterFeed(catalog, groups, lambda: None if authorizer is None else authorizer.describing())
        # If groups exist, some client has already looked up their coordinators.
        groups.begun = catalog.get(CONSUMER_OFFSETS) is not None or await group_store.any()
        metrics.group_handoffs_pending.set_function(groups.awaited_partitions)
        metrics.groups_half_way.set_function(groups.half_way)
        marks = Marks(
            lambda: groups.settings.drains,
            asyncio.get_running_loop().time,
            alone=lambda: not membership.has_other_brokers,
            nodes_since_s=lambda: max(membership.changed_s, catalog.assigned_s),
        )

        def alone_serves(partition: Partition) -> bool:
            # A consumer that is redirected to the nearest node reads there, and this node does not see it.
            return not broker.selects_nearest and membership.leads(partition)

        drains = Drains(groups, OffsetStore(database), catalog, log_store.states, marks, alone_serves)
        self._undo.append(("drains", STEP_TIMEOUT_S, drains.close))
        leases.acquired, leases.lost = groups.shard_acquired, groups.shard_lost
        leases.in_unrest = groups.shards_in_unrest
        membership.catalog_revision = lambda: catalog.revision
        wakeups = Wakeups(tail, membership, node_store.announce, log_store.states)
        membership.announced, membership.seen = lambda: wakeups.announced, wakeups.nodes_seen
        membership.registered = wakeups.registered
        appender.appended, appender.in_doubt = wakeups.appended, wakeups.in_doubt
        reconciler = Reconciler(
            catalog,
            membership,
            leases,
            interval_ms=broker.reconcile_periodic_interval_ms,
            ttl_ms=settings.node_ttl_ms,
            observe_pass=metrics.observe_reconcile_pass,
            observe_failure=metrics.observe_reconcile_failure,
        )

        share_store = ShareStore(database)
        share = SharePartitions(share_store)
        share_sessions = ShareSessions(broker.group_share_max_share_sessions)
        self._undo.append(("share partitions", STEP_TIMEOUT_S, share.close))
        metrics.share_partitions.set_function(lambda: share.count)
        metrics.share_sessions.set_function(lambda: share_sessions.count)

        def forget() -> None:
            tail.reset()
            catalog.reset()
            leases.forget()
            jobs.forget()
            log_store.reader.forget()
            share.forget()

        histories.forget, histories.begun = forget, reconciler.hearing
        self._supervisor.start("history", histories.follow, interval_ms=0, regular=False)
        self._supervisor.start("memory of the history", remember, interval_ms=REMEMBER_INTERVAL_MS)
        metrics.watch_cluster(
            revision_lag=lambda: reconciler.revision_lag,
            leases_moved={"groups": lambda: leases.handed_over, "jobs": lambda: jobs.handed_over},
            jobs_held=lambda: jobs.held,
            owned=lambda: catalog.owned,
            deferred=lambda: catalog.deferred,
            performed=catalog.performed,
            merged=lambda: reconciler.metadata_wake.merged + reconciler.nodes_wake.merged,
            wakeups=wakeups.counts,
        )
        await leases.renew()
        self._undo.append(("leases", STEP_TIMEOUT_S, leases.release))

        producers = ProducerStore(database)
        transactions = Transactions(TransactionStore(database), producers, tail, membership)
        transactions.appended, transactions.in_doubt = wakeups.appended, wakeups.in_doubt
        transactions.now_ms = clock.now_ms
        transactions.state_partition = lambda transactional_id: state_partition(catalog, transactional_id)
        transactions.observe_end = lambda outcome: metrics.transactions_ended.labels(outcome).inc()
        transactions.offsets_committed = groups.transaction_committed
        internal_logs = InternalLogs(
            catalog,
            log_store,
            appender,
            (
                GroupSource(groups, leases, group_store, OffsetStore(database)),
                TransactionSource(transactions, lambda: offsets_partitions(catalog)),
            ),
            node_store.tell_followed,
            clock.now_ms,
        )

        def shard_acquired(lease: CoordinatorLease) -> None:
            groups.shard_acquired(lease)
            internal_logs.shards_moved()

        leases.acquired = shard_acquired

        def forget_internal_logs_too() -> None:
            forget()
            internal_logs.forget()

        histories.forget = forget_internal_logs_too
        throttles = Throttles()
        throttles.throttled = lambda key, seconds: metrics.throttled_seconds.labels(key).inc(seconds)
        services = Services(
            settings=settings,
            catalog=catalog,
            topics=topics,
            log=log_store,
            validator=validator,
            recompressor=recompressor,
            appender=appender,
            tail=tail,
            producers=producers,
            offsets=OffsetStore(database),
            groups=groups,
            membership=membership,
            metrics=metrics,
            cluster_id=await topics.cluster_id(),
            described_topics=DescribedTopics(),
            internal_topics=InternalTopics(),
            history=history,
            transactions=transactions,
            throttles=throttles,
            share=share,
            share_sessions=share_sessions,
            share_store=share_store,
            users=UserStore(database),
            delegation=_delegation(settings.broker, database),
            clock=clock,
            internal_logs=internal_logs,
            marks=marks,
            idle_owners=IdleOwners(groups, catalog, alone_serves),
            authorizer=authorizer,
            certificates=self._certificates,
        )
        deletions = Deletions(
            DeletionStore(database),
            lambda: jobs.lease(Job.DELETION),
            count_gone=metrics.topics_removed.inc,
            count_failure=lambda: metrics.observe_reconcile_failure("delete"),
        )
        maintenance = Maintenance(
            database,
            log_store,
            roller,
            catalog,
            tail,
            leases.current,
            groups.in_use,
            deletions,
            transactions,
            journal,
            jobs.lease,
            clock,
        )
        # A node that is only a controller writes no internal topics for consumers.
        hints = _hints(reconciler, jobs, wakeups, internal_logs if settings.roles.is_broker else None)
        listener = notify.Listener(database, hints, lambda: membership.node_id)
        self._supervisor.start("internal topics", internal_logs.run, interval_ms=0, regular=False)
        dead_letters = DeadLetters(services, lambda name: make_dead_letter_topic(name, services))
        share.notice_dead_letters = dead_letters.notice
        self._supervisor.start("dead letters", dead_letters.run, interval_ms=0, regular=False)
        if broker.sql_schema:
            relay = await open_sql_door(database, services, wakeups)
            self._supervisor.start("relay of SQL records", relay.run, interval_ms=0, regular=False)
        self._start_passes(reconciler, jobs, wakeups, listener, maintenance)
        # The exporter shares a lease: see Job.METADATA.
        exporter = Exporter(
            Monitor(database),
            membership,
            settings.metrics_max_series,
            lambda: jobs.lease(Job.METADATA) is not None,
        )
        if http is not None:
            await self._serve_http(http, exporter, server, services, leases)

        def connection_closed(connection_id: str, by_peer: bool) -> None:
            groups.connection_closed(connection_id, by_peer)
            share_sessions.connection_closed(connection_id, share)

        stages = Stages(
            prepare=prepare,
            authorize=None if services.authorizer is None else authorize,
            throttle=throttles.before,
            charge=throttles.around,
        )
        if self._faults is not None:
            stages = self._faults.within(stages)
        by_role = {
            role: Dispatch(served_as(role, SERVED), services, metrics, stages, role)
            for role in (Role.BROKER, Role.CONTROLLER)
        }
        requests = {
            listener.name: by_role[Role.CONTROLLER if listener.is_controller else Role.BROKER]
            for listener in settings.listeners
        }

        def most_from(address: str) -> int:
            overrides = catalog.broker.max_connections_per_ip_overrides
            most = catalog.broker.max_connections_per_ip
            return ip_overrides(overrides).get(address, most) if overrides else most

        console = await start_console(by_role[Role.BROKER], services, database, self._undo)
        self.console_url = console.url if console is not None else ""
        server.most_from = most_from
        await server.serve(
            by_role[Role.BROKER],
            connection_closed,
            lambda address: throttles.connection_wait_s(catalog.quotas, address),
            guards(self._sasl(requests, Users(services.users, services.delegation))),
            requests,
        )
        self.groups = groups
        self.bootstrap = membership.address
        self.addresses = {name: render_address(address) for name, address in advertised.items()}
        self._look_for_itself(advertised)
        drain_s = settings.drain_ms / 1000 + 2 * STEP_TIMEOUT_S
        leave = partial(self._leave, groups, leases, jobs, membership)
        self._undo.append(("requests", drain_s, lambda: self._drain(server, tail, appender, leave)))

    async def _open_database(self) -> tuple[Database, HistoryStore, Histories]:
        settings = self.settings
        url = settings.database_url
        if url is None:
            embedded = EmbeddedPostgres(settings.data_dir, programs=settings.postgres_bin)
            self._undo.append(("embedded postgres", POSTGRES_STOP_TIMEOUT_S, embedded.stop))
            url = await embedded.start()
        try:
            database = await self._connect(url)
            self._undo.append(("database", 2 * STEP_TIMEOUT_S, lambda: database.close(STEP_TIMEOUT_S)))
            if settings.database_url is not None:
                await self._require_moved(database, url)
            place = settings.log_place
            history = HistoryStore(database, place if isinstance(place, Path) else None)
            await history.look_back()
            await migrate(database)
            histories = Histories(history)
            await histories.begin()
        except StorageError as error:
            raise StartError(f"cannot use {hide_password(url)}: {error}") from error
        return database, history, histories

    async def _require_moved(self, database: Database, url: str) -> None:
        """Refuse to start with an empty database beside an embedded Postgres that holds the data so far."""
        data_dir = self.settings.data_dir
        if not holds_cluster(data_dir) or EmbeddedPostgres(data_dir).running_url() == url or await has_tables(database):
            return
        raise StartError(
            f"the database is empty, and {data_dir.absolute()} holds the embedded Postgres of an earlier run: move it "
            "by `sluice backup` and `sluice restore` (docs/operate.md), or begin anew with another "
            "--data-dir"
        )

    async def _connect(self, url: str) -> Database:
        settings = self.settings
        deadline = time.monotonic() + DATABASE_PATIENCE_S
        last_told, remind_s = "", 0.0
        while True:
            try:
                return await Database.open(
                    url, hot_connections=settings.hot_connections, cold_connections=settings.cold_connections
                )
            except StorageUnavailable as error:
                now, text = time.monotonic(), str(error)
                if now > deadline:
                    raise
                if text != last_told or now >= remind_s:
                    logger.warning("waiting for the database", database=hide_password(url), error=text)
                    last_told, remind_s = text, now + DATABASE_REMINDER_S
                await asyncio.sleep(DATABASE_RETRY_S)

    def _limits(self) -> ConnectionLimits:
        broker = self.settings.broker
        return ConnectionLimits(
            max_request_bytes=broker.socket_request_max_bytes,
            max_idle_ms=broker.connections_max_idle_ms,
            max_connections=broker.max_connections,
        )

    def _tls(self, listener: Listener) -> Tls | None:
        """Read the listener's certificates. Raise ConfigError if they cannot be used."""
        security = listener_security(listener, self.settings.broker)
        if security.tls is None:
            return None
        failures = Failures("a TLS handshake failed", listener=listener.name)

        def failed(reason: str) -> None:
            self.metrics.protocol_errors.labels("tls_handshake").inc()
            failures.log(reason=reason)

        identify = None if security.sasl is not None else identify_by(security.tls)
        context = make_context(security.tls, failed)
        self._certificates.add(listener, context)
        return Tls(context, identify)

    def _sasl(self, requests: Mapping[str, Dispatch], known: Users) -> dict[str, ListenerSasl]:
        """Return the SASL state of the listeners whose clients use SASL; `requests` are their handlers."""
        broker = self.settings.broker
        delay_ms = broker.connection_failed_authentication_delay_ms
        made: dict[str, ListenerSasl] = {}
        for listener in self.settings.listeners:
            sasl = listener_security(listener, broker).sasl
            if sasl is not None:
                made[listener.name] = ListenerSasl(
                    listener.name, sasl, known, requests[listener.name], self.metrics, failure_delay_ms=delay_ms
                )
                self._undo.append((f"tokens of {listener.name}", STEP_TIMEOUT_S, made[listener.name].close))
        return made

    def _start_passes(
        self,
        reconciler: Reconciler,
        jobs: Jobs,
        wakeups: Wakeups,
        listener: notify.Listener,
        maintenance: Maintenance,
    ) -> None:
        def hearing() -> None:
            self.metrics.listener_reconnects.inc()
            wakeups.hearing()
            reconciler.hearing()
            jobs.wake("reconnected")

        start = self._supervisor.start
        start("leases", reconciler.keep_place, interval_ms=0)
        start("reconciliation", reconciler.converge, interval_ms=0)
        start("listening", lambda: listener.listen(hearing, wakeups.deaf), interval_ms=0, regular=False)
        start("announcements", wakeups.announce_all, interval_ms=0, regular=False)
        start("look at what is waited for", wakeups.look, interval_ms=0, regular=False)
        start("event loop lag", self._probe_lag, interval_ms=0)
        for each in maintenance.passes():
            if each.job is None:
                start(each.name, each.run, interval_ms=each.interval_ms)
            else:
                start(each.name, jobs.paced(each.job, each.name, each.run, each.interval_ms), interval_ms=0)
        start("jobs", jobs.keep, interval_ms=0)
        self._undo.append(("background loops", STEP_TIMEOUT_S, self._supervisor.stop))

    async def _probe_lag(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + LAG_PROBE_INTERVAL_S
        await asyncio.sleep(LAG_PROBE_INTERVAL_S)
        self.metrics.event_loop_lag.observe(max(0.0, loop.time() - due))

    async def _bind_http(self) -> HttpServer | None:
        if self.settings.metrics_listen is None:
            return None
        # Its packages take a tenth of the time that all imports take, and a node without metrics needs none of them.
        from gateway.operate.http import HttpServer

        host, port = self.settings.metrics_listen
        http = HttpServer(self.metrics)
        self._undo.append(("http", 2 * STEP_TIMEOUT_S, http.stop))
        try:
            await http.bind(host, port)
        except OSError as error:
            raise StartError(
                f"cannot serve metrics on {host}:{port} (see --metrics-listen): {_reason(error)}"
            ) from error
        return http

    async def _serve_http(
        self, http: HttpServer, exporter: Exporter, server: Server, services: Services, leases: Leases
    ) -> None:
        async def database() -> str | None:
            try:
                await services.topics.revision()
            except StorageError as error:
                return str(error)
            return None

        async def listener() -> str | None:
            return None if server.is_listening else "not accepting connections"

        async def coordinator() -> str | None:
            membership = services.membership
            if leases.held or membership.has_other_brokers or not membership.roles.is_broker:
                return None
            return "no lease is held"

        checks = {"database": database, "listener": listener, "coordinator": coordinator}
        await http.serve(exporter.snapshot, checks)

    def _look_for_itself(self, advertised: Mapping[str, Address]) -> None:
        looking = asyncio.create_task(warn_of_unreachable(advertised))

        async def stop() -> None:
            looking.cancel()
            await asyncio.wait((looking,))

        self._undo.append(("look at addresses", STEP_TIMEOUT_S, stop))

    # --- stopping -------------------------------------------------------------------------------------------------

    async def _drain(
        self, server: Server, tail: Tail, appender: Appender, leave: Callable[[float], Awaitable[None]]
    ) -> None:
        """Answer parked requests now, and let storage finish its work within `drain_ms`."""
        logger.info("draining")
        timeout_s = self.settings.drain_ms / 1000
        server.stop_accepting()
        tail.drain()
        # Requests that were read still reach groups and log while these drain; so connections come first and last.
        server.stop_reading()
        await asyncio.gather(leave(timeout_s), appender.drain(timeout_s))
        await server.drain(STEP_TIMEOUT_S)

    async def _leave(
        self, groups: Groups, leases: Leases, jobs: Jobs, membership: Membership, timeout_s: float
    ) -> None:
        """Release this node's leases once its pending writes are done, so that other nodes take over groups and jobs
        at once. The node withdraws first: a node that takes a shard assigned to a live node would hand it back."""
        await groups.drain(timeout_s)
        await membership.withdraw()
        releasing = asyncio.create_task(jobs.release())
        releasing.add_done_callback(_retrieve_error)
        try:
            await leases.release()
        finally:
            await asyncio.wait((releasing,), timeout=STEP_TIMEOUT_S)
        if releasing.done():
            releasing.result()


def _authorizer(broker: BrokerConfig, catalog: Catalog, metrics: Metrics) -> Authorizer | None:
    """Return the authorizer; None: every client may do everything."""
    if not broker.authorizer_class_name:
        return None
    authorizer = Authorizer(
        lambda: catalog.acls,
        principals(broker.super_users),
        allow_everyone=broker.allow_everyone_if_no_acl_found,
    )
    authorizer.denied = lambda kind, operation: metrics.denials.labels(kind.name, operation.name).inc()
    return authorizer


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


def _hints(
    reconciler: Reconciler, jobs: Jobs, wakeups: Wakeups, internal_logs: InternalLogs | None
) -> dict[str, Callable[[str], None]]:
    """Return the receivers of other nodes' notifications, by channel."""

    def nodes_heard(payload: str) -> None:
        reconciler.nodes_heard(payload)
        jobs.wake("notified")

    return {
        notify.REVISIONS: reconciler.revision_heard,
        notify.NODES: nodes_heard,
        notify.APPENDS: wakeups.heard,
        **({} if internal_logs is None else {notify.FOLLOWED: internal_logs.heard}),
    }


async def _bind(server: Server, listener: Listener, tls: Tls | None) -> Address:
    """Bind the listener and return the address to which its clients connect. Raise StartError if binding fails."""
    host, port = listener.bind
    try:
        bound_port = await server.bind(host, port, listener.name, tls)
    except OSError as error:
        raise StartError(
            f"cannot listen on {render_address(listener.bind)} (see --listen): {_reason(error)}"
        ) from error
    advertised_host, advertised_port = listener.advertised
    return advertised_host, advertised_port or bound_port


def _closing(store: ByteStore) -> Callable[[], Awaitable[None]]:
    async def close() -> None:
        store.close()

    return close


def _retrieve_error(step: asyncio.Future[Any]) -> None:
    """Retrieve the error of a step that ended after its time: the timeout was logged, and asyncio would log a trace."""
    if not step.cancelled():
        step.exception()


def _reason(error: OSError) -> str:
    """Return the error in the system's words: asyncio's repeat the address, and an unresolvable name has no errno."""
    code = error.errno or 0
    return os.strerror(code) if code > 0 else error.strerror or str(error)
