"""Actions of an administrator on a group: a plan first, then the same plan carried out.

The one idea: every action has a plan, which is data that the page shows before it asks for a confirmation. Carrying it
out computes the plan again and compares a digest, so nothing happens that the viewer has not seen. Kafka's APIs decide
what is permitted. The journal tells what was done and by whom.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, NotRequired, TypedDict

import structlog

from gateway.console.cluster import GROUP_RESOURCE, ClusterViews
from gateway.console.decode import Json
from gateway.console.groups import GroupAnswer, GroupViews
from gateway.console.guard import BadRequestError
from gateway.console.kafka import ElsewhereError, Kafka, Viewer, refuse
from gateway.console.timeline import partitions_said
from gateway.console.topics import TopicViews
from gateway.security.kinds import AclOperation, ResourceType
from protocol.errors import ErrorCode, KafkaError
from protocol.messages.delete_groups import DeleteGroupsRequest, DeleteGroupsResponse
from protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
    OffsetDeleteResponse,
)
from storage.errors import StorageError
from storage.journal import JournalEvent, JournalStore

logger = structlog.get_logger(__name__)

MAX_VALUE_CHARS = 1_024
_COMMIT_BY_NAME = 9
"""Last version of OffsetCommit that names topics instead of using ids."""
_SET, _DELETE = 0, 1

Given = Mapping[str, Json]


class Plan(TypedDict):
    what: str
    """The action in one sentence."""
    rows: Sequence[Mapping[str, Json]]
    """The changes, one line each. `columns` holds the names of their columns."""
    columns: list[str]
    warnings: NotRequired[list[str]]
    """Reasons why the effect may be unexpected."""
    blocked: str | None
    """Reason why the action is impossible now, or None."""
    compared: NotRequired[Json]
    """The part of the plan that must be the same when the action is carried out. Without it, the whole plan."""
    digest: NotRequired[str]


class _Committed(NamedTuple):
    """A group's committed offset that is still within the log."""

    topic: str
    partition: int
    committed: int
    start: int
    end: int


class Actions:
    def __init__(
        self,
        kafka: Kafka,
        groups: GroupViews,
        topics: TopicViews,
        cluster: ClusterViews,
        journal: JournalStore | None,
    ) -> None:
        """`journal` is None if the node writes no journal. Then only the log records the actions."""
        self._kafka, self._groups, self._topics, self._cluster = kafka, groups, topics, cluster
        self._journal = journal
        self._kinds: dict[str, tuple[_Planner, _Doer]] = {
            "reset": (self._plan_reset, self._reset),
            "forget": (self._plan_forget, self._forget),
            "delete": (self._plan_delete, self._delete),
            "remove": (self._plan_remove, self._remove),
            "set": (self._plan_set, self._set),
        }

    async def plan(self, who: Viewer, given: Given) -> Plan:
        """Return what the action would do, with a digest. Raise BadRequestError, KafkaError, ElsewhereError."""
        planner, _ = self._of(given)
        group = await self._groups.describe(who, _text(given, "group"))
        plan = await planner(who, given, group)
        plan.setdefault("warnings", [])
        compared = plan.pop("compared", None)
        seen = json.dumps([given.get("action"), group["id"], compared or plan], sort_keys=True, default=str)
        plan["digest"] = hashlib.sha256(seen.encode()).hexdigest()
        return plan

    async def carry_out(self, who: Viewer, given: Given) -> dict[str, object]:
        """Carry out the plan with the given digest. Raise KafkaError if the plan would be different now."""
        plan = await self.plan(who, given)
        if plan.get("digest") != given.get("digest"):
            raise KafkaError(ErrorCode.INVALID_REQUEST, "The group has changed since you looked. Look at the new plan.")
        if plan["blocked"]:
            raise KafkaError(ErrorCode.INVALID_REQUEST, plan["blocked"])
        _, doer = self._of(given)
        try:
            await doer(who, given, plan)
        except (KafkaError, ElsewhereError) as error:
            # A part may have been carried out.
            await self._note(who, _text(given, "group"), f"tried to {plan['what']}: {error}")
            raise
        await self._note(who, _text(given, "group"), plan["what"])
        return {"done": plan["what"]}

    def _of(self, given: Given) -> tuple[_Planner, _Doer]:
        found = self._kinds.get(str(given.get("action")))
        if found is None:
            raise BadRequestError("there is no such action")
        return found

    async def _note(self, who: Viewer, group_id: str, what: str) -> None:
        logger.info("administrator acted", group_id=group_id, principal=who.name, host=who.host, what=what)
        if self._journal is None:
            return
        services = self._kafka.services
        row = JournalEvent(
            at_ms=services.clock.now_ms(),
            node_id=int(services.membership.node_id),
            group_id=group_id,
            generation_id=-1,
            group_type="",
            kind="observed",
            reason="administered",
            detail=f"{who.name} at {who.host.removeprefix('/')}: {what}",
        )
        try:
            await self._journal.make_partitions()
            await self._journal.write((row,))
        except StorageError as error:
            logger.warning("action not written to the journal", group_id=group_id, what=what, error=str(error))

    # --- reset offsets ------------------------------------------------------------------------------------------------

    async def _plan_reset(self, who: Viewer, given: Given, group: GroupAnswer) -> Plan:
        self._kafka.require(who, AclOperation.READ, ResourceType.GROUP, group["id"])
        target, value = _text(given, "to"), given.get("value")
        if target in ("offset", "time", "shift") and not isinstance(value, int):
            raise BadRequestError(
                "enter how many records to move by" if target == "shift" else f"enter the {target} to reset to"
            )
        chosen = _partitions(given)
        known = _committed(group)
        at_time = await self._at_time(who, known, _number(value)) if target == "time" else {}
        rows: list[dict[str, Json]] = []
        compared: list[Json] = []
        moves: dict[tuple[str, int], int] = {}
        for row in known:
            key = row.topic, row.partition
            if chosen and key not in chosen and (row.topic, None) not in chosen:
                continue
            new = _target(target, value, row, at_time.get(key))
            if new != row.committed:
                moves[key] = new - row.committed
            # Producers move the end of the log all the time. A target there stays the end, wherever that is.
            compared.append([*key, row.committed, "end" if new == row.end else new])
            rows.append(
                {
                    "topic": row.topic,
                    "partition": row.partition,
                    "committed": row.committed,
                    "new": new,
                    "moved": new - row.committed,
                    "lag": row.end - new,
                }
            )
        again = sum(-moved for moved in moves.values() if moved < 0)
        skipped = sum(moved for moved in moves.values() if moved > 0)
        warnings: list[str] = []
        if again:
            warnings.append(f"The group will read {again:,} records again.")
        if skipped:
            warnings.append(f"The group will skip {skipped:,} records. It will not read them.")
        blocked = None
        if not rows:
            blocked = "The group has committed no offset that could be reset."
        elif not moves:
            blocked = "Every offset is there already, so nothing would change."
        elif group["memberCount"]:
            blocked = "The group has members. Stop its consumers first, because they would commit over the new offsets."
        where = partitions_said(list(moves))
        to = {"earliest": "the beginning", "latest": "the end"}.get(target, f"{target} {value}")
        return {
            "what": f"reset offsets of {where} to {to}" if moves else "reset offsets",
            "rows": rows,
            "columns": ["topic", "partition", "committed", "new", "moved", "lag"],
            "warnings": warnings,
            "blocked": blocked,
            "compared": [target, value, blocked, *compared],
        }

    async def _at_time(self, who: Viewer, rows: Sequence[_Committed], at_ms: int) -> dict[tuple[str, int], int]:
        found: dict[tuple[str, int], int] = {}
        for topic in {row.topic for row in rows}:
            partitions = [row.partition for row in rows if row.topic == topic]
            for index, offset in (await self._topics.bounds(who, topic, partitions, at_ms)).items():
                found[topic, index] = offset
        return found

    async def _reset(self, who: Viewer, given: Given, plan: Plan) -> None:
        moved = [row for row in plan["rows"] if row["moved"]]
        topics = tuple(
            OffsetCommitRequestTopic(
                name=name,
                partitions=tuple(
                    OffsetCommitRequestPartition(
                        partition_index=_number(row["partition"]),
                        committed_offset=_number(row["new"]),
                        committed_metadata="",
                    )
                    for row in moved
                    if row["topic"] == name
                ),
            )
            for name in sorted({str(row["topic"]) for row in moved})
        )
        group_id = _text(given, "group")
        response = await self._kafka.ask_coordinator(
            OffsetCommitResponse,
            group_id,
            OffsetCommitRequest(group_id=group_id, topics=topics),
            who,
            at_most=_COMMIT_BY_NAME,
        )
        for topic in response.topics:
            for partition in topic.partitions:
                refuse(partition.error_code, what=lambda t=topic, p=partition: f"{t.name}[{p.partition_index}]")

    # --- delete offsets, delete the group -----------------------------------------------------------------------------

    async def _plan_forget(self, who: Viewer, given: Given, group: GroupAnswer) -> Plan:
        self._kafka.require(who, AclOperation.DELETE, ResourceType.GROUP, group["id"])
        topic = _text(given, "topic")
        rows: list[dict[str, Json]] = [
            {"topic": topic, "partition": row["partition"], "committed": row["committed"]}
            for row in group["offsets"]
            if row["topic"] == topic and row["committed"] is not None
        ]
        # A plan has a bounded number of rows, and nothing else is deleted.
        where = partitions_said([(topic, _number(row["partition"])) for row in rows]) or topic
        return {
            "what": f"delete the committed offsets of topic {where}",
            "rows": rows,
            "columns": ["topic", "partition", "committed"],
            "warnings": ["A consumer that comes back begins where its auto.offset.reset says."],
            "blocked": None if rows else f"The group has committed no offset of topic {topic}.",
        }

    async def _forget(self, who: Viewer, given: Given, plan: Plan) -> None:
        group_id, topic = _text(given, "group"), _text(given, "topic")
        partitions = tuple(
            OffsetDeleteRequestPartition(partition_index=_number(row["partition"])) for row in plan["rows"]
        )
        request = OffsetDeleteRequest(
            group_id=group_id, topics=(OffsetDeleteRequestTopic(name=topic, partitions=partitions),)
        )
        response = await self._kafka.ask_coordinator(OffsetDeleteResponse, group_id, request, who)
        refuse(response.error_code)
        for each in response.topics:
            for partition in each.partitions:
                refuse(partition.error_code, what=lambda p=partition: f"{topic}[{p.partition_index}]")

    async def _plan_delete(self, who: Viewer, given: Given, group: GroupAnswer) -> Plan:
        self._kafka.require(who, AclOperation.DELETE, ResourceType.GROUP, group["id"])
        return {
            "what": f"delete the group {group['id']} with its offsets",
            "rows": [],
            "columns": [],
            "warnings": ["All its committed offsets are deleted. This cannot be undone."],
            "blocked": "The group has members. Stop its consumers first." if group["memberCount"] else None,
        }

    async def _delete(self, who: Viewer, given: Given, plan: Plan) -> None:
        group_id = _text(given, "group")
        response = await self._kafka.ask_coordinator(
            DeleteGroupsResponse, group_id, DeleteGroupsRequest(groups_names=(group_id,)), who
        )
        refuse(response.results[0].error_code, response.results[0].error_message)

    # --- remove a member ----------------------------------------------------------------------------------------------

    async def _plan_remove(self, who: Viewer, given: Given, group: GroupAnswer) -> Plan:
        self._kafka.require(who, AclOperation.READ, ResourceType.GROUP, group["id"])
        member = next((each for each in group["members"] if each["id"] == _text(given, "member")), None)
        if member is None:
            return {"what": "remove a member", "rows": [], "columns": [], "blocked": "The member has left the group."}
        owned = [(each["topic"], each["partition"]) for each in member["owned"]]
        warnings = ["The group rebalances."]
        if owned:
            warnings.append(f"{partitions_said(owned)} go to other members.")
        warnings.append("The client joins again if it still runs.")
        blocked = f"Kafka has no request that removes a member of a {group['type']} group."
        return {
            "what": f"remove member {member['id']} of client {member['client']}",
            "rows": [{"topic": topic, "partition": index} for topic, index in owned],
            "columns": ["topic", "partition"],
            "warnings": warnings,
            "blocked": None if group["type"] in ("classic", "consumer") else blocked,
        }

    async def _remove(self, who: Viewer, given: Given, plan: Plan) -> None:
        group_id, member_id = _text(given, "group"), _text(given, "member")
        identity = MemberIdentity(member_id=member_id, reason="member was removed by an admin in the console")
        response = await self._kafka.ask_coordinator(
            LeaveGroupResponse, group_id, LeaveGroupRequest(group_id=group_id, members=(identity,)), who
        )
        refuse(response.error_code)
        for each in response.members:
            refuse(each.error_code)

    # --- settings of the group ----------------------------------------------------------------------------------------

    async def _plan_set(self, who: Viewer, given: Given, group: GroupAnswer) -> Plan:
        name, value = _text(given, "name"), given.get("value")
        await self._alter(who, group["id"], name, value, validate_only=True)
        before = {str(row["name"]): row for row in await self._cluster.settings(who, GROUP_RESOURCE, group["id"])}
        old = before.get(name, {}).get("value")
        shown = f"to {value}" if value not in (None, "") else "back to the node's value"
        return {
            "what": f"set {name} of the group {shown}",
            "rows": [{"setting": name, "before": old, "after": value}],
            "columns": ["setting", "before", "after"],
            "blocked": "The setting has this value already." if old == value else None,
        }

    async def _set(self, who: Viewer, given: Given, plan: Plan) -> None:
        await self._alter(who, _text(given, "group"), _text(given, "name"), given.get("value"), validate_only=False)

    async def _alter(self, who: Viewer, group_id: str, name: str, value: Json, *, validate_only: bool) -> None:
        if value is not None and (not isinstance(value, str) or len(value) > MAX_VALUE_CHARS):
            raise BadRequestError("the value is not a short text")
        config = AlterableConfig(name=name, config_operation=_SET if value else _DELETE, value=value or None)
        resource = AlterConfigsResource(resource_type=GROUP_RESOURCE, resource_name=group_id, configs=(config,))
        request = IncrementalAlterConfigsRequest(resources=(resource,), validate_only=validate_only)
        response = await self._kafka.ask(IncrementalAlterConfigsResponse, request, who)
        refuse(response.responses[0].error_code, response.responses[0].error_message)


_Planner = Callable[[Viewer, Given, GroupAnswer], Awaitable[Plan]]
_Doer = Callable[[Viewer, Given, Plan], Awaitable[None]]


def _committed(group: GroupAnswer) -> list[_Committed]:
    """Return those committed offsets that are within their partition's log."""
    found: list[_Committed] = []
    for row in group["offsets"]:
        committed, start, end = row["committed"], row.get("start"), row.get("end")
        if committed is not None and start is not None and end is not None:
            found.append(_Committed(row["topic"], row["partition"], committed, start, end))
    return found


def _target(target: str, value: Json, row: _Committed, at_time: int | None) -> int:
    match target:
        case "earliest":
            new = row.start
        case "latest":
            new = row.end
        case "offset":
            new = _number(value)
        case "shift":
            new = row.committed + _number(value)
        case "time":
            new = row.end if at_time is None else at_time
        case _:
            raise BadRequestError("reset to earliest, latest, offset, time or shift")
    return min(max(new, row.start), row.end)


def _number(value: Json) -> int:
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise BadRequestError("a number is missing or has more than 64 bits")
    return value


def _text(given: Given, name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequestError(f"{name} is missing")
    return value


def _partitions(given: Given) -> set[tuple[str, int | None]]:
    """Return the chosen partitions. None stands for all partitions of a topic, and an empty result for all of all."""
    value = given.get("partitions", [])
    if not isinstance(value, list):
        raise BadRequestError("partitions is not a list")
    found: set[tuple[str, int | None]] = set()
    for each in value:
        if not isinstance(each, dict):
            raise BadRequestError("a partition has a topic and a number")
        found.add((_text(each, "topic"), _number(each["partition"]) if "partition" in each else None))
    return found
