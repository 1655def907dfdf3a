"""Features of frozen encoders: which rows are one unit, made before a step or in the one before, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, Protocol

import torch
from torch import nn

from csc.cache.feature_entries import FeatureCache
from csc.cache.keys import Opaque, model_key
from csc.capture.batch import device_of, split_batch
from csc.capture.guards import Match
from csc.capture.quantised_weights import weights_of
from csc.driver.batches import GRIDS, kind_of
from csc.errors import InputError
from csc.runtime.consistency import Sample, read
from csc.runtime.executor import Encoding, Made, Place, orders
from csc.runtime.loaded_program import LoadedProgram, encoder
from csc.runtime.specs import FeatureSpec, ValueSpec
from csc.runtime.trainer import Trainer
from csc.runtime.weights import bytes_of

# --- Whether the parts of a batch (its images) do not meet each other in a function, tried on noise ------------------
#
# Terms
#   cut        how many rows of each entry and of each result are each part's, along the first dimension; an entry that
#              is not named stays as it is
#   probe      what the function makes of noise that is the same in all parts with as many rows
#
# An encoder is a flat graph without branches, so what it does with rows shows on any numbers. If all other parts are
# changed and a part's results keep every bit, nothing of them reaches it, however small. If the probes of parts are
# those of parts elsewhere, to rounding, neither a part's place nor what lies beside it counts.


Entries = Mapping[str, torch.Tensor]
Encode = Callable[[Entries], Mapping[str, torch.Tensor]]
ROUNDING = 1e-3  # of the largest number of a result; in types of 16 bits more
ROUNDING_HALF = 5e-2


@dataclass(frozen=True)
class Cut:
    """Rows of each part, by entry and by result: equally many parts of all; () where a single part is no rows."""

    entries: Mapping[str, tuple[int, ...]]
    results: Mapping[str, tuple[int, ...]]

    @property
    def count(self) -> int:
        return max(1, len(next(iter(self.results.values()))))

    def parts(self, results: Entries) -> list[dict[str, torch.Tensor]]:
        """The results of each part."""
        split = {name: results[name].split(rows) if rows else [results[name]] for name, rows in self.results.items()}
        return [{name: entry[number] for name, entry in split.items()} for number in range(self.count)]


def equal_cuts(entries: Mapping[str, Sequence[int]], results: Mapping[str, Sequence[int]]) -> list[Cut]:
    """Of tensors of these shapes; none where one has no rows."""
    shapes = [*entries.values(), *results.values()]
    most = gcd(*(shape[0] for shape in shapes)) if all(shapes) else 0
    return [equal_cut(entries, results, count) for count in range(most, 0, -1) if most % count == 0]


def equal_cut(entries: Mapping[str, Sequence[int]], results: Mapping[str, Sequence[int]], count: int) -> Cut:
    """Into so many parts, which all sizes allow."""

    def rows(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
        return {name: (shape[0] // count,) * count for name, shape in shapes.items()}

    return Cut(rows(entries), rows(results))


@torch.no_grad()
def are_apart(encode: Encode, entries: Entries, cut: Cut) -> bool:
    """Whether no part's results depend on the rows of others. Whole numbers but bytes stay as they are: False if parts
    differ in them.
    """
    for name, rows in cut.entries.items():
        parts = entries[name].split(rows)
        if not _is_noisy(entries[name]) and any(not torch.equal(part, parts[0]) for part in parts):
            return False
    generator = torch.Generator().manual_seed(0)
    first, other = _noise(entries, cut, generator), _noise(entries, cut, generator)
    parts_alone = cut.parts(encode(first))
    for kept in (0, 1):
        parts_among = cut.parts(encode({**first, **_mixed(first, other, cut, kept)}))
        for number, (before, after) in enumerate(zip(parts_alone, parts_among, strict=True)):
            if any(torch.equal(before[name], after[name]) != (number % 2 == kept) for name in before):
                return False
    return True


@torch.no_grad()
def probes(encode: Encode, entries: Entries, cut: Cut) -> list[dict[str, torch.Tensor]]:
    """Of each part."""

    def noise(rows: int, like: torch.Tensor) -> torch.Tensor:
        return _random((rows, *like.shape[1:]), like, torch.Generator().manual_seed(0))

    replaced = {
        name: torch.cat([noise(number, entries[name]) for number in rows])
        for name, rows in cut.entries.items() if _is_noisy(entries[name])
    }  # fmt: skip
    return cut.parts(encode({**entries, **replaced}))


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    within = ROUNDING if one.dtype.itemsize >= 4 else ROUNDING_HALF
    apart, most = (one.double() - other.double()).abs().max(), one.double().abs().max()
    return bool(apart <= within * most)


def _mixed(one: Entries, other: Entries, cut: Cut, kept: int) -> dict[str, torch.Tensor]:
    """Every second part, from `kept` on, of the one, and the others of the other."""
    mixed = {}
    for name, rows in cut.entries.items():
        pairs = enumerate(zip(one[name].split(rows), other[name].split(rows), strict=True))
        mixed[name] = torch.cat([old if number % 2 == kept else new for number, (old, new) in pairs])
    return mixed


def _noise(entries: Entries, cut: Cut, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        name: _random(entry.shape, entry, generator) if name in cut.entries and _is_noisy(entry) else entry
        for name, entry in entries.items()
    }


def _is_noisy(entry: torch.Tensor) -> bool:
    """Whether noise may stand for an entry: pixels, also those that are bytes, and sounds."""
    return entry.is_floating_point() or entry.dtype is torch.uint8


def _random(shape: Sequence[int], like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.is_floating_point():
        return torch.randn(tuple(shape), generator=generator).to(like)
    return torch.randint(256, tuple(shape), generator=generator).to(like)


# --- Which rows of a microbatch are one unit of features: an image's, where images do not meet in the encoder --------
#
# Terms
#   packed     images lie one behind the other as rows of patches, and a grid says how many each has
#   label      what is known of a unit without its values: its sizes, and its row of the grid


@dataclass(frozen=True)
class Units:
    """Of a microbatch. beside: of each its row of the grid, as text; () where it has none. context: what else its
    features depend on.
    """

    cut: Cut
    beside: tuple[str, ...] = ()
    context: str = ""

    @property
    def labels(self) -> list[str]:
        """Of each unit. Equal ones have equal sizes."""
        rows = dict((*self.cut.entries.items(), *self.cut.results.items()))
        labels = [
            str({name: sizes[number] for name, sizes in sorted(rows.items())}) for number in range(self.cut.count)
        ]
        return [f"{label} {beside}" for label, beside in zip(labels, self.beside)] if self.beside else labels

    def shape(self, value: ValueSpec, number: int) -> tuple[int, ...]:
        """Of a value of one unit."""
        rows = self.cut.results[value.name]
        return (rows[number], *value.shape[1:]) if rows else value.shape

    def keys(self, identity: str, entries: Entries) -> list[str]:
        """Of each unit, by its values."""
        digests = [hashlib.sha256(f"{identity}{self.context}".encode()) for _ in range(self.cut.count)]
        for name, rows in sorted(self.cut.entries.items()):
            for digest, part in zip(digests, entries[name].split(rows) if rows else [entries[name]], strict=True):
                digest.update(f"{name} {part.dtype} {list(part.shape)}\n".encode())
                digest.update(bytes_of(part.detach().cpu().contiguous()))
        for digest, beside in zip(digests, self.beside):
            digest.update(beside.encode())
        return [digest.hexdigest() for digest in digests]


def whole(entries: Entries, values: Sequence[ValueSpec]) -> Units:
    """A microbatch as one unit, whatever its rows have of each other: it is none among others."""
    rows = {name: _all(entry.shape) for name, entry in entries.items()}
    return Units(Cut(rows, {value.name: _all(value.shape) for value in values}), context="whole")


def equal(entries: Entries, values: Sequence[ValueSpec]) -> list[Units]:
    """The numbers of units with equally many rows that the sizes allow."""
    return [Units(cut) for cut in equal_cuts(*_shapes(entries, values))]


def packed(given: Mapping[str, object], entries: Entries, values: Sequence[ValueSpec]) -> Units | None:
    """The images of a microbatch, if they are packed and of one kind.

    given: the microbatch as the user gives it; entries: what the encoder takes.
    """
    images = {name: entry for name, entry in entries.items() if name in given and entry.is_floating_point()}
    name = _grid(given, images)
    if name is None:
        return None
    grid = given[name]
    assert isinstance(grid, torch.Tensor)
    patches = tuple(grid.prod(1).tolist())
    if min(patches, default=0) < 1 or any(len(entry) != sum(patches) for entry in images.values()):
        return None
    results = {value.name: _in_proportion(patches, value) for value in values}
    if not all(results.values()):
        return None
    cut = Cut(dict.fromkeys(images, patches), {name: rows for name, rows in results.items() if rows is not None})
    return Units(cut, tuple(f"{name} {row}" for row in grid.tolist()))


def are_made_of_images(given: Mapping[str, object], entries: Entries, made: Callable[[Entries], Entries]) -> bool:
    """Whether what the encoder takes beside packed images is made of their rows and their grid alone. made: what the
    model's functions on the host make of entries.
    """
    images = {name: entry for name, entry in entries.items() if name in given and entry.is_floating_point()}
    name = _grid(given, images)
    grid = given.get(name or "")
    alone = {**images, name: grid} if name is not None and isinstance(grid, torch.Tensor) else images
    made_on_host = entries.keys() - alone.keys()
    host = made(alone) if made_on_host else {}
    return all(entry in host and torch.equal(host[entry], entries[entry]) for entry in made_on_host)


def _grid(given: Mapping[str, object], images: Entries) -> str | None:
    """The entry that says how many rows each image has; None if images are of several kinds."""
    kinds = {kind_of(name) for name in images}
    grids = [
        name for name, one in given.items()
        if isinstance(one, torch.Tensor) and one.dim() == 2 and name.endswith(GRIDS) and kind_of(name) in kinds - {None}
    ]  # fmt: skip
    return grids[0] if len(kinds) == len(grids) == 1 else None


def _in_proportion(patches: Sequence[int], value: ValueSpec) -> tuple[int, ...] | None:
    """A value's rows of each image; None if that does not come out even."""
    rows = value.shape[0] if value.shape else 0
    if not rows or sum(patches) % rows:
        return None
    patches_each = sum(patches) // rows
    return None if any(count % patches_each for count in patches) else tuple(count // patches_each for count in patches)


def _shapes(entries: Entries, values: Sequence[ValueSpec]) -> tuple[dict[str, Sequence[int]], dict[str, Sequence[int]]]:
    return {name: entry.shape for name, entry in entries.items()}, {value.name: value.shape for value in values}


def _all(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[0],) if shape else ()


# --- Whether units of features may be kept apart, as tried on noise; what was tried is remembered on disk ------------
#
# Terms
#   trial      of the units of one microbatch: they do not meet, and their probes are those that
#              units with the same label have elsewhere, to rounding
#   elsewhere  among other units, in number or in size: a trial that compared with one of these has shown something
#   relied on  after TRIALS that have shown something, units of the encoder are not tried any more in programs that had
#              a trial; with grids that differ within a microbatch only after as many such trials


TRIALS = 4
SAMPLED = 64  # numbers of a probe that are kept
AMONG = "among"


@dataclass
class UnitTrials:
    """Of all encoders that keep features in a directory. identity: of one of them, with its weights."""

    cache: FeatureCache
    _meeting: set[str] = field(default_factory=set)
    _tried: dict[str, bool] = field(default_factory=dict)
    _shown: Counter[tuple[str, bool]] = field(default_factory=Counter)
    _programs: set[tuple[str, str]] = field(default_factory=set)
    _probes: dict[str, Entries] = field(default_factory=dict)
    _places: dict[str, bool] = field(default_factory=dict)  # whether they are free, by microbatch
    _free: dict[str, list[bool]] = field(default_factory=dict)  # the same by identity

    def allow(self, units: Units, identity: str, encode: Encode, entries: Entries) -> bool:
        """Whether these units of a microbatch may be kept apart."""
        if self.meets(identity):
            return False
        sizes = json.dumps([(name, list(entry.shape)) for name, entry in sorted(entries.items())])
        packed, mixed = bool(units.beside), len(set(units.labels)) > 1
        if packed and (identity, sizes) in self._programs and self._shown[identity, mixed] >= TRIALS:
            return True
        key = _hash("apart", identity, sizes, *units.labels)
        if key not in self._tried:
            self._tried[key] = self._remembered(key, units, identity, encode, entries, mixed)
        if self._tried[key]:
            self._programs.add((identity, sizes))
        elif packed:
            self.meet(identity)
        return self._tried[key]

    def place_is_free(self, units: Units, identity: str, encode: Encode, entries: Entries) -> bool:
        """Whether units with the same label have the same bits in each other's place: shown by the probes of a
        microbatch that has several of one label, and relied on after as many trials as above. Once it is not so, never.
        """
        known, labels = self._free.setdefault(identity, []), units.labels
        if all(known) and len(known) >= TRIALS:
            return True
        if not all(known) or len(set(labels)) == len(labels):
            return False
        key = _hash("free", identity, json.dumps([(n, list(e.shape)) for n, e in sorted(entries.items())]), *labels)
        if key not in self._places:
            first: dict[str, Entries] = {}
            label_probes = zip(labels, probes(encode, entries, units.cut), strict=True)
            self._places[key] = all(_identical(first.setdefault(label, probe), probe) for label, probe in label_probes)
            known.append(self._places[key])
        return self._places[key]

    def meets(self, identity: str) -> bool:
        """Whether a trial, here or in another process, has shown that images of different size meet."""
        if identity not in self._meeting and self.cache.read(_hash("meet", identity)) is not None:
            self._meeting.add(identity)
        return identity in self._meeting

    def meet(self, identity: str) -> None:
        """Units of this encoder are kept together from now on."""
        self._meeting.add(identity)
        self.cache.write(_hash("meet", identity), {"meet": torch.tensor(True)})

    def _remembered(self, key: str, units: Units, identity: str, encode: Encode, entries: Entries, mixed: bool) -> bool:
        known = self.cache.read(key)
        if known is not None and known.keys() >= {"apart", "shown"}:
            apart, shown = bool(known["apart"]), bool(known["shown"])
        else:
            apart, shown = self._trial(units, identity, encode, entries)
            self.cache.write(key, {"apart": torch.tensor(apart), "shown": torch.tensor(shown)})
        self._shown[identity, mixed] += apart and shown
        return apart

    def _trial(self, units: Units, identity: str, encode: Encode, entries: Entries) -> tuple[bool, bool]:
        """Whether they are apart, and whether a probe from elsewhere says so."""
        if units.cut.count > 1 and not are_apart(encode, entries, units.cut):
            return False, False
        among, shown = _hash(*sorted(units.labels)), False
        beyond = str([(name, list(entries[name].shape[1:])) for name in sorted(units.cut.entries)])
        for label, probe in zip(units.labels, probes(encode, entries, units.cut), strict=True):
            here = {name: _sampled(value) for name, value in probe.items()}
            remote = self._probe(_hash("probe", identity, beyond, label), here, among)
            if remote.keys() != {*here, AMONG} or any(not _alike(remote[name], here[name]) for name in here):
                self.meet(identity)  # elsewhere it is another: what lies beside a unit counts
                return False, False
            shown = shown or not torch.equal(remote[AMONG], _number(among))
        return True, shown

    def _probe(self, key: str, here: Entries, among: str) -> Entries:
        """The first probe with a label; this one if there was none. The disk's, so that processes agree."""
        if key not in self._probes:
            if self.cache.read(key) is None:
                self.cache.write(key, {**here, AMONG: _number(among)})
            self._probes[key] = self.cache.read(key) or {**here, AMONG: _number(among)}
        return self._probes[key]


def _alike(there: torch.Tensor, here: torch.Tensor) -> bool:
    return there.shape == here.shape and there.dtype == here.dtype and close(there, here)


def _identical(first: Entries, other: Entries) -> bool:
    return all(torch.equal(first[name], other[name]) for name in first)


def _sampled(value: torch.Tensor) -> torch.Tensor:
    """Evenly spaced numbers of it."""
    flat = value.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLED)][:SAMPLED].cpu().clone()


def _number(text: str) -> torch.Tensor:
    return torch.tensor(int(text[:15], 16))


def _hash(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# --- Units that are new in several microbatches, put into as few runs of the encoder as their sizes allow ------------
#
# Terms: see csc.driver.features.
#   partly  a microbatch of which some units are kept, and others are new
#   run     of the encoder at a microbatch's sizes: its new units keep their places, and in the place of a unit that is
#           kept stands a new one of another microbatch, where one with the same label is left


@dataclass(frozen=True)
class Partly:
    """number: of the microbatch among those of a step. kept: by key, what is there of its units."""

    number: int
    units: Units
    keys: Sequence[str]
    entries: Entries
    kept: dict[str, Entries]

    def rows(self, name: str, place: int) -> torch.Tensor:
        """Of an entry, those of the unit in this place."""
        return self.entries[name].split(self.units.cut.entries[name])[place]


@dataclass(frozen=True)
class EncoderRun:
    """At the sizes of a microbatch. filled: for each of its places whose unit stands there."""

    at: Partly
    filled: Sequence[tuple[Partly, int]]

    @property
    def keys(self) -> list[str]:
        """Of the unit in each place."""
        return [run.keys[place] for run, place in self.filled]

    @property
    def is_whole(self) -> bool:
        """Whether the microbatch is encoded as it is."""
        return all(run is self.at for run, _ in self.filled)

    def entries(self) -> Entries:
        """What the encoder takes."""
        if self.is_whole:
            return self.at.entries
        moved = {name: torch.cat([run.rows(name, place) for run, place in self.filled])
                 for name in self.at.units.cut.entries}  # fmt: skip
        return {**self.at.entries, **moved}


def runs(partly: Sequence[Partly]) -> Iterator[EncoderRun]:
    """partly: microbatches of one program."""
    done = {key for microbatch in partly for key in microbatch.kept}
    waiting: dict[str, deque[tuple[Partly, int]]] = {}
    for microbatch in partly:
        for place, label in enumerate(microbatch.units.labels):
            waiting.setdefault(label, deque()).append((microbatch, place))
    for target in partly:
        if done.issuperset(target.keys):
            continue
        free = [key in done for key in target.keys]
        done.update(target.keys)
        filled = []
        for place, (label, is_free) in enumerate(zip(target.units.labels, free, strict=True)):
            other = _next(waiting[label], done) if is_free else None
            filled.append(other or (target, place))
        yield EncoderRun(target, filled)


def _next(waiting: deque[tuple[Partly, int]], done: set[str]) -> tuple[Partly, int] | None:
    """The first unit that is not done, which it is from then on; those before it are not looked at again."""
    while waiting:
        microbatch, place = waiting.popleft()
        if microbatch.keys[place] not in done:
            done.add(microbatch.keys[place])
            return microbatch, place
    return None


# --- The frozen encoders of a model's programs, which no step runs: who reads features makes them before -------------
#
# Terms
#   encoder    of a program what no step runs (csc.ir.program.Features): features.py
#   identity   all that decides what an encoder makes of its entries: the model's code and configuration, what of it is
#              computed, in which dtypes, and the weights


log = logging.getLogger("csc")


@dataclass(frozen=True)
class FrozenEncoder:
    """Of one program. code: a hash of what decides its features, but for the weights."""

    spec: FeatureSpec
    forward: Callable[..., Any]
    weights: Mapping[str, nn.Parameter]
    constants: Mapping[str, torch.Tensor]
    device: torch.device
    code: str

    def entries(self, match: Match) -> dict[str, torch.Tensor]:
        """What it takes of a microbatch."""
        return {name: match.batch[name] for name in self.spec.inputs}

    @torch.no_grad()
    def encode(self, entries: Entries) -> dict[str, torch.Tensor]:
        """The features by value, on the encoder's device."""
        weights = {name: weight.detach().to(self.spec.parameters[name]) for name, weight in self.weights.items()}
        inputs = {name: entry.to(self.device) for name, entry in entries.items()}
        values, _ = self.forward(inputs, {}, weights, self.constants)
        return {value.name: values[value.name] for value in self.spec.values}


Asked = tuple[FrozenEncoder, Match, str]  # what is made of a microbatch, and the encoder's identity


class FeatureSource(Protocol):
    """Where features come from. option: of csc.compile, which says so."""

    option: str

    def features(self, asked: Sequence[Asked]) -> list[Entries]:
        """Of microbatches, by value."""

    def counts(self) -> dict[str, float]:
        """As metrics of a step, from 0 again."""


class FrozenEncoders:
    """The frozen encoders of a model's programs, by the key of microbatches. source: where features come from."""

    def __init__(self, model: nn.Module, source: FeatureSource) -> None:
        self._model, self.source = model, source
        self._of: dict[Any, FrozenEncoder] = {}
        self._identities: dict[Any, _Identity] = {}

    def add(self, match: Match, program: LoadedProgram) -> None:
        """InputError if the encoder has no weights here."""
        spec = program.manifest.features
        if spec is None and not self._of:
            raise InputError(
                "the example has no entry of floating point and no pictures of bytes, so nothing is encoded",
                self.source.option,
                f"compile with an example that has images or sounds, or leave {self.source.option} out",
            )  # fmt: skip
        if spec is None:
            return
        parameters: Any = weights_of(self._model)
        without = next((name for name in spec.parameters if parameters[name].is_meta), None)
        if without is not None:
            raise InputError(
                f"{without!r} of the frozen encoder has no values here, the model is on the meta device",
                self.source.option,
                f"make the model with its weights in every process, or leave {self.source.option} out",
            )
        device = device_of(self._model)
        constants = program.named_constants(spec.constants, device)
        weights_here = {name: parameters[name] for name in spec.parameters}
        code = _code(self._model, match, program)
        self._of[match.key] = FrozenEncoder(spec, encoder(program), weights_here, constants, device, code)

    def of(self, match: Match) -> FrozenEncoder | None:
        """None: nothing of the microbatch is encoded."""
        return self._of.get(match.key)

    @property
    def inputs(self) -> frozenset[str]:
        """The entries of batches that encoders read."""
        return frozenset(name for one in self._of.values() for name in one.spec.inputs)

    def complete(self, matches: Sequence[Match], here: Sequence[bool]) -> list[Mapping[str, Any]]:
        """Microbatches with their features; those that only other processes read, on the meta device."""
        encoders = [self.of(match) for match in matches]
        read = [
            n
            for n, (encoder, reads_here) in enumerate(zip(encoders, here, strict=True))
            if encoder is not None and reads_here
        ]
        requests = [(encoder, matches[n], self.identity(encoder)) for n in read if (encoder := encoders[n]) is not None]
        features = dict(zip(read, self.source.features(requests) if requests else [], strict=True))
        return [
            {**match.batch, **_entries(encoder, features.get(n))}
            for n, (match, encoder) in enumerate(zip(matches, encoders))
        ]

    def identity(self, one: FrozenEncoder) -> str:
        """Hashed anew where a weight was written, or is another tensor."""
        places = tuple((weight.data_ptr(), weight._version) for weight in one.weights.values())
        known = self._identities.get((one.code, *one.weights))
        if known is None or known.places != places or read(known.samples) != known.entries:
            samples = list(map(Sample, one.weights.values()))
            digest = hashlib.sha256(one.code.encode())
            for name, weight in one.weights.items():
                digest.update(f"{name} {weight.dtype} {list(weight.shape)} {one.spec.parameters[name]}\n".encode())
                digest.update(bytes_of(weight.detach().cpu().contiguous()))
            known = _Identity(places, samples, read(samples), digest.hexdigest())
            self._identities[(one.code, *one.weights)] = known
        return known.text


@dataclass(frozen=True)
class _Identity:
    """places: where weights lie, and how often torch has counted writes there; samples: of each, since writes to
    `weight.data` are not counted; entries: what these were.
    """

    places: tuple[tuple[int, int], ...]
    samples: list[Sample]
    entries: bytes
    text: str


def _entries(encoder: FrozenEncoder | None, features: Entries | None) -> dict[str, torch.Tensor]:
    """What a program takes in place of what is encoded; without features, only their sizes."""
    if encoder is None:
        return {}
    named = zip(encoder.spec.entries, encoder.spec.values, strict=True)
    if features is None:
        return {entry: torch.empty(value.shape, dtype=value.dtype, device="meta") for entry, value in named}
    return {entry: features[value.name] for entry, value in named}


def _code(model: nn.Module, match: Match, program: LoadedProgram) -> str:
    """Of the model as it is traced; of one that cannot be described, the program's files, which are for one size."""
    spec = program.manifest.features
    assert spec is not None
    try:
        what = model_key(model, split_batch(match.given)[1])
    except Opaque as reason:
        log.info("features are kept for each size of microbatches apart: the model holds %s", reason)
        what = json.dumps(sorted([*program.manifest.files.items(), *program.manifest.tensors.items()]))
    computed = [(name, str(dtype)) for name, dtype in spec.parameters.items()]
    values = [(value.name, str(value.dtype)) for value in spec.values]
    tree = [what, values, computed, program.manifest.device]
    return hashlib.sha256(json.dumps(tree).encode()).hexdigest()


# --- What a frozen encoder makes, taken from disk, or made and kept there, before a step -----------------------------
#
# Terms: see csc.driver.features.
#   unit       what one entry on disk is of: an image's rows of the encoder's entries, where images do not meet in the
#              encoder and their place does not count; else a microbatch
#
# A microbatch of which every unit is new is encoded as it is, by the calls that a step without kept features makes:
# its features are those of that step, bit for bit. Where some are kept, new units of several microbatches share a run
# of the encoder, once a unit's place there is known not to change a bit, and what is kept has
# been compared with what the encoder makes of it among others.


COMPARED = 4  # units, each among others, until new ones share a run of the encoder


@dataclass
class KeptFeatures:
    """Of one model. made_by_host: what its functions on the host make of entries. read, made: units taken from disk,
    and units encoded, by this process, until `counts` is asked.
    """

    cache: FeatureCache
    made_by_host: Callable[[Entries], Entries]
    read: int = 0
    made: int = 0
    option: str = "cache_features"
    _units_of: dict[Any, Units] = field(default_factory=dict)  # by the key of microbatches, where they are not packed
    _compared: Counter[str] = field(default_factory=Counter)  # by identity: kept units that were what was made of them
    _of_images: dict[Any, bool] = field(default_factory=dict)  # whether what is not packed is made of packed images

    def __post_init__(self) -> None:
        self._trials = UnitTrials(self.cache)

    def counts(self) -> dict[str, float]:
        """As metrics of a step, from 0 again."""
        counts = {"features_read": float(self.read), "features_made": float(self.made)}
        self.read = self.made = 0
        return counts

    @torch.no_grad()
    def features(self, asked: Sequence[Asked]) -> list[Entries]:
        """From disk, or encoded and kept there."""
        features: dict[int, Entries] = {}
        later: dict[tuple[Any, str], list[Partly]] = {}
        for number, (frozen, match, identity) in enumerate(asked):
            partly = self._partly(number, frozen, match, identity)
            if len(partly.kept) == len(set(partly.keys)):
                features[number] = self._laid_out(frozen, partly)
                self.read += len(partly.keys)
            elif partly.kept and self._may_move(partly, frozen, identity):
                later.setdefault((match.key, identity), []).append(partly)
            else:
                features[number] = self._whole(frozen, partly, identity)
        for same_program in later.values():
            frozen, _, identity = asked[same_program[0].number]
            features.update(self._together(frozen, same_program, identity))
        return [features[number] for number in range(len(asked))]

    def _partly(self, number: int, encoder: FrozenEncoder, match: Match, identity: str) -> Partly:
        entries = encoder.entries(match)
        units = self._units(encoder, identity, match, entries)
        keys = units.keys(identity, entries)
        kept = [self._read(key, encoder.spec.values, units, place) for place, key in enumerate(keys)]
        kept_units = {key: unit for key, unit in zip(keys, kept) if unit is not None}
        return Partly(number, units, keys, entries, kept_units)

    def _may_move(self, partly: Partly, encoder: FrozenEncoder, identity: str) -> bool:
        """Whether units may stand in each other's place."""
        enough = self._compared[identity] >= COMPARED and not self._trials.meets(identity)
        return enough and self._trials.place_is_free(partly.units, identity, encoder.encode, partly.entries)

    def _whole(self, encoder: FrozenEncoder, partly: Partly, identity: str) -> Entries:
        """Of a microbatch as it is; what is new in it is kept, what was kept is compared."""
        values = encoder.encode(partly.entries)
        self._keep(partly, partly.keys, partly.units.cut.parts(values), identity)
        return values

    def _together(self, encoder: FrozenEncoder, partly: Sequence[Partly], identity: str) -> dict[int, Entries]:
        """By number, of microbatches of one program."""
        features: dict[int, Entries] = {}
        encoded: dict[str, Entries] = {}
        shared = {key: unit for other in partly for key, unit in other.kept.items()}  # what one has found serves all
        for run in runs(partly):
            if run.is_whole or self._trials.meets(identity):
                features[run.at.number] = self._whole(encoder, run.at, identity)
                encoded.update(zip(run.at.keys, run.at.units.cut.parts(features[run.at.number]), strict=True))
                continue
            parts = run.at.units.cut.parts(encoder.encode(run.entries()))
            self._keep(run.at, run.keys, parts, identity)
            encoded.update(zip(run.keys, parts, strict=True))
        for other in partly:
            if other.number in features:
                continue
            if self._trials.meets(identity):  # it has come out in between
                features[other.number] = self._whole(encoder, other, identity)
                continue
            self.read += sum(key in other.kept for key in other.keys)
            features[other.number] = self._laid_out(encoder, replace(other, kept={**shared, **encoded, **other.kept}))
        return features

    def _keep(self, at: Partly, keys: Sequence[str], parts: Sequence[Entries], identity: str) -> None:
        """Of a run of the encoder at a microbatch's sizes."""
        for key, unit in zip(keys, parts, strict=True):
            kept = at.kept.get(key)
            if kept is None:
                self.cache.write(key, unit)
            elif all(close(kept[name], unit[name].cpu()) for name in unit):
                self._compared[identity] += 1
            elif not self._trials.meets(identity):
                log.warning(
                    "features: what is kept of an image is not what the encoder makes of it among others; features "
                    "serve whole microbatches alone from now on, and steps that read some of them had wrong ones"
                )
                self._trials.meet(identity)
        self.made += len(keys)

    def _laid_out(self, encoder: FrozenEncoder, partly: Partly) -> Entries:
        units = [partly.kept[key] for key in partly.keys]
        return {value.name: _laid_out(value, [unit[value.name] for unit in units]) for value in encoder.spec.values}

    def _read(self, key: str, values: Sequence[ValueSpec], units: Units, number: int) -> Entries | None:
        """What is kept of a unit. One of another program that happens to have the key is not."""
        unit = self.cache.read(key)
        fits = unit is not None and all(
            value.name in unit
            and unit[value.name].dtype == value.dtype
            and tuple(unit[value.name].shape) == units.shape(value, number)
            for value in values
        )
        return unit if fits else None

    def _units(self, encoder: FrozenEncoder, identity: str, match: Match, entries: Entries) -> Units:
        """Those of a microbatch: packed images, or as many equal ones as do not meet; else the whole of it."""
        key, values, images = match.key, encoder.spec.values, packed(match.given, entries, encoder.spec.values)
        if images is not None and key not in self._of_images:
            self._of_images[key] = are_made_of_images(match.given, entries, self.made_by_host)
        images = images if self._of_images.get(key) else None
        if images is not None and self._trials.allow(images, identity, encoder.encode, entries):
            return images
        units_before = self._units_of.get(key)
        if units_before is None or self._trials.meets(identity):
            tried = equal(entries, values) if images is None else []
            best = next((u for u in tried if self._trials.allow(u, identity, encoder.encode, entries)), None)
            self._units_of[key] = best or whole(entries, values)
            if units_before != self._units_of[key]:
                log.info("features: %s", _said(self._units_of[key], images is not None))
        return self._units_of[key]


def _said(units: Units, images: bool) -> str:
    if units.cut.count > 1:
        return f"microbatches of {units.cut.count} units"
    meet = "images meet in the encoder, or their place counts" if images else "nothing divides its rows"
    return f"a microbatch is one unit ({meet}): its features serve where the same microbatch comes again"


def _laid_out(value: ValueSpec, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The units one behind the other, in memory as the encoder leaves them: kernels may go another way otherwise."""
    buffer = torch.empty_strided(value.shape, value.stride, dtype=value.dtype)
    return torch.cat([part.cpu() for part in parts], out=buffer) if len(parts) > 1 else buffer.copy_(parts[0])


# --- What a frozen encoder makes of the batch to come, made in the step before, where ranks would wait ---------------
#
# Terms: see csc.driver.features.
#   key    of a microbatch: a digest of the encoder's identity and of the values of what it takes
#
# What was made serves microbatches with its key and no others. So a batch that is not the one announced, a weight that
# was written since, ranks that were told of different batches: each finds nothing, and is encoded when its step
# begins.


class FeaturesAhead:
    """Of one model. It holds what was made for one step."""

    option = "encode_ahead"

    def __init__(self) -> None:
        self._there: dict[bytes, Entries] = {}
        self._ahead = self._made = 0

    def counts(self) -> dict[str, float]:
        """As metrics of a step, from 0 again: microbatches encoded before their step, and at its beginning."""
        counts = {"features_ahead": float(self._ahead), "features_made": float(self._made)}
        self._ahead = self._made = 0
        return counts

    def features(self, asked: Sequence[Asked]) -> list[Entries]:
        """What was made ahead, or is made now."""
        return [self._features(*request) for request in asked]

    def _features(self, encoder: FrozenEncoder, match: Match, identity: str) -> Entries:
        entries = encoder.entries(match)
        features = self._there.get(_key(encoder, entries, identity))
        self._ahead, self._made = self._ahead + (features is not None), self._made + (features is None)
        return encoder.encode(entries) if features is None else features

    def encoding(self, encoders: FrozenEncoders, matches: Sequence[Match], trainer: Trainer) -> Encoding | None:
        """matches: of the microbatches of the next step, of all replicas or of this process' own. None: nothing is
        encoded, or this process lacks what encoders take.
        """
        manifest = trainer.program.manifest
        order, count = orders(manifest), manifest.microbatches
        if order is None:
            return None
        replicas = (
            sorted(trainer.replicas) if len(matches) == count * len(trainer.replicas) else list(manifest.mesh.replicas)
        )
        placed = {(replica, mb): matches[n * count + mb] for n, replica in enumerate(replicas) for mb in range(count)}
        encoders_at = {
            place: (encoder, encoder.entries(match))
            for place, match in placed.items()
            if place[0] in trainer.replicas and (encoder := encoders.of(match)) is not None
        }
        if any(entry.is_meta for _, entries in encoders_at.values() for entry in entries.values()):
            return None

        def make(place: Place) -> Made:
            encoder, entries = encoders_at[place]
            return Made(_key(encoder, entries, encoders.identity(encoder)), encoder.encode(entries))

        return Encoding(
            manifest, order, {place: encoder.spec.values for place, (encoder, _) in encoders_at.items()}, make
        )

    def keep(self, encoding: Encoding | None) -> None:
        """What was made in the step that is over, in place of what was made for it."""
        arrived = encoding.arrived if encoding is not None else {}
        self._there = {values.key: values.values for values in arrived.values()}


def _key(encoder: FrozenEncoder, entries: Entries, identity: str) -> bytes:
    (key,) = whole(entries, encoder.spec.values).keys(identity, entries)
    return bytes.fromhex(key)
