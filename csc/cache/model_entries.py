"""What the cache has of one model. Nothing here is an error: what cannot be found or kept is made, and not kept.

kept = Kept(model, store)
kept.program(microbatch, options, learned) -> Packed | None        kept.keep_program(packed, microbatch, options)
kept.checked(microbatch, options, learned) -> str                  kept.keep_checked(text, microbatch, options, learned)
kept.trace(microbatch, options, learned) -> Traced | None          kept.keep_trace(traced, microbatch, options)
kept.captures(microbatch, learned) -> iterator of Captured         kept.keep_capture(captured, microbatch)
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import nn

from csc.cache import learning
from csc.cache.keys import Opaque, model_key, program_key, trace_key
from csc.cache.packed import (
    Captured,
    Files,
    Packed,
    TracedProgram,
    captured_bytes,
    captured_from,
    packed_bytes,
    packed_from,
    traced_bytes,
    traced_from,
)
from csc.cache.store import Store
from csc.capture.batch import split_batch
from csc.capture.capture import Learned
from csc.errors import CscError
from csc.ir.program import Options
from csc.ir.stored import Unstorable

log = logging.getLogger("csc")

DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, SafetensorError)
CHECKED = "checked.txt"
Found = TypeVar("Found", Packed, TracedProgram, str)


class ModelEntries:
    """The entries of one model. store: None keeps and finds nothing."""

    def __init__(self, model: nn.Module, store: Store | None) -> None:
        self._model, self._store = model, store
        self._keys: dict[str, str] = {}  # of the model with plain batch entries
        self._left: dict[str, set[str]] = {}  # what captures left of it: keys of the same model
        self._said = False

    def program(self, microbatch: Mapping[str, Any], options: Options, learned: Learned) -> Packed | None:
        """The program of a microbatch, as it comes from the user."""
        trainable = self._trainable()
        return self._find(
            "program", microbatch, options, learned, packed_from, lambda key: program_key(key, options, trainable)
        )

    def trace(self, microbatch: Mapping[str, Any], options: Options, learned: Learned) -> TracedProgram | None:
        """The traced templates for a microbatch, whatever the frozen set, the mesh and the schedule are."""
        return self._find("trace", microbatch, options, learned, traced_from, lambda key: key)

    def keep_program(self, packed: Packed, microbatch: Mapping[str, Any], options: Options) -> None:
        """Keep what was just compiled."""
        trainable = self._trainable()
        freeze = list(options.freeze) if options.freeze is not None else None
        self._keep(
            "program", packed.learned, microbatch, options, lambda: packed_bytes(packed, self._model),
            lambda key: program_key(key, options, trainable), {"mesh": options.mesh.to_dict(), "freeze": freeze},
        )  # fmt: skip

    def checked(self, microbatch: Mapping[str, Any], options: Options, learned: Learned) -> str:
        """What the comparison of a microbatch's program with eager PyTorch gave; "" if none is known."""
        trainable = self._trainable()
        found = self._find(
            "checked", microbatch, options, learned, lambda files, _: files[CHECKED].decode(),
            lambda key: program_key(key, options, trainable),
        )  # fmt: skip
        return found or ""

    def keep_checked(self, text: str, microbatch: Mapping[str, Any], options: Options, learned: Learned) -> None:
        """Keep that a program was found to train what eager PyTorch does."""
        trainable = self._trainable()
        self._keep(
            "checked", learned, microbatch, options, lambda: {CHECKED: text.encode()},
            lambda key: program_key(key, options, trainable), {},
        )  # fmt: skip

    def keep_trace(self, traced: TracedProgram, microbatch: Mapping[str, Any], options: Options) -> None:
        """Keep what was just traced."""
        self._keep(
            "trace", traced.learned, microbatch, options, lambda: traced_bytes(traced, self._model), lambda key: key, {}
        )

    def captures(self, microbatch: Mapping[str, Any], learned: Learned) -> Iterator[Captured]:
        """What was captured of the model with the plain entries of this microbatch, for whatever sizes."""
        model = self._model_key(microbatch)
        if model is None or self._store is None:
            return
        for key in self._store.keys("capture", model):
            files = self._store.read("capture", key)
            if files is None:
                continue
            try:
                found = captured_from(files, self._model)
            except DAMAGE as error:
                self._store.discard("capture", key, f"{type(error).__name__}: {error}")
                continue
            if learning.extends(found.learned, learned):
                yield found

    def keep_capture(self, captured: Captured, microbatch: Mapping[str, Any]) -> None:
        """Keep what was just captured."""
        model = self._model_key(microbatch)
        if model is None or self._store is None:
            return
        try:
            files = captured_bytes(captured, self._model)
        except (Unstorable, RuntimeError, SafetensorError) as reason:
            log.info("cache: what was traced of %s is not cached for other sizes: it holds %s", self._name, reason)
            return
        shapes = {one.name: list(one.shape) for one in captured.program.inputs}
        digest = hashlib.sha256(files["capture.json"] + files["learned.json"]).hexdigest()
        self._store.write("capture", f"{model}-{digest}", files, {"name": self._name, "shapes": shapes})

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    def _find(
        self,
        kind: str,
        microbatch: Mapping[str, Any],
        options: Options,
        learned: Learned,
        read: Callable[[Files, nn.Module], Found],
        further: Callable[[str], str],
    ) -> Found | None:
        model = self._model_key(microbatch)
        if model is None or self._store is None:
            return None
        for candidate in self._candidates(model, learned):
            key = self._key(model, candidate, microbatch, options, further)
            files = self._store.read(kind, key) if key is not None else None
            if files is not None and key is not None:
                try:
                    return read(files, self._model)
                except DAMAGE as error:
                    self._store.discard(kind, key, f"{type(error).__name__}: {error}")
        return None

    def _keep(
        self,
        kind: str,
        learned: Learned,
        microbatch: Mapping[str, Any],
        options: Options,
        content: Callable[[], Files],
        further: Callable[[str], str],
        about: Mapping[str, Any],
    ) -> None:
        model = self._model_key(microbatch)
        if model is None or self._store is None:
            return
        key = self._key(model, learned, microbatch, options, further)
        try:
            form, files = learning.to_tree(learned, self._model), content()
        except (Unstorable, RuntimeError, SafetensorError) as reason:
            self._say(f"it holds {reason}")
            return
        tensors, _ = split_batch(microbatch)
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        about = {"name": self._name, "shapes": shapes, **about}
        if (
            key is not None
            and self._store.write(kind, key, files, about)
            and form["calls"] + form["consulted"] + form["guards"]
        ):
            text = json.dumps(form, sort_keys=True).encode()
            self._store.write("learned", f"{model}-{hashlib.sha256(text).hexdigest()}", {"learned.json": text}, about)

    def _key(
        self,
        model: str,
        learned: Learned,
        microbatch: Mapping[str, Any],
        options: Options,
        further: Callable[[str], str],
    ) -> str | None:
        """None if functions of the model that should run on the batch refuse it: somebody else will say so."""
        try:
            completed = learned.completed(self._model, microbatch)
            return further(trace_key(model, learning.signature(learned, completed), options))
        except CscError:
            return None

    def _candidates(self, model: str, learned: Learned) -> Iterator[Learned]:
        """What is known of batches in this process, and what others knew beyond it."""
        yield learned
        assert self._store is not None
        for key in self._store.keys("learned", model):
            files = self._store.read("learned", key)
            if files is None:
                continue
            try:
                other = learning.from_tree(json.loads(files["learned.json"]), self._model)
            except DAMAGE as error:
                self._store.discard("learned", key, f"{type(error).__name__}: {error}")
                continue
            if learning.extends(other, learned):
                yield other

    @contextmanager
    def capturing(self, microbatch: Mapping[str, Any]) -> Iterator[None]:
        """Around a capture: what the model's own forward changes in it leaves it the same model."""
        before = self._model_key(microbatch)
        yield
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
        try:
            return model_key(self._model, split_batch(microbatch)[1])
        except Exception as reason:  # attributes are the user's objects: they may raise whatever they like
            self._say(str(reason) if isinstance(reason, Opaque) else f"{type(reason).__name__}: {reason}")
            return None

    def _say(self, reason: str) -> None:
        if not self._said:
            log.info("cache: %s is not cached: %s", self._name, reason)
        self._said = True

    def _trainable(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._model.named_parameters()}
