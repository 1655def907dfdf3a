"""Tensors in safetensors files, written and read part by part: no more than one is held besides what is given.

Terms: a file holds some numbered keys; where each begins, and its digest, go to the index (csc.checkpoints.step_index).
Other programs read the files as any safetensors.

    write(file, tensors) -> {key: (offset, sha256)}        published whole
    write_each(file, about, given) -> the same             of tensors that are made one after the other
    layout(tensors) -> (header, {key: offset})             of the file that would be written
    digest(tensor) -> sha256                               of the bytes that would be written
    read(folder, part, dtype, what) -> tensor              on the CPU; InputError if it is not what was saved
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from io import RawIOBase
from pathlib import Path

import torch

from csc.checkpoints.step_index import OLDER, StoredPart
from csc.errors import InputError
from csc.runtime.loaded_program import checked_file, within
from csc.runtime.specs import sizes
from csc.runtime.weights import DIGESTS, DTYPES, bytes_of, published

NO_DIGEST = "0" * 64
Places = dict[str, int]


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes."""
    return hashlib.sha256(bytes_of(tensor.detach().cpu())).hexdigest()


def layout(tensors: Mapping[str, torch.Tensor], digests: Mapping[str, str] | None = None) -> tuple[bytes, Places]:
    """What a file of these begins with, and the offset of each. InputError for a dtype that it has no form for.
    digests: to be in the header, as csc.runtime.weights has them there.
    """
    header: dict[str, object] = {
        "__metadata__": {"format": "pt"} | ({DIGESTS: json.dumps(digests)} if digests is not None else {})
    }
    places, end = {}, 0
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            what = f"{key!r} is {tensor.dtype}, which safetensors has no form for"
            raise InputError(what, "save", f"convert it to one of {', '.join(DTYPES.values())}")
        places[key] = end
        end += tensor.nbytes
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [places[key], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {key: len(begin) + place for key, place in places.items()}


def write(file: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, str]]:
    """The offset and the digest of each. InputError if the file cannot be written."""
    return write_each(file, tensors, tensors.items())


def write_each(
    file: Path, about: Mapping[str, torch.Tensor], given: Iterable[tuple[str, torch.Tensor]], in_header: bool = False
) -> dict[str, tuple[int, str]]:
    """about: shapes and dtypes of all, of meta tensors, too. given: all of them, in any order; none is kept. in_header:
    whether the digests go to the header as well.
    """
    digests = dict.fromkeys(about, NO_DIGEST)
    begin, places = layout(about, digests if in_header else None)

    def fill(path: Path) -> None:
        with path.open("wb") as opened:
            opened.write(begin)
            for key, tensor in given:
                assert (tensor.shape, tensor.dtype) == (about[key].shape, about[key].dtype), key
                data = bytes_of(tensor.detach().cpu())
                digests[key] = hashlib.sha256(data).hexdigest()
                opened.seek(places[key])
                opened.write(data)
            assert NO_DIGEST not in digests.values(), "a tensor was not given"
            if in_header:
                opened.seek(0)
                opened.write(layout(about, digests)[0])

    published(file, fill)
    return {key: (place, digests[key]) for key, place in places.items()}


def read(folder: Path, part: StoredPart, dtype: str, what: str) -> torch.Tensor:
    """what: the tensor's name in sentences."""

    def fail(why: str) -> InputError:
        return InputError(f"{what}: {why}", str(folder / part.file), OLDER)

    kind = getattr(torch, dtype, None)
    if kind not in DTYPES:
        raise fail(f"it is {dtype!r}, which is no dtype that csc reads")
    found = torch.empty(sizes(part.box), dtype=kind)
    if found.numel():
        file = checked_file(within(folder, part.file, fail), fail)
        target = memoryview(found.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        try:
            with file.open("rb", buffering=0) as opened:
                opened.seek(part.offset)
                read_into(opened, target)
        except (OSError, EOFError) as error:
            raise fail(f"it cannot be read: {error}") from None
        if hashlib.sha256(target).hexdigest() != part.sha256:
            raise fail("its bytes are not those that were saved")
    return found


def read_into(opened: RawIOBase, target: memoryview) -> None:
    """Fill it. EOFError if there is not as much."""
    at = 0
    while at < len(target):
        count = opened.readinto(target[at:])
        if not count:
            raise EOFError("the file ends before it")
        at += count
