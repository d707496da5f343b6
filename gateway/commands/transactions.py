"""`sluice transactions`: list, describe, abort, by Kafka's protocol, with any broker.

The one idea: to abort a transaction, act as the next producer (InitProducerId), as Kafka's own admin client does to
fence one. The coordinator then ends the whole transaction, and the producer that had it open gets an error. Markers to
single partitions would instead remove these from a transaction that may still be committed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from gateway.commands import log
from gateway.commands.arguments import Commands
from gateway.commands.client import Cluster, Coordinated, refuse
from gateway.commands.errors import CommandError
from gateway.commands.log import TopicPartition
from gateway.commands.render import Row, Value, show
from protocol.errors import ErrorCode

if TYPE_CHECKING:
    from protocol.messages.describe_transactions import TransactionState

DESCRIBED_AT_A_TIME = 500
ONGOING = "Ongoing"
NOTHING_OPEN = "Empty", "CompleteCommit", "CompleteAbort"
GROUPS_TOPIC = "__consumer_offsets"


def add_commands(commands: Commands, common: argparse.ArgumentParser) -> None:
    listing = commands.add_parser("list", parents=[common], help="every transactional id with its state")
    listing.add_argument("--state", action="append", default=[], help="only in this state; may be repeated")
    listing.add_argument(
        "--open", action="store_true", help="only those that have a transaction open, the oldest first"
    )
    listing.set_defaults(command=list_transactions)

    describing = commands.add_parser(
        "describe", parents=[common], help="the open transaction of an id, with its partitions"
    )
    describing.add_argument("id")
    describing.set_defaults(command=describe_transaction)

    aborting = commands.add_parser(
        "abort", parents=[common], help="abort the open transaction of an id, and fence the producer that has it open"
    )
    aborting.add_argument("id")
    aborting.set_defaults(command=abort_transaction)


def list_transactions(cluster: Cluster, given: argparse.Namespace) -> int:
    rows = _listed(cluster)
    wanted = {state.lower() for state in given.state}
    if wanted:
        rows = [row for row in rows if str(row["state"]).lower() in wanted]
    if given.open:
        rows = [row for row in rows if row["state"] not in NOTHING_OPEN]
        rows.sort(key=lambda row: str(row["started"] or "9999"))
    show(rows, ("id", "state", "producer_id", "epoch", "open_s", "broker"), as_json=given.json)
    return 0


def _listed(cluster: Cluster) -> list[Row]:
    """Return each id once. An id may move between two brokers while the command asks one after the other."""
    from protocol.messages.describe_transactions import DescribeTransactionsRequest, DescribeTransactionsResponse
    from protocol.messages.list_transactions import ListTransactionsRequest, ListTransactionsResponse

    found: dict[str, Row] = {}
    for node_id in cluster.node_ids:
        response = cluster.ask(ListTransactionsResponse, ListTransactionsRequest(), node_id=node_id)
        refuse(response.error_code, f"broker {node_id} lists no transactions")
        names = [listed.transactional_id for listed in response.transaction_states]
        for start in range(0, len(names), DESCRIBED_AT_A_TIME):
            request = DescribeTransactionsRequest(transactional_ids=tuple(names[start : start + DESCRIBED_AT_A_TIME]))
            described = cluster.ask(DescribeTransactionsResponse, request, node_id=node_id)
            for state in described.transaction_states:
                if state.error_code in (ErrorCode.TRANSACTIONAL_ID_NOT_FOUND, ErrorCode.NOT_COORDINATOR):
                    continue  # the id has expired or moved since it was listed
                refuse(state.error_code, f"transactional id {state.transactional_id}")
                found.setdefault(state.transactional_id, {**_head(state), "broker": node_id})
    return [found[name] for name in sorted(found)]


def _head(state: TransactionState) -> dict[str, Value]:
    started_ms = state.transaction_start_time_ms
    is_open = state.transaction_state not in NOTHING_OPEN and started_ms >= 0
    started = datetime.fromtimestamp(started_ms / 1000, UTC).isoformat(timespec="milliseconds") if is_open else None
    return {
        "id": state.transactional_id,
        "state": state.transaction_state,
        "producer_id": state.producer_id,
        "epoch": state.producer_epoch,
        "timeout_s": state.transaction_timeout_ms / 1000,
        "started": None if started is None else started.replace("+00:00", "Z"),
        "open_s": max(round(time.time() - started_ms / 1000), 0) if is_open else None,
    }


def describe_transaction(cluster: Cluster, given: argparse.Namespace) -> int:
    state = _described(cluster, given.id)
    head = _head(state)
    keys = sorted((topic.topic, partition) for topic in state.topics for partition in topic.partitions)
    partitions = _partition_rows(cluster, state.producer_id, keys)
    if given.json:
        show([{**head, "partitions": partitions}], (), as_json=True)
        return 0
    show([head], tuple(head), as_json=False)
    print("\nPartitions")
    if partitions:
        show(partitions, ("topic", "partition", "since", "stable_end"), as_json=False)
    else:
        print("none")
    return 0


def _described(cluster: Cluster, transactional_id: str) -> TransactionState:
    from protocol.messages.describe_transactions import DescribeTransactionsRequest, DescribeTransactionsResponse

    def code(response: DescribeTransactionsResponse) -> int:
        return response.transaction_states[0].error_code

    response = cluster.ask_coordinator(
        DescribeTransactionsResponse,
        transactional_id,
        DescribeTransactionsRequest(transactional_ids=(transactional_id,)),
        code,
        kind=Coordinated.TRANSACTION,
    )
    if code(response) == ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
        raise CommandError(f"there is no transactional id {transactional_id}. `sluice transactions list` shows them")
    refuse(code(response), f"transactional id {transactional_id}")
    return response.transaction_states[0]


def _partition_rows(cluster: Cluster, producer_id: int, keys: Sequence[TopicPartition]) -> list[Row]:
    """Return, by partition, the transaction's first offset and the last stable offset. Groups have no log that a
    client could read."""
    from protocol.messages.describe_producers import DescribeProducersRequest, DescribeProducersResponse, TopicRequest

    logs = [key for key in keys if key[0] != GROUPS_TOPIC]
    bounds = log.bounds(cluster, logs)
    since: dict[TopicPartition, int] = {}
    for leader, led in log.by_leader(cluster, logs).items():
        topics = tuple(
            TopicRequest(name=name, partition_indexes=tuple(partition for topic, partition in led if topic == name))
            for name in sorted({topic for topic, _ in led})
        )
        response = cluster.ask(DescribeProducersResponse, DescribeProducersRequest(topics=topics), node_id=leader)
        since |= {
            (topic.name, partition.partition_index): producer.current_txn_start_offset
            for topic in response.topics
            for partition in topic.partitions
            for producer in partition.active_producers
            if producer.producer_id == producer_id and producer.current_txn_start_offset >= 0
        }
    return [
        {
            "topic": topic,
            "partition": partition,
            "since": since.get((topic, partition)),
            "stable_end": bounds[topic, partition].end if (topic, partition) in bounds else None,
        }
        for topic, partition in keys
    ]


def abort_transaction(cluster: Cluster, given: argparse.Namespace) -> int:
    from protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse

    before = _described(cluster, given.id)
    if before.transaction_state != ONGOING:
        raise CommandError(f"{given.id} has no transaction open that can be aborted: it is {before.transaction_state}")

    def code(response: InitProducerIdResponse) -> int:
        return response.error_code

    # The open transaction's own timeout may exceed a limit that was lowered since. No transaction begins with this one.
    request = InitProducerIdRequest(transactional_id=given.id, transaction_timeout_ms=1)
    response = cluster.ask_coordinator(InitProducerIdResponse, given.id, request, code, kind=Coordinated.TRANSACTION)
    refuse(code(response), f"transactional id {given.id}")
    row = {
        "id": given.id,
        "result": "aborted",
        "fenced_epoch": before.producer_epoch,
        "epoch": response.producer_epoch,
    }
    show([row], ("id", "result", "fenced_epoch", "epoch"), as_json=given.json)
    return 0
