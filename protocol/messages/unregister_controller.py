"""UnregisterController: forget a controller that is gone for good."""

from __future__ import annotations

from protocol.api_keys import ApiKey
from protocol.schema import int16, int32, message, string


@message(ApiKey.UNREGISTER_CONTROLLER, versions="0", flexible="0+")
class UnregisterControllerRequest:
    controller_id: int = int32()


@message(ApiKey.UNREGISTER_CONTROLLER, versions="0", flexible="0+")
class UnregisterControllerResponse:
    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable="0+", default="")
