"""Kinds of groups that a node plays.

The one idea: a new kind is one machine more in `MACHINES` and one type more in each union. Code that looks into a group
takes an `AnyGroup`, so pyright sees every function that does not know a new kind.
"""

from __future__ import annotations

from gateway.coordinator.classic.machine import CLASSIC
from gateway.coordinator.classic.model import Group, Member
from gateway.coordinator.consumer.machine import CONSUMER
from gateway.coordinator.consumer.model import ConsumerGroup, ConsumerMember
from gateway.coordinator.machine import Machines
from gateway.coordinator.settings import Settings
from gateway.coordinator.share.machine import SHARE
from gateway.coordinator.share.model import ShareGroup, ShareMember
from gateway.coordinator.streams.machine import STREAMS
from gateway.coordinator.streams.model import StreamsGroup, StreamsMember

AnyGroup = Group | ConsumerGroup | StreamsGroup | ShareGroup
AnyMember = Member | ConsumerMember | StreamsMember | ShareMember

MACHINES: Machines[AnyGroup, Settings] = Machines(CLASSIC, CONSUMER, STREAMS, SHARE)
