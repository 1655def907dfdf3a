"""A pipeline's numbers as JSON: program.json keeps them, so that a written program can be simulated and emulated.

to_json(pipeline) -> dict        from_json(data, where) -> Pipeline
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from csc.errors import InputError
from csc.simulation.pipeline import Link, Loads, Network, Pipeline, RankNodes, StageWork

_REMEDY = "Compile the program again"
OPTIONAL = ("gathered", "gather", "working")


def to_json(pipeline: Pipeline) -> dict[str, Any]:
    """The pipeline as dicts, lists and numbers. An unlimited bandwidth is null."""
    return {
        "stages": [_row(stage) for stage in pipeline.stages],
        "messages": [[*channel, size] for channel, size in sorted(pipeline.messages.items())],
        "network": _network(pipeline.network),
        "loads": _loads(pipeline.loads) if pipeline.loads is not None else None,
    }


def _network(network: Network) -> dict[str, Any]:
    """Places only where there are any, and answers only where they are waited for."""
    found: dict[str, Any] = {
        "within": _link(network.within),
        "between": _link(network.between),
        "ranks_per_node": network.ranks_per_node,
    }
    if network.places:
        found["places"] = [
            {"nodes": list(one.nodes), "within": _link(one.within), "between": _link(one.between)}
            for one in network.places
        ]
    if network.answered:
        found["answered"] = True
    return found


def _loads(loads: Loads) -> dict[str, Any]:
    return {
        "features": [list(one) for one in loads.features],
        "stages": [[_row(rate) for rate in rates] for rates in loads.stages],
        "messages": [[*channel, list(rates)] for channel, rates in sorted(loads.messages.items())],
    }


def _row(stage: StageWork) -> dict[str, Any]:
    """Its figures; some only where there are any."""
    return {name: one for name, one in asdict(stage).items() if one or name not in OPTIONAL}


def _link(link: Link) -> dict[str, float | None]:
    return {"latency": link.latency, "bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else None}


def from_json(data: Any, where: str = "pipeline") -> Pipeline:
    """Read what `to_json` wrote. InputError, with the place, for anything else."""
    try:
        return Pipeline(
            stages=tuple(_stage(row) for row in data["stages"]),
            messages={(str(kind), int(a), int(b)): _size(size) for kind, a, b, size in data["messages"]},
            network=_read_network(data["network"]),
            loads=_read_loads(data["loads"]) if data["loads"] is not None else None,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"these are no figures of a pipeline: {error!r}", where, _REMEDY) from None


def _read_loads(data: dict[str, Any]) -> Loads:
    found = Loads(
        features=tuple(tuple(map(_size, one)) for one in data["features"]),
        stages=tuple(tuple(_stage(rate, _number) for rate in rates) for rates in data["stages"]),
        messages={(str(kind), int(a), int(b)): tuple(map(_number, rates)) for kind, a, b, rates in data["messages"]},
    )
    if len({len(one) for one in (*found.features, *found.stages, *found.messages.values())}) > 1:
        raise ValueError("features and their rates differ in number")
    return found


def _stage(row: dict[str, Any], number: Callable[[Any], float] | None = None) -> StageWork:
    flags = ("has_b", "has_w")
    figures: dict[str, Any] = {
        field.name: (number or _size)(row[field.name] if field.name not in OPTIONAL else row.get(field.name, 0.0))
        for field in fields(StageWork)
        if field.name not in flags
    }
    return StageWork(**figures, **{name: bool(row[name]) for name in flags})


def _read_network(row: dict[str, Any]) -> Network:
    places = tuple(
        RankNodes(tuple(map(int, one["nodes"])), _read(one["within"]), _read(one["between"]))
        for one in row.get("places", ())
    )
    return Network(
        _read(row["within"]), _read(row["between"]), row["ranks_per_node"], places, bool(row.get("answered"))
    )


def _read(row: dict[str, Any]) -> Link:
    return Link(_size(row["latency"]), math.inf if row["bandwidth"] is None else _size(row["bandwidth"]))


def _size(number: Any) -> float:
    if _number(number) < 0:
        raise ValueError(f"{number!r} is not a number of at least 0")
    return float(number)


def _number(number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError(f"{number!r} is no number")
    return float(number)
