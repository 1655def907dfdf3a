"""Files of models, loaded and judged in processes of their own, so that a hang or a fault is a result.

load(path) -> module      outcomes(path) -> [Outcome of each setting]      Worker().outcomes(path, seconds)
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import csc
from benchmarks.judge import PLAIN, Outcome, asked, judge


def load(path: Path) -> Any:
    """The module in a file that `source` wrote."""
    spec = spec_from_file_location(f"fuzzed_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # a traced function is looked up by its module
    spec.loader.exec_module(module)
    return module


def outcomes(path: Path) -> list[Outcome]:
    """Of each setting in the file. One trace serves them all, but for what changes the model for good; what goes wrong
    with it is judged again on a model of its own."""
    module = load(path)
    shared: csc.CompiledModel | None = None
    tried, found = False, []
    for changed in module.SETTINGS:
        setting = {**PLAIN, **changed}
        several = setting["steps"] or len(setting["forms"]) > 1
        alone = setting["replaced"] or setting["moved"] or len(module.SETTINGS) == 1
        if not alone and not tried:
            shared, tried = _shared(module, setting), True
        alone = alone or shared is None or (several and any(True for _ in shared.model.buffers()))
        with _kept(None if alone else shared):
            found.append(judge(module, setting, None if alone else shared))
        if found[-1].kind in ("wrong", "caught", "crash") and not alone and shared is not None:
            again = judge(module, setting)
            found[-1] = (
                again
                if again.kind == found[-1].kind
                else Outcome(found[-1].kind, "only after other settings: " + found[-1].reason, found[-1].differences)
            )
            shared, tried = None, False
    return found


@contextmanager
def _kept(shared: csc.CompiledModel | None) -> Iterator[None]:
    """The parameters of the model behind the block are what they were before: a setting may train several steps, or
    freeze some.
    """
    parameters = list(shared.model.parameters()) if shared is not None else []
    before = [(parameter.detach().clone(), parameter.requires_grad) for parameter in parameters]
    yield
    with torch.no_grad():
        for parameter, (values, trained) in zip(parameters, before):
            parameter.copy_(values)
            parameter.requires_grad_(trained).grad = None


def _shared(module: Any, setting: dict[str, Any]) -> csc.CompiledModel | None:
    try:
        model = module.make()
        return csc.compile(model, example=module.batch(0, 4, 6), cache=False, **asked(setting, module))
    except Exception:
        return None  # the judge compiles, and says what it is


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)  # torch logs what it raises, and here a failure is a result
    while True:
        try:
            path = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(outcomes(Path(path)))
        except Exception:
            pipe.send([Outcome("eager", traceback.format_exc())])


class Worker:
    """A process that judges one file after another, and is started anew if it hangs, dies or has judged many."""

    LIFE = 60  # files: what torch keeps of traces adds up

    def __init__(self) -> None:
        self._process: Any = None
        self._judged = 0

    def outcomes(self, path: Path, seconds: float) -> list[Outcome]:
        """Of the file's settings; a single one, "hang" or "crash", if the process did not answer."""
        if self._process is None or self._judged >= self.LIFE:
            self.close()
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._judged += 1
        try:
            self._pipe.send(str(path))
            if self._pipe.poll(seconds):
                return self._pipe.recv()
            kind, reason = "hang", f"no answer in {seconds:.0f} s"
        except (EOFError, OSError):
            kind, reason = "crash", "the process died"
        self.close()
        return [Outcome(kind, reason)]

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process, self._judged = None, 0
