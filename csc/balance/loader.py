"""Steps that are divided by what each stage pays for their samples, from torch's DataLoader and its workers.

for batch in BalancedLoader(...):           made by csc.balanced
    loss = compiled.train_step(batch)
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from csc.balance.decision import Decider
from csc.balance.delivery import Delivery, Failed, Ticket
from csc.balance.order import EpochOrder, steps_of
from csc.driver.compiled import CompiledModel
from csc.driver.share import ReplicaShare
from csc.errors import InputError
from csc.planning.assign.step import Size
from csc.runtime.meeting import digest
from csc.torch_private.process_state import unattended_workers

log = logging.getLogger("csc")

VERSION = 1
AS_LOADERS = {  # what a DataLoader like this one would have been given
    "num_workers": 0, "pin_memory": False, "timeout": 0, "worker_init_fn": None, "multiprocessing_context": None,
    "generator": None, "prefetch_factor": None, "persistent_workers": False, "pin_memory_device": "",
}  # fmt: skip


class BalancedLoader:
    """An iterator over steps, each what `train_step(..., local=True)` takes. See `balanced`.

    An iteration that is left, or that an error ends, is taken up by the next one where it stood; at the end of an epoch
    the next iteration is the next epoch. state_dict() and load_state_dict() do so across runs.
    """

    def __init__(
        self, delivery: Delivery, order: EpochOrder, batch_size: int, drop_last: bool, options: Mapping[str, Any]
    ) -> None:
        """delivery: what workers do for a step; options: of the DataLoader."""
        self._delivery, self._order, self._options = delivery, order, dict(options)
        self._batch_size, self._drop_last = batch_size, drop_last
        self._epoch = self._step = 0
        self._samples: list[int] | None = None  # of this epoch, once it has begun
        self.seconds = 0.0  # of the step that was yielded last, as it is simulated

    def __len__(self) -> int:
        """Steps of an epoch."""
        count = self._order.length()
        return count // self._batch_size if self._drop_last else -(-count // self._batch_size)

    @property
    def batch_size(self) -> int:
        """Samples of a step, of all replicas."""
        return self._batch_size

    @property
    def decider(self) -> Decider:
        """What divides its steps."""
        return self._delivery.decider

    @property
    def sizes(self) -> list[Size]:
        """Of microbatches that steps keep to: units of each kind, rows, width."""
        return self.decider.sizes

    def compile_ahead(self, compiled: CompiledModel) -> int:
        """Make the programs of all known sizes (`sizes`) before the first step, so that no step waits for one of them.
        All ranks call it. Returns how many sizes there are.
        """
        count = len(self.sizes)
        for number, (size, step) in enumerate(self._delivery.examples(), 1):
            start = time.perf_counter()
            compiled.compile_for(ReplicaShare(step))
            log.info("size %d of %d, %s, in %.1f s", number, count, size, time.perf_counter() - start)
        return count

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch at its first step, unless it is the one that is under way."""
        if epoch != self._epoch:
            self._epoch, self._step, self._samples = epoch, 0, None

    def __iter__(self) -> Iterator[ReplicaShare]:
        steps = self._steps()
        if self._step >= len(steps):
            self.set_epoch(self._epoch + 1)
            steps = self._steps()
        lost = 0
        while self._step < len(steps):
            before = self._step
            try:
                yield from self._from_workers(steps)
            except _WorkerLost as error:
                lost = lost + 1 if self._step == before else 1
                if lost > 1:
                    raise self._gone(error) from error.__cause__
                log.warning("%s; step %d of epoch %d is loaded again", error, self._step, self._epoch)

    def _steps(self) -> list[list[int]]:
        """The samples of each step of the epoch that is under way."""
        if self._samples is None:
            self._samples = self._order.of(self._epoch)
        return steps_of(self._samples, self._batch_size, self._drop_last)

    def _from_workers(self, steps: Sequence[Sequence[int]]) -> Iterator[ReplicaShare]:
        """The steps that are left. _WorkerLost if a worker ended by itself."""
        tickets = [Ticket(self._epoch, k, tuple(steps[k])) for k in range(self._step, len(steps))]
        steps_: Any = self._delivery
        options = dict(self._options)
        if options.get("num_workers"):
            options["worker_init_fn"] = partial(_begin_worker, options.get("worker_init_fn"))
        loader = DataLoader(steps_, batch_size=None, sampler=tickets, collate_fn=_as_it_is, **options)
        source = unattended_workers(iter(loader))
        while True:
            try:
                found = next(source)
            except StopIteration:
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise _WorkerLost(str(error).strip().splitlines()[0]) from error
            except (ConnectionError, EOFError) as error:  # it had announced tensors that were not fetched yet
                raise _WorkerLost(f"a DataLoader worker was gone before its tensors were fetched ({error})") from error
            divided = _divided(found)
            self._step += 1
            self.seconds = found[2]
            yield divided

    def _gone(self, error: Exception) -> InputError:
        return InputError(
            f"{error}, twice at step {self._step} of epoch {self._epoch}", "csc.balanced",
            "look at the machine's memory and at what its samples are; the step is not lost: going on with the loader "
            "takes it up again",
        )  # fmt: skip

    # --- for those who skip steps in the middle of an epoch, as transformers' Trainer does --------------------------

    @property
    def dataset(self) -> Delivery:
        """From a ticket to its step."""
        return self._delivery

    @property
    def batch_sampler(self) -> _Tickets:
        """Of the epoch that is under way, from its beginning."""
        return _Tickets(self)

    sampler = None

    def __getattr__(self, name: str) -> Any:
        if name not in AS_LOADERS:
            raise AttributeError(f"a BalancedLoader has no attribute {name!r}")
        return self._options.get(name, AS_LOADERS[name])

    @property
    def collate_fn(self) -> Any:
        return _of_one

    # --- where it is -------------------------------------------------------------------------------------------------

    position_of_all_shares = True  # for checkpoints: it holds whatever dp is

    def state_dict(self) -> dict[str, Any]:
        """The position, and what must be the same where it is taken up. An order of a sampler is in it."""
        order = self._samples if self._order.sampler is not None and self._samples is not None else []
        return {
            "version": VERSION, "epoch": self._epoch, "step": self._step, "made_of": self._made_of(),
            "order": torch.tensor(order, dtype=torch.int64),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position. InputError if it is of another dataset, batch size or seed."""
        if state.get("version") != VERSION or not isinstance(state.get("made_of"), Mapping):
            raise InputError(
                "this is no position of a balanced loader", "load_state_dict", "resume with the loader that was saved"
            )
        for name, own in self._made_of().items():
            if state["made_of"].get(name) != own:
                raise InputError(
                    f"the position is of a loader with {name} {state['made_of'].get(name)!r}, and this one has {own!r}",
                    "load_state_dict", "resume with the same, or begin an epoch with set_epoch",
                )  # fmt: skip
        self._epoch, self._step = int(state["epoch"]), int(state["step"])
        order = state["order"].tolist()
        self._samples = order if order else None

    def _made_of(self) -> dict[str, Any]:
        lengths = self.decider.lengths
        return {
            "samples": len(lengths), "batch_size": self._batch_size, "drop_last": self._drop_last,
            "seed": self._order.seed, "lengths": digest(lengths.tokens.tobytes().hex()) & 0xFFFFFFFF,
        }  # fmt: skip


class _WorkerLost(Exception):
    """A DataLoader's worker ended by itself."""


class _Tickets:
    """The steps of an epoch, each as a list of one ticket."""

    def __init__(self, loader: BalancedLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[Ticket]]:
        epoch = self._loader._epoch
        for number, samples in enumerate(self._loader._steps()):
            yield [Ticket(epoch, number, tuple(samples))]

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)


def _begin_worker(own: Callable[[int], None] | None, number: int) -> None:
    """own: what the user wants done first. A worker has all objects of the process that trains, and never frees one: to
    look through them for garbage took longer than several decisions.
    """
    gc.freeze()
    if own is not None:
        own(number)


def _as_it_is(found: Any) -> Any:
    return found


def _of_one(found: list[Any]) -> ReplicaShare:
    return _divided(found[0])


def _divided(found: Any) -> ReplicaShare:
    """What train_step takes. Raises what went wrong."""
    if isinstance(found, Failed):
        found.error.add_note(found.trace)
        raise found.error
    return ReplicaShare(found[0], (found[1],))
