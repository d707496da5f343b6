"""StreamsGroupTopologyDescriptionUpdate: describe the nodes of an application's topology."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import array, int8, int16, int32, message, nested, string, struct


@struct
class TopologyDescriptionNode:
    name: str = string()
    node_type: int = int8()
    source_topics: tuple[str, ...] = array(string)
    sink_topic: str | None = string(nullable="0+", default=None)
    stores: tuple[str, ...] = array(string)
    successors: tuple[str, ...] = array(string)


@struct
class TopologyDescriptionSubtopology:
    subtopology_id: str = string()
    nodes: tuple[TopologyDescriptionNode, ...] = array(TopologyDescriptionNode)


@struct
class TopologyDescriptionGlobalStore:
    source: TopologyDescriptionNode = nested(TopologyDescriptionNode)
    processor: TopologyDescriptionNode = nested(TopologyDescriptionNode)


@struct
class TopologyDescription:
    subtopologies: tuple[TopologyDescriptionSubtopology, ...] = array(TopologyDescriptionSubtopology)
    global_stores: tuple[TopologyDescriptionGlobalStore, ...] = array(TopologyDescriptionGlobalStore)


@message(ApiKey.STREAMS_GROUP_TOPOLOGY_DESCRIPTION_UPDATE, versions="0", flexible="0+")
class StreamsGroupTopologyDescriptionUpdateRequest:
    group_id: str = string()
    member_id: str = string()
    topology_epoch: int = int32()
    topology_description: TopologyDescription = nested(TopologyDescription)


@message(ApiKey.STREAMS_GROUP_TOPOLOGY_DESCRIPTION_UPDATE, versions="0", flexible="0+")
class StreamsGroupTopologyDescriptionUpdateResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default=None)
