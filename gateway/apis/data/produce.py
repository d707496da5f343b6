"""Produce: append validated batches to the log, in the order in which the connection sent them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple, Protocol
from uuid import UUID

import structlog

from gateway.apis.partition_lookup import resolve_topics, unknown_topic
from gateway.apis.services import (
    FindsTopics,
    HasAppender,
    HasCatalog,
    HasClock,
    HasLog,
    HasMetrics,
    HasRecompressor,
    HasTransactions,
    HasValidator,
)
from gateway.apis.transactions.enlist import enlist_in_transaction
from gateway.log.batch_validation import Refused
from gateway.log.recompression import PRODUCER, Batch, wanted_codec
from gateway.log.topic_names import why_illegal
from gateway.log.validator import Unchecked, Verdict
from gateway.net.context import RequestContext
from gateway.net.errors import REFUSAL_CODES
from gateway.net.pieces import PIECE, by_pieces, in_pieces, tally
from gateway.net.refusals import DerivedRefusal
from gateway.security.authorizer import REFUSALS, HasAuthorizer, may_topic
from gateway.security.kinds import AclOperation, ResourceType
from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.produce import (
    BatchIndexAndErrorMessage,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from protocol.records import correct_max_timestamp, set_log_append_time
from storage.errors import StorageError
from storage.types import Appended, NewBatch, Partition, PartitionKey, ReadRequest, ReadResult, Refusal, Topic

logger = structlog.get_logger(__name__)

FIRST_VERSION_WITH_ABORTABLE = 11
FIRST_VERSION_THAT_TAKES_IN = 12
FIRST_VERSION_WITH_TOPIC_IDS = 13
MIN_TIMEOUT_MS = 5_000
"""Upstream's leader appends however long that takes; a client's tiny timeout must not turn a commit into a repeat."""
MAX_TIMEOUT_MS = 120_000
MAX_LOGGED_REFUSALS = 10
"""Maximal number of log lines about batches of one request that were refused before the append. The counter counts all
such batches."""


class ProduceServices(
    FindsTopics, HasAppender, HasClock, HasLog, HasMetrics, HasRecompressor, HasTransactions, HasValidator, Protocol
): ...


class _Planned(NamedTuple):
    """A batch for a partition that exists, not checked yet. It is a tuple, like everything made for every batch: a
    frozen dataclass takes three times as long."""

    topic: str
    partition: Partition
    batch: Unchecked


class _Submitted(NamedTuple):
    topic: str
    partition: Partition
    outcome: asyncio.Future[Appended | Refusal]
    log_append_time_ms: int
    producer_id: int
    size_bytes: int


_Asked = tuple[TopicProduceData, PartitionProduceData]
_Plan = Refused | _Planned
_Judged = tuple[_Plan, Verdict]
_Attempt = Refused | _Submitted
"""One try to append a request's batches, with one outcome per partition in the request's order."""


async def produce(request: ProduceRequest, context: RequestContext[ProduceServices]) -> ProduceResponse:
    """Append batches. acks 1 and −1 both wait for the durable commit. acks 0 waits too, but the client awaits no
    answer, so a request with a forbidden partition is refused as a whole.

    Batches are judged as soon as they arrive, concurrently with those of earlier requests. They are submitted when the
    request's turn comes, so requests of one connection enter the log in the order of their arrival. Recompression to a
    topic's codec also happens in that turn. Postgres decides idempotence: a duplicate is answered with its first
    offset. Postgres also decides whether a batch belongs to an open transaction: a batch behind its transaction's
    marker is refused. From version 12 on a partition is enlisted in the transaction when it is written to (KIP-890), in
    the request's turn.
    """
    if request.acks not in (-1, 0, 1):
        raise KafkaError(ErrorCode.INVALID_REQUIRED_ACKS, f"acks must be -1, 0 or 1, not {request.acks}")
    if len(request.topic_data) == 1 and len(request.topic_data[0].partition_data) == 1:
        answers = await _produce_one(request, context)
    else:
        answers = await _produce_all(request, await _asked(request), context)
    if not awaits_answer(request):
        for answer in answers:
            if answer.error_code:
                raise KafkaError(ErrorCode(answer.error_code), answer.error_message)
    return await _respond(request, answers)


async def _produce_one(
    request: ProduceRequest, context: RequestContext[ProduceServices]
) -> list[PartitionProduceResponse]:
    """Append one batch. Most requests of stock clients have just one. If nothing prevents it, the batch takes its place
    in the log in the same turn of the event loop.
    """
    requested = request.topic_data[0]
    data = requested.partition_data[0]
    attempt = _attempt_at_once(requested, data, context, request.transactional_id)
    if attempt is None:
        return await _produce_all(request, ((requested, data),), context)
    if isinstance(attempt, Refused):
        await _tell_refusals(((requested, data),), [attempt], context)
    else:
        await _settle_one(request, attempt.outcome)
    return [await _answer(data.index, attempt, context)]


def _attempt_at_once(
    requested: TopicProduceData,
    data: PartitionProduceData,
    context: RequestContext[ProduceServices],
    transactional_id: str | None,
) -> _Attempt | None:
    """Return None, and do nothing, if more is needed than a look at the batch: its topic is unknown here or
    internal, it is large or compressed or needs another codec, its partition is not enlisted, or an earlier request
    is still in line."""
    place = context.place
    topic = _known(requested, context)
    if topic is None or topic.internal or not place.reached:
        return None
    if context.services.authorizer is not None and not _may_write(context, topic.name, told=False):
        return None
    plan = _plan_partition(topic, data, context)
    if isinstance(plan, Refused) or plan.batch.config.compression_type != PRODUCER:
        return None
    now_ms = context.services.clock.now_ms()
    verdict = context.services.validator.judge_plain(plan.batch, now_ms)
    if verdict is None or _is_first(plan, verdict, context):
        return None
    attempt = _submit_partition(plan, verdict, context, now_ms, transactional_id)
    place.leave()
    return attempt


async def _settle_one(request: ProduceRequest, outcome: asyncio.Future[Appended | Refusal]) -> None:
    """Wait for one outcome, as `_settle` does for many. Cancelling this request cancels the wait."""
    timer = asyncio.get_running_loop().call_at(_deadline_s(request), outcome.cancel)
    try:
        await outcome
    except StorageError:
        pass  # The outcome has the error for the answer.
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not outcome.cancelled() or task is None or task.cancelling():
            raise
    finally:
        timer.cancel()


async def _produce_all(
    request: ProduceRequest, asked: Sequence[_Asked], context: RequestContext[ProduceServices]
) -> list[PartitionProduceResponse]:
    judged = None
    if all(_known(topic, context) for topic in request.topic_data):
        judged = await _judge(asked, context, unknown_topic(by_id=_by_id(context)))
    room_bytes = 0
    try:
        async with context.place:
            if judged is None:
                named = ((topic.name, topic.topic_id) for topic in request.topic_data)
                missing_topic = await resolve_topics(named, context, by_id=_by_id(context))
                judged = await _judge(asked, context, missing_topic)
            judged, room_bytes = await _recompress(judged, context)
            judged = await _take_in(judged, request.transactional_id, context)
            attempts = await _submit(asked, judged, context, request.transactional_id)
        await _settle(request, attempts)
    finally:
        context.services.recompressor.give_back(room_bytes)
    return [
        await _answer(data.index, attempt, context)
        async for (_, data), attempt in in_pieces(zip(asked, attempts, strict=True))
    ]


refuse_produce = DerivedRefusal(ApiKey.PRODUCE, values={"base_offset": -1})


def awaits_answer(request: ProduceRequest) -> bool:
    return request.acks != 0


def _by_id(context: RequestContext[object]) -> bool:
    return context.version >= FIRST_VERSION_WITH_TOPIC_IDS


def _known(topic: TopicProduceData, context: RequestContext[HasCatalog]) -> Topic | None:
    catalog = context.services.catalog
    return catalog.get_by_id(topic.topic_id) if _by_id(context) else catalog.get(topic.name)


async def _asked(request: ProduceRequest) -> Sequence[_Asked]:
    asked: list[_Asked] = []
    async for topic in in_pieces(request.topic_data):
        asked += [(topic, data) async for data in in_pieces(topic.partition_data)]
    return asked


async def _judge(
    asked: Sequence[_Asked], context: RequestContext[ProduceServices], missing_topic: ErrorCode
) -> list[_Judged]:
    repeated = await _repeated(asked)
    plans = await by_pieces(lambda some: _plan(some, repeated, context, missing_topic), asked)
    batches = [plan.batch for plan in plans if isinstance(plan, _Planned)]
    now_ms = context.services.clock.now_ms()
    validator = context.services.validator
    verdicts = validator.judge_at_once(batches, now_ms)
    if verdicts is None:
        verdicts = await validator.judge(batches, now_ms)
    rest = iter(verdicts)
    return await by_pieces(
        lambda some: [(plan, plan if isinstance(plan, Refused) else next(rest)) for plan in some], plans
    )


async def _repeated(asked: Sequence[_Asked]) -> Collection[tuple[str, UUID, int]]:
    """Return the partitions that are named more than once."""
    if len(asked) == 1:
        return ()
    named = await tally((topic.name, topic.topic_id, data.index) for topic, data in asked)
    if len(named) == len(asked):
        return ()
    return {name async for name in in_pieces(named) if named[name] > 1}


async def _recompress(judged: list[_Judged], context: RequestContext[ProduceServices]) -> tuple[list[_Judged], int]:
    """Return the batches in their topics' codecs, and the memory that the new batches take."""
    places: list[int] = []
    batches: list[Batch] = []
    for place, (plan, head) in enumerate(judged):
        if isinstance(plan, Refused) or isinstance(head, Refused) or wanted_codec(head, plan.batch.config) is None:
            continue
        places.append(place)
        batches.append((plan.batch.records or b"", plan.batch.config))
    if not batches:
        return judged, 0
    made, room_bytes = await context.services.recompressor.recompress(batches)
    for place, records in zip(places, made, strict=True):
        plan, head = judged[place]
        if isinstance(records, Refused):
            judged[place] = records, records
        elif isinstance(plan, _Planned):
            judged[place] = plan._replace(batch=plan.batch._replace(records=memoryview(records))), head
    return judged, room_bytes


def _is_first(plan: _Planned, head: Verdict, context: RequestContext[HasTransactions]) -> bool:
    """Return whether the batch's partition must be enlisted here because this node has not done so yet."""
    return (
        context.version >= FIRST_VERSION_THAT_TAKES_IN
        and not isinstance(head, Refused)
        and head.is_transactional
        and not context.services.transactions.taken_in.has(
            head.producer_id, head.producer_epoch, plan.partition.partition_key
        )
    )


async def _take_in(
    judged: list[_Judged], transactional_id: str | None, context: RequestContext[HasTransactions]
) -> list[_Judged]:
    """Enlist partitions, and return the batches whose partition is enlisted."""
    if not transactional_id or context.version < FIRST_VERSION_THAT_TAKES_IN:
        return judged
    first: dict[tuple[int, int], dict[PartitionKey, int]] = {}
    async for place, (plan, head) in in_pieces(enumerate(judged)):
        if isinstance(plan, Refused) or isinstance(head, Refused) or not _is_first(plan, head, context):
            continue
        places = first.setdefault((head.producer_id, head.producer_epoch), {})
        places[plan.partition.partition_key] = place
    for producer, places in first.items():
        if code := await enlist_in_transaction(transactional_id, *producer, context, partition_keys=list(places)):
            refused = Refused(code, "the transaction does not take in the partition")
            async for place in in_pieces(places.values()):
                judged[place] = refused, refused
    return judged


def _plan(
    asked: Sequence[_Asked],
    repeated: Collection[tuple[str, UUID, int]],
    context: RequestContext[FindsTopics],
    missing_topic: ErrorCode,
) -> list[_Plan]:
    plans: list[_Plan] = []
    before: TopicProduceData | None = None
    topic: Topic | Refused | None = None
    for requested, data in asked:
        if requested is not before or topic is None:
            topic = _writable(requested, context, missing_topic)
            before = requested
        if repeated and (requested.name, requested.topic_id, data.index) in repeated:
            plans.append(Refused(ErrorCode.INVALID_REQUEST, f"partition {data.index} appears more than once"))
        else:
            plans.append(topic if isinstance(topic, Refused) else _plan_partition(topic, data, context))
    return plans


def _plan_partition(topic: Topic, data: PartitionProduceData, context: RequestContext[HasCatalog]) -> _Plan:
    if not 0 <= data.index < len(topic.partitions):
        return Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the topic has no such partition")
    services, partition = context.services, topic.partitions[data.index]
    config = services.catalog.config(topic)
    records = None if data.records is None else memoryview(data.records)
    return _Planned(topic.name, partition, Unchecked(records, context.version, config))


async def _submit(
    asked: Sequence[_Asked],
    judged: list[_Judged],
    context: RequestContext[ProduceServices],
    transactional_id: str | None,
) -> list[_Attempt]:
    """Enqueue the accepted batches."""
    now_ms = context.services.clock.now_ms()
    attempts: list[_Attempt] = await by_pieces(
        lambda some: [
            plan if isinstance(plan, Refused) else _submit_partition(plan, verdict, context, now_ms, transactional_id)
            for plan, verdict in some
        ],
        judged,
    )
    if any(isinstance(attempt, Refused) for attempt in attempts):
        await _tell_refusals(asked, attempts, context)
    return attempts


async def _tell_refusals(
    asked: Sequence[_Asked], attempts: list[_Attempt], context: RequestContext[HasMetrics]
) -> None:
    refusals: Counter[ErrorCode] = Counter()
    async for (requested, data), attempt in in_pieces(zip(asked, attempts, strict=True)):
        if isinstance(attempt, Refused):
            refusals[attempt.code] += 1
            if refusals.total() <= MAX_LOGGED_REFUSALS:
                _log_refusal(requested.name or str(requested.topic_id), data.index, attempt)
    for code, count in refusals.items():
        context.services.metrics.refused_batches.labels(code.name).inc(count)


def _writable(
    requested: TopicProduceData, context: RequestContext[FindsTopics], missing_topic: ErrorCode
) -> Topic | Refused:
    topic = _known(requested, context)
    if topic is None and _by_id(context):
        return Refused(missing_topic, "no topic has this id")
    if not _may_write(context, requested.name if topic is None else topic.name):
        return Refused(*REFUSALS[ResourceType.TOPIC])
    if topic is None:
        if why_illegal(requested.name):
            return Refused(ErrorCode.INVALID_TOPIC_EXCEPTION, "the topic's name is illegal")
        return Refused(missing_topic, "the topic does not exist")
    if topic.internal:
        return Refused(ErrorCode.INVALID_TOPIC_EXCEPTION, "the topic is internal: clients may not write to it")
    return topic


def _may_write(context: RequestContext[HasAuthorizer], topic: str, *, told: bool = True) -> bool:
    return may_topic(context, AclOperation.WRITE, topic, told=told)


def _submit_partition(
    plan: _Planned, head: Verdict, context: RequestContext[ProduceServices], now_ms: int, transactional_id: str | None
) -> _Attempt:
    if isinstance(head, Refused):
        return head
    if head.is_transactional and not transactional_id:
        return Refused(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "a transaction's batch without its id")
    records = memoryview(plan.batch.records or b"")
    if records.readonly:
        records = memoryview(bytearray(records))
    log_append_time_ms = -1
    if plan.batch.config.log_append_time:
        set_log_append_time(records, now_ms)
        log_append_time_ms = now_ms
    else:
        correct_max_timestamp(records, head.max_timestamp)
    outcome = context.services.appender.submit(
        NewBatch(
            partition_key=plan.partition.partition_key,
            records=records,
            record_count=head.records_count,
            max_timestamp_ms=head.max_timestamp if log_append_time_ms < 0 else now_ms,
            producer_id=head.producer_id,
            producer_epoch=head.producer_epoch,
            base_sequence=head.base_sequence,
            is_transactional=head.is_transactional,
        ),
        context.place,
    )
    return _Submitted(plan.topic, plan.partition, outcome, log_append_time_ms, head.producer_id, len(records))


def _log_refusal(topic: str, partition: int, refused: Refused) -> None:
    logger.info(
        "record batch refused", topic=topic, partition=partition, error=refused.code.name, reason=refused.message
    )


async def _settle(request: ProduceRequest, attempts: list[_Attempt]) -> None:
    """Wait for the submitted batches as long as the request may take, and then give up those that remain."""
    deadline_s = _deadline_s(request)
    outcomes = [attempt.outcome for attempt in attempts if isinstance(attempt, _Submitted)]
    for start in range(0, len(outcomes), PIECE):
        piece = outcomes[start : start + PIECE]
        await _all_done(piece, deadline_s)
        for outcome in piece:
            # The producer must retry the batch, so it need not be written if its commit has not begun.
            outcome.cancel()


def _deadline_s(request: ProduceRequest) -> float:
    """Return the loop time until which the request may wait."""
    return asyncio.get_running_loop().time() + min(max(request.timeout_ms, MIN_TIMEOUT_MS), MAX_TIMEOUT_MS) / 1000


async def _all_done(outcomes: list[asyncio.Future[Appended | Refusal]], deadline_s: float) -> None:
    """Wait until no outcome is pending, or until the deadline (loop time). Like asyncio.wait, at a third of its
    cost."""
    waited = [outcome for outcome in outcomes if not outcome.done()]
    if not waited:
        return
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    pending = len(waited)

    def end() -> None:
        if not over.done():
            over.set_result(None)

    def count(_outcome: asyncio.Future[Appended | Refusal]) -> None:
        nonlocal pending
        pending -= 1
        if not pending:
            end()

    for outcome in waited:
        outcome.add_done_callback(count)
    timer = loop.call_at(deadline_s, end)
    try:
        await over
    finally:
        timer.cancel()
        if pending:
            for outcome in waited:
                outcome.remove_done_callback(count)


async def _answer(index: int, attempt: _Attempt, context: RequestContext[ProduceServices]) -> PartitionProduceResponse:
    """Return the part of the answer for one batch."""
    if isinstance(attempt, Refused):
        return _refusal(index, attempt)
    if attempt.outcome.cancelled():
        return _refusal(index, Refused(ErrorCode.REQUEST_TIMED_OUT, "the commit did not end in time"))
    try:
        result = attempt.outcome.result()
    except StorageError as error:
        code = context.storage_failed(context.api_key, error)
        return _refusal(index, Refused(code, "storage was lost; the outcome of the append is unknown"))
    if isinstance(result, Refusal):
        code = REFUSAL_CODES[result]
        if result is Refusal.UNKNOWN_PARTITION and _by_id(context):
            code = ErrorCode.UNKNOWN_TOPIC_ID
        elif result is Refusal.NOT_IN_TRANSACTION and context.version >= FIRST_VERSION_THAT_TAKES_IN:
            # The transaction has ended since this node remembered it. If the client sends the batch again, Postgres
            # judges it by the present state.
            context.services.transactions.taken_in.forget(attempt.producer_id)
            code = ErrorCode.CONCURRENT_TRANSACTIONS
        elif result is Refusal.NOT_IN_TRANSACTION and context.version >= FIRST_VERSION_WITH_ABORTABLE:
            code = ErrorCode.TRANSACTION_ABORTABLE
        refused = Refused(code, f"refused by the log: {result.value}")
        context.services.metrics.refused_batches.labels(code.name).inc()
        _log_refusal(attempt.topic, index, refused)
        return _refusal(index, refused)
    if not result.duplicate:
        context.services.metrics.count_topic_bytes_in(attempt.topic, attempt.size_bytes)
    log_append_time_ms = attempt.log_append_time_ms
    if result.duplicate and log_append_time_ms >= 0:
        log_append_time_ms = await _first_append_time(attempt.partition, result.base_offset, context)
    return PartitionProduceResponse(
        index=index,
        base_offset=result.base_offset,
        log_append_time_ms=log_append_time_ms,
        log_start_offset=result.log_start_offset,
    )


async def _first_append_time(partition: Partition, base_offset: int, context: RequestContext[HasLog]) -> int:
    """Return the append time of a duplicate's original (KIP-32), or −1 if it is no longer in the log."""
    asked = [ReadRequest(partition.partition_key, base_offset, 1)]
    try:
        (result,) = await context.services.log.read(asked, max_bytes=1)
    except StorageError:
        return -1
    if isinstance(result, ReadResult) and result.batches and result.batches[0].base_offset == base_offset:
        return result.batches[0].max_timestamp_ms
    return -1


async def _respond(request: ProduceRequest, answers: list[PartitionProduceResponse]) -> ProduceResponse:
    if len(answers) == 1 and len(request.topic_data) == 1:
        topic = request.topic_data[0]
        only = TopicProduceResponse(name=topic.name, topic_id=topic.topic_id, partition_responses=tuple(answers))
        return ProduceResponse(responses=(only,))
    rest = iter(answers)
    responses = [
        TopicProduceResponse(
            name=topic.name,
            topic_id=topic.topic_id,
            partition_responses=tuple(islice(rest, len(topic.partition_data))),
        )
        async for topic in in_pieces(request.topic_data)
    ]
    return ProduceResponse(responses=tuple(responses))


def _refusal(index: int, refused: Refused) -> PartitionProduceResponse:
    return PartitionProduceResponse(
        index=index,
        error_code=refused.code,
        base_offset=-1,
        error_message=refused.message,
        record_errors=tuple(
            BatchIndexAndErrorMessage(batch_index=record_index, batch_index_error_message=reason)
            for record_index, reason in refused.record_errors
        ),
    )
