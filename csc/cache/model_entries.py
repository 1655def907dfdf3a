"""What the cache has of one model. Nothing here is an error: what cannot be found or kept is made."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from csc.analysis import batch_limits
from csc.analysis.batch_limits import Places
from csc.cache.inductor_folder import machine
from csc.cache.keys import Opaque, mesh_key, model_key, passes_key, program_key, trace_key
from csc.cache.store import Store
from csc.capture.batch import NOTHING_TOLD, split_batch
from csc.capture.guards import Guards, Match
from csc.capture.trace.traced_model import HoistedCalls
from csc.capture.values.hoist import Function, Hoisted, HostCall
from csc.ir import stored
from csc.ir.capture_guards import Unstorable
from csc.ir.program import Options, Program
from csc.runtime.weights import with_own_memory

# --- What the captures of a model assumed, as text -------------------------------------------------------------------


FORMAT = 4
KEPT = (*stored.OF_GUARDS, Function, Hoisted, HostCall)
PLAIN = (bool, int, float, str, type(None))


def to_tree(known: Guards, model: nn.Module) -> Any:
    """Plain JSON. Arguments of host functions that are objects of the model are kept as where the model has them."""
    calls = tuple(_with_values(call, partial(_argument, model)) for call in known.host.calls)
    assumed = (
        calls, known.host.tried, sorted(known.deciding), known.captures, known.replayed, known.moves, known.decides,
        sorted(known.written),
    )  # fmt: skip
    return {"format": FORMAT, "assumed": stored.record_to_tree(assumed, KEPT)}


def from_tree(tree: Any, model: nn.Module) -> Guards:
    """The inverse. AttributeError, KeyError, TypeError or ValueError for a tree that is not one of this model."""
    if tree["format"] != FORMAT:
        raise ValueError(f"guards of format {tree['format']}")
    assumed = stored.record_from_tree(tree["assumed"], KEPT)
    calls, tried, deciding, captures, replayed, moves, decides, written = assumed
    calls = tuple(_with_values(call, partial(_value, model)) for call in calls)
    host = HoistedCalls(calls, (), tried)
    return Guards(host, set(deciding), captures, replayed, moves, decides, set(written))


def _with_values(call: HostCall | Hoisted, form: Callable[[Any], Any]) -> HostCall | Hoisted:
    """The call, the plain values that it is called with in another form."""
    if isinstance(call, Hoisted):
        return call
    return replace(call, plain=tuple((name, form(value)) for name, value in call.plain))


def _argument(model: nn.Module, value: Any) -> Any:
    if type(value) in PLAIN:
        return ["value", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_argument(model, item) for item in value)]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return ["dict", *([key, _argument(model, item)] for key, item in value.items())]
    for path, module in model.named_modules():
        if module is value:
            return ["module", path]
        for name, held in vars(module).items():
            if held is value:
                return ["attribute", path, name]
            for inner, deeper in getattr(held, "__dict__", {}).items():
                if deeper is value and not isinstance(held, nn.Module):
                    return ["attribute", path, name, inner]
    raise Unstorable(f"a {type(value).__name__} that a function on the host is called with")


def _value(model: nn.Module, tree: Any) -> Any:
    kind, *rest = tree
    if kind == "value":
        return rest[0]
    if kind in ("list", "tuple"):
        values = [_value(model, item) for item in rest]
        return values if kind == "list" else tuple(values)
    if kind == "dict":
        return {key: _value(model, item) for key, item in rest}
    path, *names = rest
    value: Any = model.get_submodule(path)
    for name in names:
        value = vars(value)[name]
    return value


# --- What is kept, as named bytes: for the disk, and for other ranks -------------------------------------------------
#
# Terms
#   Packed     a finished program: the files of its directory but for the example, and what a batch is asked before it
#   Traced     a Program after the passes that trace (csc.passes.pipeline.tracing), from which planning starts
#   Captured   a Program as it was traced, for all sizes that its trace allows; it can be lowered, not shown
#   guards     all carry what the captures of the model assumed (csc.capture.guards)


PREFIX = "program/"
Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Packed:
    """files: text and tensors by path in the program directory; the example batch is the user's data, not in it.

    bound: why it means something in this process alone; "": it does not.
    """

    files: Files
    places: Places
    guards: Guards
    bound: str = ""


@dataclass(frozen=True)
class TracedProgram:
    """history: the Programs after capture and each pass, if it was traced in this process."""

    program: Program
    places: Places
    guards: Guards
    history: tuple[Program, ...] = ()


@dataclass(frozen=True)
class Captured:
    """A capture, and what it and those before it assumed."""

    program: Program
    guards: Guards


def packed_bytes(packed: Packed, model: nn.Module) -> dict[str, bytes]:
    """Unstorable if something in it has no form in text, or means something in this process alone."""
    if packed.bound:
        raise Unstorable(packed.bound)
    files = {PREFIX + name: content for name, content in packed.files.items()}
    return files | _common(packed.places, packed.guards, model)


def packed_from(files: Files, model: nn.Module) -> Packed:
    """The inverse. An exception of csc.cache.model_entries.DAMAGE for bytes that are none."""
    rank_files = {name.removeprefix(PREFIX): content for name, content in files.items() if name.startswith(PREFIX)}
    return Packed(rank_files, *_common_from(files, model))


def traced_bytes(traced: TracedProgram, model: nn.Module) -> dict[str, bytes]:
    """Unstorable if something in it has no form in text. The history is left out."""
    tree, tensors = stored.to_tree(traced.program)
    files = {"trace.json": text_of(tree), "trace.safetensors": _saved(tensors)}
    return files | _common(traced.places, traced.guards, model)


def traced_from(files: Files, model: nn.Module) -> TracedProgram:
    """The inverse. An exception of csc.cache.model_entries.DAMAGE for bytes that are none."""
    program = stored.from_tree(json.loads(files["trace.json"]), load_tensors(files["trace.safetensors"]))
    history = tuple(
        replace(pass_record, seconds=0.0, summary=f"{pass_record.summary} (cache)") for pass_record in program.history
    )
    return TracedProgram(replace(program, history=history), *_common_from(files, model))


def captured_bytes(captured: Captured, model: nn.Module) -> dict[str, bytes]:
    """Unstorable if something in it has no form in text, or means something in this process alone."""
    if reason := stored.bound(captured.program):
        raise Unstorable(reason)
    tree, tensors = stored.to_tree(captured.program, captured=True)
    return {
        "capture.json": text_of(tree),
        "capture.safetensors": _saved(tensors),
        "guards.json": text_of(to_tree(captured.guards, model)),
    }


def captured_from(files: Files, model: nn.Module) -> Captured:
    """The inverse. An exception of csc.cache.model_entries.DAMAGE for bytes that are none."""
    program = stored.from_tree(json.loads(files["capture.json"]), load_tensors(files["capture.safetensors"]))
    history = tuple(
        replace(pass_record, seconds=0.0, summary=f"{pass_record.summary} (cache)") for pass_record in program.history
    )
    return Captured(replace(program, history=history), guards_from(files, model))


def guards_from(files: Files, model: nn.Module) -> Guards:
    """An exception of csc.cache.model_entries.DAMAGE for bytes that are none."""
    return from_tree(json.loads(files["guards.json"]), model)


def _common(places: Places, guards: Guards, model: nn.Module) -> dict[str, bytes]:
    tree, constants = batch_limits.to_tree(places)
    return {
        "places.json": text_of(tree),
        "places.safetensors": _saved(constants),
        "guards.json": text_of(to_tree(guards, model)),
    }


def _common_from(files: Files, model: nn.Module) -> tuple[Places, Guards]:
    constants = load_tensors(files["places.safetensors"])
    places = batch_limits.from_tree(json.loads(files["places.json"]), constants)
    return places, guards_from(files, model)


def text_of(tree: Any) -> bytes:
    """JSON."""
    return json.dumps(tree, separators=(",", ":")).encode()


def _saved(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return save_tensors({name: with_own_memory(tensor) for name, tensor in tensors.items()})


# --- What the cache has of one model ---------------------------------------------------------------------------------
#
# Nothing here is an error: what cannot be found or kept is made, and not kept.
#
# A match (csc.capture.guards) is by a capture: its key is what entries are found by.


log = logging.getLogger("csc")

DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, SafetensorError)
CHECKED, MESH = "checked.txt", "mesh.json"
Found = TypeVar("Found")


class ModelEntries:
    """The entries of one model. store: None keeps and finds nothing. axes: along which dimension samples of an entry
    lie, where it is told.
    """

    def __init__(self, model: nn.Module, store: Store | None, axes: Mapping[str, int] = NOTHING_TOLD) -> None:
        self._model, self._store, self._axes = model, store, axes
        self._keys: dict[str, str] = {}  # of the model with plain batch entries
        self._left: dict[str, set[str]] = {}  # what captures left of it: keys of the same model
        self._said = False
        self._at_rest: dict[str, str | None] | None = None  # descriptions, by the plain batch entries

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """The model is described once in the context, and once more behind each capture: nothing else runs it there."""
        if self._at_rest is not None:
            yield
            return
        self._at_rest = {}
        try:
            yield
        finally:
            self._at_rest = None

    def guards(self, microbatch: Mapping[str, Any], known: Guards) -> Iterator[Guards]:
        """What others knew of the model, with this microbatch's plain entries, beside all that is known here."""
        model = self._model_key(microbatch)
        if model is None or self._store is None:
            return
        for key in self._store.keys("guards", model):
            files = self._store.read("guards", key)
            kept = self._read("guards", key, files, guards_from)
            if kept is not None and kept.extend(known):
                yield kept

    def program(self, match: Match, options: Options) -> Packed | None:
        """The program of a microbatch."""
        trainable = self._trainable()
        return self._find("program", match, options, packed_from, lambda key: program_key(key, options, trainable))

    def trace(self, match: Match, options: Options) -> TracedProgram | None:
        """The traced templates for a microbatch, whatever the frozen set, the mesh and the schedule are."""
        return self._find("trace", match, options, traced_from, lambda key: key)

    def checked(self, match: Match, options: Options) -> str:
        """What the comparison of a microbatch's program with eager PyTorch gave; "" if none is known."""
        kept = self._find(
            "checked", match, options, lambda files, _: files[CHECKED].decode(),
            self._as_it_runs(options),
        )  # fmt: skip
        return kept or ""

    def _as_it_runs(self, options: Options) -> Callable[[str], str]:
        """The key of a program by that of its trace, and with `fuse` of what compiles its functions."""
        trainable, here = self._trainable(), machine() if options.fuse else ""
        return lambda key: program_key(key + here, options, trainable)

    def keep_program(self, packed: Packed, match: Match, options: Options) -> None:
        """Keep what was just compiled."""
        trainable = self._trainable()
        freeze = list(options.freeze) if options.freeze is not None else None
        self._keep(
            "program", packed.guards, match, options, lambda: packed_bytes(packed, self._model),
            lambda key: program_key(key, options, trainable), {"mesh": options.mesh.to_dict(), "freeze": freeze},
        )  # fmt: skip

    def keep_checked(self, text: str, match: Match, options: Options) -> None:
        """Keep that a program was found to train what eager PyTorch does."""
        self._keep("checked", None, match, options, lambda: {CHECKED: text.encode()}, self._as_it_runs(options), {})

    def met(self, pair: Set[str], microbatch: Mapping[str, Any], options: Options) -> bool:
        """Whether a step in which these two meet was found to train what eager PyTorch does."""
        key = self._pair_key(pair, microbatch, options)
        return key is not None and self._store is not None and self._store.read("checked", key) is not None

    def keep_met(self, pair: Set[str], microbatch: Mapping[str, Any], options: Options) -> None:
        """Keep that it was."""
        key = self._pair_key(pair, microbatch, options)
        if key is not None and self._store is not None:
            self._store.write("checked", key, {CHECKED: "\n".join(sorted(pair)).encode()}, {"name": self._name})

    def _pair_key(self, pair: Set[str], microbatch: Mapping[str, Any], options: Options) -> str | None:
        model, passes = self._model_key(microbatch), self._passes_key(options)
        if model is None or passes is None:
            return None
        return self._as_it_runs(options)(" ".join(filter(None, (model, passes, *sorted(pair)))))

    def keep_trace(self, traced: TracedProgram, match: Match, options: Options) -> None:
        """Keep what was just traced."""
        self._keep(
            "trace", traced.guards, match, options, lambda: traced_bytes(traced, self._model), lambda key: key, {}
        )

    def capture(self, match: Match) -> Captured | None:
        """What was captured of the model, for whatever sizes."""
        model = self._model_key(match.given)
        if model is None or self._store is None or match.capture is None:
            return None
        key = f"{model}-{match.capture.name}"
        return self._read("capture", key, self._store.read("capture", key), captured_from)

    def keep_capture(self, captured: Captured, match: Match) -> None:
        """Keep what was just captured."""
        model = self._model_key(match.given)
        if model is None or self._store is None or match.capture is None:
            return
        try:
            files = captured_bytes(captured, self._model)
        except (Unstorable, RuntimeError, SafetensorError) as reason:
            log.info("cache: what was traced of %s is not cached for other sizes: it holds %s", self._name, reason)
            return
        about = {"name": self._name, "shapes": {entry.name: list(entry.shape) for entry in captured.program.inputs}}
        if self._store.write("capture", f"{model}-{match.capture.name}", files, about):
            self._keep_guards(model, files["guards.json"], about)

    def mesh(self, batch: Mapping[str, Any], options: Options, failures: int = 0) -> str:
        """What was chosen for a batch of these sizes in place of the options' open mesh; "" if nothing is known.
        failures: how many ranks may be killed.
        """
        key = self._mesh_key(batch, options, failures)
        if key is None or self._store is None:
            return ""
        return self._read("mesh", key, self._store.read("mesh", key), lambda files, _: files[MESH].decode()) or ""

    def keep_mesh(self, text: str, batch: Mapping[str, Any], options: Options, failures: int = 0) -> None:
        """Keep what was just chosen."""
        key = self._mesh_key(batch, options, failures)
        if key is not None and self._store is not None:
            about = {"name": self._name, "shapes": self._shapes(batch), "mesh": options.mesh.to_dict()}
            self._store.write("mesh", key, {MESH: text.encode()}, about)

    def _mesh_key(self, batch: Mapping[str, Any], options: Options, failures: int) -> str | None:
        model, passes = self._model_key(batch), self._passes_key(options)
        sizes = {
            name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in sorted(split_batch(batch)[0].items())
        }
        if model is None or passes is None:
            return None
        lasting = (sizes, failures) if failures else sizes
        return mesh_key(f"{model}{passes}", lasting, options, self._trainable())

    @staticmethod
    def _shapes(batch: Mapping[str, Any]) -> dict[str, list[int]]:
        return {name: list(tensor.shape) for name, tensor in split_batch(batch)[0].items()}

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _find(
        self,
        kind: str,
        match: Match,
        options: Options,
        read: Callable[[Files, nn.Module], Found],
        further: Callable[[str], str],
    ) -> Found | None:
        model, passes = self._model_key(match.given), self._passes_key(options)
        if model is None or passes is None or self._store is None:
            return None
        key = further(trace_key(model, match.key, options, passes))
        return self._read(kind, key, self._store.read(kind, key), read)

    def _read(
        self, kind: str, key: str, files: Files | None, read: Callable[[Files, nn.Module], Found]
    ) -> Found | None:
        """What an entry holds; one that is damaged is removed."""
        if files is None or self._store is None:
            return None
        try:
            return read(files, self._model)
        except DAMAGE as error:
            self._store.discard(kind, key, f"{type(error).__name__}: {error}")
            return None

    def _keep(
        self,
        kind: str,
        guards: Guards | None,
        match: Match,
        options: Options,
        content: Callable[[], Files],
        further: Callable[[str], str],
        about: Mapping[str, Any],
    ) -> None:
        model, passes = self._model_key(match.given), self._passes_key(options)
        if model is None or passes is None or self._store is None:
            return
        try:
            known = text_of(to_tree(guards, self._model)) if guards is not None else None
            files = content()
        except (Unstorable, RuntimeError, SafetensorError) as reason:
            self._say(f"it holds {reason}")
            return
        about = {"name": self._name, "shapes": self._shapes(match.given), **about}
        if (
            self._store.write(kind, further(trace_key(model, match.key, options, passes)), files, about)
            and known is not None
        ):
            self._keep_guards(model, known, about)

    def _keep_guards(self, model: str, text: bytes, about: Mapping[str, Any]) -> None:
        assert self._store is not None
        self._store.write("guards", f"{model}-{hashlib.sha256(text).hexdigest()}", {"guards.json": text}, about)

    @contextmanager
    def capturing(self, microbatch: Mapping[str, Any]) -> Iterator[None]:
        """Around a capture: what the model's own forward changes in it leaves it the same model."""
        before = self._model_key(microbatch)
        try:
            yield
        finally:
            if self._at_rest is not None:
                self._at_rest.clear()
        after = self._described(microbatch)
        if before is not None and after is not None:
            self._left.setdefault(before, set()).add(after)

    def _model_key(self, microbatch: Mapping[str, Any]) -> str | None:
        """None, with the reason in the log, if the model cannot be described, or has been changed since the first
        time: what was captured before is not what a process that starts with it now would capture.
        """
        description = self._described(microbatch)
        if description is None:
            return None
        _, extra = split_batch(microbatch)
        key = self._keys.setdefault(repr(extra), description)
        if description != key and description not in self._left.get(key, ()):
            self._say("it was changed after it was compiled first")
            return None
        return key

    def _described(self, microbatch: Mapping[str, Any]) -> str | None:
        if self._store is None:
            return None
        extra = split_batch(microbatch)[1]
        if self._at_rest is None:
            return self._key_with(extra)
        entries = repr(extra)
        if entries not in self._at_rest:
            self._at_rest[entries] = self._key_with(extra)
        return self._at_rest[entries]

    def _key_with(self, extra: Mapping[str, Any]) -> str | None:
        try:
            return model_key(self._model, {**extra, "axes of samples": dict(self._axes)} if self._axes else extra)
        except Exception as reason:  # attributes are the user's objects: they may raise whatever they like
            self._say(str(reason) if isinstance(reason, Opaque) else f"{type(reason).__name__}: {reason}")
            return None

    def _passes_key(self, options: Options) -> str | None:
        """None, with the reason in the log, if a pass of a user cannot be described."""
        if self._store is None or options.passes is None:
            return ""
        if self._at_rest is None:
            return self._described_passes(options)
        asked = repr(options)
        if asked not in self._at_rest:
            self._at_rest[asked] = self._described_passes(options)
        return self._at_rest[asked]

    def _described_passes(self, options: Options) -> str | None:
        try:
            return passes_key(options)
        except Exception as reason:  # fields and globals are the user's objects
            self._say(str(reason) if isinstance(reason, Opaque) else f"{type(reason).__name__}: {reason}")
            return None

    def _say(self, reason: str) -> None:
        if not self._said:
            log.info("cache: %s is not cached: %s", self._name, reason)
        self._said = True

    def _trainable(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}
