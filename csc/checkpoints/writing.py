"""A checkpoint on its way to disk: each process writes its files, the first one the index, once all are there."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from csc.checkpoints import files
from csc.checkpoints.files import FILE, StepIndex, Stored, StoredPart, cut_off, saved
from csc.errors import InputError
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.runtime import optimizer as optimizer_state
from csc.runtime.gradients import shard_of
from csc.runtime.loaded_program import LONGEST
from csc.runtime.meeting import NOTHING, Meeting, Vote
from csc.runtime.specs import Box, ParameterSpec, part_in_box, whole_box
from csc.runtime.trainer import Trainer
from csc.runtime.weights import flushed, make_directory, published

# --- One writer at a time in a directory, of whatever thread or process ----------------------------------------------
#
# A writer that ends, however it ends, lets go of it.


@contextlib.contextmanager
def alone_in(directory: Path, wait: bool) -> Iterator[None]:
    """The directory is there. On a file system without locks nobody is kept out."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            _lock(opened, directory, wait)
        yield
    finally:
        with contextlib.suppress(OSError):  # closing is not enough: processes that were forked meanwhile have it, too
            fcntl.flock(opened, fcntl.LOCK_UN)
        os.close(opened)


def _lock(opened: int, directory: Path, wait: bool) -> None:
    try:
        fcntl.flock(opened, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            "another process is writing there", str(directory), "wait until it is done, or write to another directory"
        ) from None


# --- A directory that is made whole or not at all --------------------------------------------------------------------
#
# Terms: it is made in a *stage*, a hidden folder within it; what is done is moved up, in the order in which it was
# written. What a stage that was cut off has left is no content, and the next one removes it.


STAGE = ".converting"


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """The stage. Whatever is raised meanwhile leaves `out` as it was."""
    if out.exists() and (not out.is_dir() or any(one.name != STAGE for one in out.iterdir())):
        raise InputError("something is there already", str(out), "convert to a directory that is not there yet")
    was_there, stage = out.exists(), out / STAGE
    make_directory(stage)
    with alone_in(stage, wait=False):
        _empty(stage)
        try:
            yield stage
            for file in sorted(stage.iterdir(), key=lambda one: (one.stat().st_mtime_ns, one.name)):
                os.rename(file, out / file.name)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
            if not was_there:
                with contextlib.suppress(OSError):
                    out.rmdir()  # which it is not if something was made
    flushed(out)


def _empty(stage: Path) -> None:
    for left in list(stage.iterdir()):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left)
        else:
            left.unlink()


# --- What each process writes of a checkpoint ------------------------------------------------------------------------
#
# Every entry of every tensor is written once, by one of those that hold it.
#
# Terms: a *piece* is what a process writes of a tensor: a box of its entries, at most PART bytes. Of ranks that hold
# the same box the one with the least to write so far writes it; all ranks reckon alike, without a message. The state
# of an optimizer is written where its parameter is. The *rest* is what no program reads
# (csc.runtime.weights.WeightLayout).


PART = 64 * 2**20  # bytes: what is read for some entries is read and checked as a whole
STATES = 3  # tensors of a parameter that trains with its state, as writing is shared out


@dataclass(frozen=True)
class Piece:
    """name: of the parameter or buffer; key: of the optimizer's state, "": of the model itself."""

    name: str
    key: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    trained: bool


Written = Sequence[tuple[ParameterSpec, Box]]


def boxes_written(trainer: Trainer) -> Written:
    """By this process; all of it, if it runs all ranks."""
    manifest, ranks = trainer.program.manifest, trainer.transport.ranks
    if len(ranks) == manifest.mesh.size:
        return [(spec, whole_box(spec.shape)) for spec in manifest.parameters]
    position = manifest.mesh.coordinates(ranks[0]).pp
    data = trainer.own.data
    holders = Holders(manifest.mesh, position, None if data is None else data.shard_of)
    load: Counter[int] = Counter()
    boxes = []
    for spec in manifest.parameters:
        if spec.owner != position:
            continue
        divided = manifest.zero >= 3 or (manifest.zero > 0 and spec.trainable)
        sizes = holders.sizes(spec)
        for place, held_by in holders.of(spec, divided).items():
            entries = sizes[place.shard]
            if not entries and 0 not in spec.shape:
                continue
            writer = held_by[0] if len(held_by) == 1 else min(held_by, key=lambda rank: (load[rank], rank))
            load[writer] += entries * spec.dtype.itemsize * (STATES if spec.trainable else 1)
            if writer == ranks[0]:
                boxes.append((spec, holders.box(spec, place)))
    return boxes


class HeldPiece(NamedTuple):
    """What of a parameter a rank holds: which of the tensor-parallel boxes, which shard of that; None: all of it."""

    box: int | None
    shard: int | None


class Holders:
    """The ranks of a position, by what they step of a parameter, or hold.

    shard_of: of the ranks of a data-parallel group, in its order; None: each its own.
    """

    def __init__(self, mesh: Mesh, position: int, shard_of: Sequence[int] | None = None) -> None:
        groups = [group for group in mesh.groups(Group.DATA) if mesh.coordinates(group[0]).pp == position]
        shards = range(len(groups[0])) if shard_of is None else shard_of
        self._mesh, self._data = mesh, max(shards) + 1
        self._ranks = sorted(
            (rank, HeldPiece(mesh.shard(rank), shard)) for group in groups for rank, shard in zip(group, shards)
        )
        self._known: dict[tuple[bool, bool, Group], dict[HeldPiece, list[int]]] = {}

    def of(self, spec: ParameterSpec, divided: bool) -> Mapping[HeldPiece, list[int]]:
        """divided: by data-parallel ranks."""
        boxes, shards = bool(spec.boxes), divided and bool(spec.shape) and self._data > 1
        if (boxes, shards, spec.equal) not in self._known:
            ranks_of: dict[HeldPiece, list[int]] = {}
            for rank, place in self._ranks:
                box = self._mesh.shard(self._mesh.group(spec.equal, rank)[0]) if boxes else None
                ranks_of.setdefault(HeldPiece(box, place.shard if shards else None), []).append(rank)
            self._known[boxes, shards, spec.equal] = ranks_of
        return self._known[boxes, shards, spec.equal]

    def sizes(self, spec: ParameterSpec) -> dict[int | None, int]:
        """Entries of each shard, and of all of them together."""
        shape = spec.local.shape
        sizes: dict[int | None, int] = {None: math.prod(shape)}
        for place in range(self._data):
            dimension, start, stop = shard_of(shape, self._data, place)
            rest = math.prod(shape[:dimension]) * math.prod(shape[dimension + 1 :])
            sizes[place] = rest * (stop - start)
        return sizes

    def box(self, spec: ParameterSpec, place: HeldPiece) -> Box:
        """Which they are."""
        box = whole_box(spec.shape) if place.box is None else spec.boxes[place.box]
        return box if place.shard is None else part_in_box(box, *shard_of(spec.local.shape, self._data, place.shard))


def weights(trainer: Trainer, written: Written, rest: Mapping[str, torch.Tensor]) -> list[Piece]:
    """The rest is written by the first process."""
    pieces: list[Piece] = []
    for spec, box in written:
        held = trainer.own.stepped(spec.name) if spec.trainable else trainer.own.values[spec.name]
        pieces += divided(Piece(spec.name, "", spec.shape, box, held.detach(), spec.trainable))
    if 0 in trainer.transport.ranks:
        for name, tensor in rest.items():
            shape = tuple(tensor.shape)
            pieces += divided(Piece(name, "", shape, whole_box(shape), tensor.detach(), False))
    return pieces


def optimizer(
    trainer: Trainer, written: Written, made: torch.optim.Optimizer
) -> tuple[list[Piece], dict[str, Any]]:  # fmt: skip
    """InputError for state that is neither numbers nor tensors."""
    names = {spec.name for spec, _ in written}
    parameters = [replace(parameter, writes=parameter.name in names) for parameter in optimizer_state.owned(trainer)]
    parameters += optimizer_state.mirrored(trainer)
    state = optimizer_state.listed(made, parameters)
    of_name = {parameter.name: parameter for parameter in parameters if parameter.writes}
    pieces: list[Piece] = []
    for name, entry in state["parameters"].items():
        parameter = of_name[name]
        for key, tensor in entry["tensors"].items():
            shape = parameter.spec.shape if tensor.shape == parameter.parameter.shape else tuple(tensor.shape)
            pieces += divided(Piece(name, key, shape, parameter.box_of(tensor), tensor, True))
        entry["tensors"] = {}
    return pieces, state


def divided(piece: Piece) -> Iterator[Piece]:
    """In stretches of the first dimension."""
    tensor = piece.tensor
    rows = tensor.shape[0] if tensor.dim() else 1
    rows_each = max(1, PART // max(1, tensor.nbytes // max(1, rows)))
    if rows_each >= rows:
        yield piece
        return
    for start in range(0, rows, rows_each):
        stop = min(start + rows_each, rows)
        yield replace(piece, box=part_in_box(piece.box, 0, start, stop), tensor=tensor[start:stop])


def copies(pieces: Sequence[Piece]) -> list[Piece]:
    """Whatever is written to the tensors afterwards is not in the copies."""
    return [
        replace(piece, tensor=piece.tensor.to("cpu", copy=True, memory_format=torch.contiguous_format))
        for piece in pieces
    ]


# --- A checkpoint on its way to disk: each process writes its files, the first one the index, once all are there -----
#
# Terms: every *save* has a number of its own, which the names of its files carry: until its index is in place, an
# older save of the same step is what is read there. What does not train (frozen parameters, buffers) goes to a file
# whose name tells its content; where another checkpoint of the run has that file, the new one is a hard link to it.


_OURS = re.compile(r"((part|state|rows)-\d{5}-of-\d{5}-[0-9a-f]{8}|frozen-[0-9a-f]{32})\.(safetensors|json)")
PATIENCE = 50  # tenths of a second
CONFIGS = ("config.json", "generation_config.json")  # of transformers, beside the rest
ADAPTERS = "adapters.json"  # of PEFT, by name
_UNFINISHED = re.compile(r"\.(part|state|rows|frozen|checkpoint)[-.].*\.tmp")


@dataclass(frozen=True)
class ProcessState:
    """Of one process. told: of the optimizer, without tensors; None: there is none. state: other state, as JSON."""

    pieces: Sequence[Piece]
    told: Mapping[str, Any] | None
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Save:
    """number: 8 hexadecimal digits, the same on every rank. about: of its StepIndex. expected: names
    of parameters and buffers that have to be there, all of their entries. keep: how many checkpoints of the run stay.
    """

    folder: Path
    number: str
    place: tuple[int, int]  # of this process among all
    about: Mapping[str, Any]
    expected: Collection[str]
    keep: int | None

    def name(self, kind: str, end: str) -> str:
        """Of a file of this process."""
        return f"{kind}-{self.place[0] + 1:05d}-of-{self.place[1]:05d}-{self.number}.{end}"


def write(own: ProcessState, save: Save, meeting: Meeting) -> Path:
    """All ranks call it. If one of them cannot write, all raise, and what was saved before is what is read. Saves of a
    run are made one after the other: none takes the files of another for those of one that was cut off. Returns the
    folder.
    """
    with contextlib.ExitStack() as turn:

        def begin() -> tuple[Vote, None]:
            if save.place[0] == 0:
                make_directory(save.folder.parent)
                turn.enter_context(alone_in(save.folder.parent, wait=True))
            return NOTHING, None

        meeting.hold("begin a checkpoint", begin)
        _write(own, save, meeting)
    return save.folder


def _write(state: ProcessState, save: Save, meeting: Meeting) -> None:
    def parts() -> tuple[Vote, str]:
        return NOTHING, json.dumps(_written(state, save))

    try:
        text = meeting.hold("the parts of a checkpoint", parts)
        texts = meeting.texts("the parts of a checkpoint", text)
    except BaseException:
        _discard(save)
        raise

    def index() -> tuple[Vote, None]:
        if save.place[0] == 0:
            _publish(save, [json.loads(text) for text in texts])
        return NOTHING, None

    meeting.hold("the index of a checkpoint", index)


def _written(state: ProcessState, save: Save) -> dict[str, Any]:
    """The files that this process has written for others to read: of its other state, and of what is where, which is
    too long to be told in a meeting of many ranks.
    """
    trained = _numbered(piece for piece in state.pieces if piece.trained)
    frozen = _numbered(piece for piece in state.pieces if not piece.trained)
    rows = _rows(frozen, *_frozen(save, frozen)) if frozen else []
    if trained:
        name = save.name("part", "safetensors")
        rows += _rows(trained, name, files.write(save.folder / name, _tensors(trained)))
    return {
        "state": _text_file(save, "state", json.dumps(state.state)),
        "rows": _text_file(save, "rows", json.dumps({"parts": rows, "told": state.told})),
    }


def _text_file(save: Save, kind: str, text: str) -> dict[str, str]:
    name = save.name(kind, "json")
    published(save.folder / name, lambda path: path.write_text(text))
    return {"file": name, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _numbered(pieces: Iterable[Piece]) -> dict[str, Piece]:
    """By keys of a file."""
    return {f"{'/'.join(filter(None, (p.name, p.key)))}#{i}": p for i, p in enumerate(pieces)}


def _tensors(pieces: Mapping[str, Piece]) -> dict[str, torch.Tensor]:
    return {key: piece.tensor for key, piece in pieces.items()}


def _rows(pieces: Mapping[str, Piece], file: str, places: Mapping[str, tuple[int, str]]) -> list[dict[str, Any]]:
    return [
        {
            "name": piece.name, "key": piece.key, "shape": piece.shape, "trained": piece.trained,
            "dtype": str(piece.tensor.dtype).removeprefix("torch."), "row": [file, offset, piece.box, sha256],
        }
        for (key, piece), (offset, sha256) in zip(pieces.items(), (places[key] for key in pieces))
    ]  # fmt: skip


def _frozen(save: Save, pieces: Mapping[str, Piece]) -> tuple[str, dict[str, tuple[int, str]]]:
    """The file of what does not train, and where it has each: the one of another checkpoint of the run if that has the
    same, else a new one.
    """
    tensors = _tensors(pieces)
    digests = {key: files.digest(tensor) for key, tensor in tensors.items()}
    begin, places = files.layout(tensors)
    content = hashlib.sha256(begin + json.dumps(list(digests.values())).encode()).hexdigest()
    name, size = f"frozen-{content[:32]}.safetensors", len(begin) + sum(tensor.nbytes for tensor in tensors.values())
    folders = [save.folder, *reversed(saved(save.folder.parent).values())]
    files_there = [folder / name for folder in folders if (folder / name).is_file()]
    same = [file for file in files_there if file.stat().st_size == size]
    if not same or (same[0].parent != save.folder and not _linked(same[0], save.folder / name)):
        files.write(save.folder / name, tensors)
    return name, {key: (places[key], digests[key]) for key in tensors}


def _linked(source: Path, here: Path) -> bool:
    """Whether the file system has links, and both are on it."""
    try:
        published(here, lambda path: os.link(source, path))
    except InputError:
        return False
    return True


def _discard(save: Save) -> None:
    """Remove what this process has written of a save that failed."""
    for kind, end in (("part", "safetensors"), ("state", "json"), ("rows", "json")):
        with contextlib.suppress(OSError):
            (save.folder / save.name(kind, end)).unlink(missing_ok=True)


def _publish(save: Save, written: Sequence[Mapping[str, Any]]) -> None:
    reports = [_told(save.folder, rank, text) for rank, text in enumerate(written)]
    parameters, states, trained = _joined(reports)
    optimizers = [report["told"] for report in reports if report["told"] is not None]
    optimizer = optimizer_state.joined(optimizers) if optimizers else None
    for (name, key), stored in states.items():
        assert optimizer is not None
        optimizer["parameters"][name]["tensors"][key] = stored
    index = StepIndex(
        save.folder, save.about, parameters, trained, optimizer, tuple(report["state"] for report in written)
    )
    _check(save, index)
    text = index.to_text()
    if len(text) > LONGEST:
        raise InputError(
            f"its index would have {len(text)} bytes, and at most {LONGEST} are read", str(save.folder),
            "save with fewer ranks that each hold a shard of every parameter: more pp, or zero below 3",
        )  # fmt: skip
    published(save.folder / FILE, lambda file: file.write_text(text))
    flushed(save.folder)
    _clear(save.folder, {FILE, *index.files()})
    if save.keep is not None:
        _forget(save.folder, save.keep)


def _told(folder: Path, rank: int, written: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """What a process has written where."""
    rows = written["rows"]["file"]
    _check_seen(folder, rank, {rows, written["state"]["file"]})
    text = (folder / rows).read_text()
    if hashlib.sha256(text.encode()).hexdigest() != written["rows"]["sha256"]:
        raise _not_shared(folder, rank, rows)
    report: dict[str, Any] = json.loads(text)
    _check_seen(folder, rank, {part["row"][0] for part in report["parts"]})
    return report


def _joined(
    reports: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Stored], dict[tuple[str, str], Stored], frozenset[str]]:
    """Parameters, and tensors of the optimizer's state, with the parts of all processes; which of them train."""
    parts_of: dict[tuple[str, str], tuple[Mapping[str, Any], list[StoredPart]]] = {}
    for part in (one for process in reports for one in process["parts"]):
        file, offset, box, sha256 = part["row"]
        read = tuple(tuple((start, stop) for start, stop in dim) for dim in box)
        parts_of.setdefault((part["name"], part["key"]), (part, []))[1].append(StoredPart(file, offset, read, sha256))
    stored_of = {
        name: Stored(tuple(one["shape"]), one["dtype"], tuple(parts)) for name, (one, parts) in parts_of.items()
    }
    parameters = {name: stored for (name, key), stored in stored_of.items() if not key}
    trained = frozenset(name for (name, key), (one, _) in parts_of.items() if not key and one["trained"])
    return parameters, {both: stored for both, stored in stored_of.items() if both[1]}, trained


def _check(save: Save, index: StepIndex) -> None:
    """InputError if something of the model is in no part: such an index is not written."""
    lost = [name for name in save.expected if name not in index.parameters]
    lost += [name for name, stored in index.tensors() if stored.missing()]
    if lost:
        raise InputError(
            f"of {lost[0]} not all entries were written by any rank", str(save.folder),
            "this is a bug of csc: please report it with the mesh and the model",
        )  # fmt: skip


def _check_seen(folder: Path, rank: int, names: Collection[str]) -> None:
    """InputError if files of another process are not here, which a network's file system may show a little late."""
    for _ in range(PATIENCE):
        unseen = [name for name in names if not (folder / name).is_file()]
        if not unseen:
            return
        time.sleep(0.1)
    raise _not_shared(folder, rank, unseen[0])


def _not_shared(folder: Path, rank: int, name: str) -> InputError:
    return InputError(
        f"process {rank} has written {name}, which process 0 does not see", str(folder),
        "save to a directory that all machines share",
    )  # fmt: skip


def _clear(folder: Path, listed: Collection[str]) -> None:
    """Remove what older saves of the step, or one that was cut off, have left."""
    for file in list(folder.iterdir()):
        if (_OURS.fullmatch(file.name) and file.name not in listed) or _UNFINISHED.fullmatch(file.name):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def _forget(newest: Path, keep: int) -> None:
    """Remove checkpoints of the run but the last ones, and saves that were cut off."""
    steps = saved(newest.parent)
    last = sorted(steps)[-keep:]
    for folder in [*(folder for step, folder in steps.items() if step not in last), *cut_off(newest.parent)]:
        if folder != newest:
            forgotten(folder)


def forgotten(folder: Path) -> None:
    """Remove a checkpoint, index first: what is left of a removal that is cut off is none."""
    with contextlib.suppress(OSError):
        (folder / FILE).unlink(missing_ok=True)
        _clear(folder, ())
        for name in (*CONFIGS, ADAPTERS):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()  # something of the user's in it keeps it there
