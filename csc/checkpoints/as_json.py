"""State of schedulers, loaders and generators of random numbers as JSON, and back: nothing is unpickled.

Terms: *plain* are numbers, texts, bytes, None, tensors, arrays, and lists, tuples, sets, dicts and Counters of these.
What JSON has no form for is an object with the key KIND.

    packed(value, where) -> JSON value       InputError, with the place, for what is not plain
    unpacked(value) -> value                 ValueError, KeyError or TypeError for what `packed` has not made
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import numpy as np
import torch

from csc.errors import InputError
from csc.runtime.weights import bytes_of

KIND = "csc"


def packed(value: Any, where: str) -> Any:
    """where: whose state it is, for the error."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, np.generic):
        return packed(value.item(), where)
    if isinstance(value, list):
        return [packed(one, f"{where}[{i}]") for i, one in enumerate(value)]
    if isinstance(value, dict):
        return _dict(value, where)
    if type(value) in (tuple, set, frozenset):
        members = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return {KIND: type(value).__name__, "of": [packed(one, f"{where}[{i}]") for i, one in enumerate(members)]}
    if isinstance(value, (bytes, bytearray)):
        return {KIND: "bytes", "data": _text(value)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {KIND: "array", "dtype": value.dtype.str, "shape": list(value.shape), "data": _text(value.tobytes())}
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        dense = value.detach().cpu().contiguous()
        name = str(value.dtype).removeprefix("torch.")
        return {KIND: "tensor", "dtype": name, "shape": list(value.shape), "data": _text(bytes(bytes_of(dense)))}
    raise InputError(
        f"{where} is a {type(value).__name__}, which a checkpoint does not hold: it has no pickles", "save",
        "let its state_dict() give numbers, texts, tensors, and lists and dicts of these",
    )  # fmt: skip


def _dict(value: dict[Any, Any], where: str) -> Any:
    if not isinstance(value, Counter) and KIND not in value and all(type(key) is str for key in value):
        return {key: packed(one, f"{where}[{key!r}]") for key, one in value.items()}
    pairs = [[packed(key, where), packed(one, f"{where}[{key!r}]")] for key, one in value.items()]
    return {KIND: "Counter" if isinstance(value, Counter) else "dict", "of": pairs}


def _text(data: Any) -> str:
    return base64.b64encode(data).decode()


def unpacked(value: Any) -> Any:
    """The inverse; tensors are on the CPU."""
    if isinstance(value, list):
        return [unpacked(one) for one in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: unpacked(one) for key, one in value.items()}
    kind = value[KIND]
    if kind in ("tuple", "set", "frozenset"):
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](unpacked(one) for one in value["of"])
    if kind in ("dict", "Counter"):
        found = {unpacked(key): unpacked(one) for key, one in value["of"]}
        return found if kind == "dict" else Counter(found)
    data = base64.b64decode(value["data"], validate=True)
    if kind == "bytes":
        return data
    if kind == "array":
        return np.frombuffer(data, dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind != "tensor":
        raise ValueError(f"{kind!r} is no kind of state")
    dtype = getattr(torch, value["dtype"])
    if not data:
        return torch.empty(value["shape"], dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(value["shape"])
