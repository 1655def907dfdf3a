"""What the cache has of one model. Nothing here is an error: what cannot be found or kept is made, and not kept.

kept = ModelEntries(model, store)
kept.guards(microbatch, known) -> iterator of Guards               those that extend what is known
kept.program(match, options) -> Packed | None                      kept.keep_program(packed, match, options)
kept.checked(match, options) -> str                                kept.keep_checked(text, match, options)
kept.met(pair, microbatch, options) -> bool                        kept.keep_met(pair, microbatch, options)
kept.trace(match, options) -> TracedProgram | None                 kept.keep_trace(traced, match, options)
kept.capture(match) -> Captured | None                             kept.keep_capture(captured, match)
kept.mesh(batch, options) -> text or ""                            kept.keep_mesh(text, batch, options)

A match (csc.capture.guards) is by a capture: its key is what entries are found by.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import nn

from csc.cache import stored_guards
from csc.cache.inductor_folder import machine
from csc.cache.keys import Opaque, mesh_key, model_key, program_key, trace_key
from csc.cache.packed import (
    Captured,
    Files,
    Packed,
    TracedProgram,
    captured_bytes,
    captured_from,
    guards_from,
    packed_bytes,
    packed_from,
    text_of,
    traced_bytes,
    traced_from,
)
from csc.cache.store import Store
from csc.capture.batch import NOTHING_TOLD, split_batch
from csc.capture.guards import Guards, Match
from csc.ir.capture_guards import Unstorable
from csc.ir.program import Options

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
            found = self._read("guards", key, files, guards_from)
            if found is not None and found.extend(known):
                yield found

    def program(self, match: Match, options: Options) -> Packed | None:
        """The program of a microbatch."""
        trainable = self._trainable()
        return self._find("program", match, options, packed_from, lambda key: program_key(key, options, trainable))

    def trace(self, match: Match, options: Options) -> TracedProgram | None:
        """The traced templates for a microbatch, whatever the frozen set, the mesh and the schedule are."""
        return self._find("trace", match, options, traced_from, lambda key: key)

    def checked(self, match: Match, options: Options) -> str:
        """What the comparison of a microbatch's program with eager PyTorch gave; "" if none is known."""
        found = self._find(
            "checked", match, options, lambda files, _: files[CHECKED].decode(),
            self._as_it_runs(options),
        )  # fmt: skip
        return found or ""

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
        model = self._model_key(microbatch)
        return None if model is None else self._as_it_runs(options)(" ".join((model, *sorted(pair))))

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
        about = {"name": self._name, "shapes": {one.name: list(one.shape) for one in captured.program.inputs}}
        if self._store.write("capture", f"{model}-{match.capture.name}", files, about):
            self._keep_guards(model, files["guards.json"], about)

    def mesh(self, batch: Mapping[str, Any], options: Options) -> str:
        """What was chosen for a batch of these sizes in place of the options' open mesh; "" if nothing is known."""
        key = self._mesh_key(batch, options)
        if key is None or self._store is None:
            return ""
        return self._read("mesh", key, self._store.read("mesh", key), lambda files, _: files[MESH].decode()) or ""

    def keep_mesh(self, text: str, batch: Mapping[str, Any], options: Options) -> None:
        """Keep what was just chosen."""
        key = self._mesh_key(batch, options)
        if key is not None and self._store is not None:
            about = {"name": self._name, "shapes": self._shapes(batch), "mesh": options.mesh.to_dict()}
            self._store.write("mesh", key, {MESH: text.encode()}, about)

    def _mesh_key(self, batch: Mapping[str, Any], options: Options) -> str | None:
        model = self._model_key(batch)
        sizes = {name: (tuple(one.shape), str(one.dtype)) for name, one in sorted(split_batch(batch)[0].items())}
        return None if model is None else mesh_key(model, sizes, options, self._trainable())

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
        model = self._model_key(match.given)
        if model is None or self._store is None:
            return None
        key = further(trace_key(model, match.key, options))
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
        model = self._model_key(match.given)
        if model is None or self._store is None:
            return
        try:
            known = text_of(stored_guards.to_tree(guards, self._model)) if guards is not None else None
            files = content()
        except (Unstorable, RuntimeError, SafetensorError) as reason:
            self._say(f"it holds {reason}")
            return
        about = {"name": self._name, "shapes": self._shapes(match.given), **about}
        if self._store.write(kind, further(trace_key(model, match.key, options)), files, about) and known is not None:
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
        found = self._described(microbatch)
        if found is None:
            return None
        _, extra = split_batch(microbatch)
        key = self._keys.setdefault(repr(extra), found)
        if found != key and found not in self._left.get(key, ()):
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

    def _say(self, reason: str) -> None:
        if not self._said:
            log.info("cache: %s is not cached: %s", self._name, reason)
        self._said = True

    def _trainable(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}
