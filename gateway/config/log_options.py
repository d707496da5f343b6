"""Values of the options about log lines, apart from `gateway.operate.logs`, which loads the logger."""

from __future__ import annotations

from typing import Literal

LogFormat = Literal["auto", "console", "json"]
LOG_LEVELS = ("debug", "info", "warning", "error")
