"""Steps that are divided by what each stage pays for their samples, from torch's DataLoader and its workers."""

from __future__ import annotations

import gc
import inspect
import logging
import operator
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from csc.balance.sample_costs import Costs, Lengths
from csc.driver.batches import ReplicaShare
from csc.driver.compiled import CompiledModel
from csc.errors import CscError, InputError, user_line
from csc.planning.assign.portfolio import CHEAP, EVERY, ROUNDS, Effort, Shape, assign, even, learned, with_known_sizes
from csc.planning.assign.step import BatchLayout, Kind, SampleCosts, Size, widths_of
from csc.planning.schedules.work import peaks
from csc.runtime.meeting import digest
from csc.torch_private.process_state import unattended_workers

# --- Groups of samples as microbatches, and whether they are what their lengths say ----------------------------------
#
# Terms
#   packed    a microbatch has one row with all its samples; else a row for each, padded
#   width     of a microbatch: the length of its rows, as the assignment counted on it
#   counted   an entry whose first dimension is a multiple of the units of a kind: pixels by tiles, patches, frames


TOKENS = ("input_ids", "labels", "decoder_input_ids", "attention_mask")  # whose second dimension is positions


@dataclass(frozen=True)
class Counted:
    """An entry that has `factor` rows for each unit of a kind."""

    entry: str
    kind: int
    factor: int


class Collation:
    """collate: from a list of samples to a batch, and if it takes a second argument, of the width that this says."""

    def __init__(self, dataset: Any, collate: Callable[..., Any]) -> None:
        self._dataset = dataset
        self._collate = collate
        self.takes_width = _takes_two(collate)

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Of the dataset, by its `__getitems__` if it has one (as Hugging Face's do)."""
        many = getattr(self._dataset, "__getitems__", None)
        return list(many(list(indices))) if callable(many) else [self._dataset[index] for index in indices]

    def batch(self, indices: Sequence[int], width: int | None = None) -> dict[str, Any]:
        """A microbatch of these samples. InputError if collate makes none."""
        return self._made(indices, self.samples(indices), width)

    def _made(self, indices: Sequence[int], samples: list[Any], width: int | None) -> dict[str, Any]:
        batch = self._collate(samples, width) if self.takes_width else self._collate(samples)
        if not isinstance(batch, Mapping) and not hasattr(batch, "items"):
            raise InputError(
                f"collate gave a {type(batch).__name__} for samples {_listed(indices)}", "collate",
                "return a mapping with the model's entries",
            )  # fmt: skip
        return dict(batch.items())

    def is_packed(self, indices: Sequence[int], width: int) -> bool:
        """Whether these two samples share a row."""
        rows, _ = shape_of(self.batch(indices, width))
        if rows not in (1, len(indices)):
            raise InputError(
                f"collate gave {rows} rows of tokens for {len(indices)} samples", "collate",
                "give each sample a row, or all of them one",
            )  # fmt: skip
        return rows == 1

    def checked(
        self, indices: Sequence[int], lengths: Lengths, packed: bool, width: int, counted: Sequence[Counted]
    ) -> dict[str, Any]:
        """The microbatch of these samples, `width` wide. InputError for a sample that is not as long as it should be or
        has not as many units.
        """
        samples = self.samples(indices)
        self._refuse_longer(indices, samples, lengths)
        batch = self._made(indices, samples, width)
        if shape_of(batch) != (1 if packed else len(indices), width):
            raise self._wrong(indices, lengths, packed, width, shape_of(batch))
        for entry in counted:
            expected = entry.factor * int(lengths.units[list(indices), entry.kind].sum())
            rows = (
                len(batch[entry.entry]) if entry.entry in batch else expected
            )  # a rank may leave out what it does not read
            if rows != expected:
                raise InputError(
                    f"samples {_listed(indices)} make {rows} rows of {entry.entry!r}, and {expected} by their "
                    f"{lengths.names[entry.kind]}{self._whose(indices, lengths, entry)}", "lengths",
                    "let lengths say what the dataset has; an order or a preprocessing may have changed since",
                )  # fmt: skip
        return batch

    def _whose(self, indices: Sequence[int], lengths: Lengths, entry: Counted) -> str:
        """The sample that has other units than it should."""
        for index in indices:
            alone = self.batch([index], int(lengths.tokens[index]))
            rows = len(alone[entry.entry]) if entry.entry in alone else 0
            if rows != entry.factor * int(lengths.units[index, entry.kind]):
                return f" (sample {index} has {rows} rows for {lengths.units[index, entry.kind]:g})"
        return ""

    def _wrong(
        self, indices: Sequence[int], lengths: Lengths, packed: bool, width: int, shape: tuple[int, int]
    ) -> InputError:
        """What to say of a microbatch of another size: which of its samples is to blame."""
        for index in indices:
            tokens = int(lengths.tokens[index])
            _, alone = shape_of(self.batch([index], tokens))
            if alone < tokens or (self.takes_width and alone != tokens):
                return _other_length(index, alone, tokens)
        rows = 1 if packed else len(indices)
        return InputError(
            f"collate made {shape[0]} x {shape[1]} tokens of samples {_listed(indices)}, and {rows} x {width} were "
            "expected from their lengths", "collate",
            "let collate take the width as its second argument and pad to that, or pad to `multiple` itself, or pass "
            "multiple=1",
        )  # fmt: skip

    def _refuse_longer(self, indices: Sequence[int], samples: Sequence[Any], lengths: Lengths) -> None:
        """InputError for a sample that shows more tokens than it should have: a collate might cut it in silence."""
        for index, sample in zip(indices, samples):
            ids: Any = sample.get("input_ids") if isinstance(sample, Mapping) else None
            if hasattr(ids, "__len__") and getattr(ids, "ndim", 1) == 1 and len(ids) > lengths.tokens[index]:
                raise _other_length(index, len(ids), int(lengths.tokens[index]))


def _other_length(index: int, tokens: int, declared: int) -> InputError:
    return InputError(
        f"sample {index} has {tokens} tokens, and {declared} by its lengths", "lengths",
        "let lengths say how many positions a sample takes in the language model, its images' among them",
    )  # fmt: skip


def shape_of(batch: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and width of a batch's tokens. InputError if it has none."""
    named = [batch[name] for name in TOKENS if isinstance(batch.get(name), torch.Tensor)]
    integers = [
        tensor for tensor in batch.values() if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
    ]
    for tensor in (*named, *integers):
        if tensor.dim() == 2:
            return tensor.shape[0], tensor.shape[1]
    raise InputError(
        "the batch that collate makes has no entry of tokens, whole numbers by row and position", "collate",
        "name the token ids input_ids, or pass a list of microbatches to train_step yourself",
    )  # fmt: skip


def counted_entries(
    batches: Sequence[Mapping[str, Any]], groups: Sequence[Sequence[int]], lengths: Lengths
) -> tuple[Counted, ...]:
    """The entries of these batches that count units, as all of them show."""
    counted = []
    for name in batches[0]:
        sizes = [len(b[name]) for b in batches if isinstance(b.get(name), torch.Tensor) and b[name].dim()]
        if len(sizes) < len(batches) or not batches[0][name].is_floating_point():
            continue
        for kind in range(lengths.units.shape[1]):
            units = [int(lengths.units[list(group), kind].sum()) for group in groups]
            factors = {size // unit if unit and not size % unit else 0 for size, unit in zip(sizes, units)}
            if len(factors) == 1 and 0 not in factors:
                counted.append(Counted(name, kind, factors.pop()))
    return tuple(counted)


def _takes_two(collate: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(collate).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds and parameter.default is inspect.Parameter.empty for parameter in parameters) > 1


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")


# --- One step's samples divided: pure functions of lengths and costs, the same on every rank and in every worker -----
#
# Without a limit of memory activations are held to ROOM times those of equal microbatches, or what equal loads take.


ROOM = 1.5
SPARE = 1.1  # times that for microbatches whose size is known
DRAWS = 32  # steps of random samples whose sizes are known beforehand
LESSONS = 4  # that shapes are learned from
LONG, LONGEST = 4, 8  # of them have so many of the longest samples each


@dataclass(frozen=True)
class StepAssignment:
    """groups[replica][microbatch]: samples of the dataset; sizes: of each; seconds: of the slowest replica."""

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: tuple[tuple[Size, ...], ...]
    seconds: float


@dataclass(frozen=True)
class Decider:
    """examples: of each size of microbatches that steps keep to one that has it, as samples of the dataset. shapes:
    that microbatches are filled to. rounds: of local changes. efforts: to keep to the sizes.
    """

    lengths: Lengths
    costs: Costs
    packed: bool
    replicas: int
    microbatches: int
    multiple: int
    examples: Mapping[Size, tuple[int, ...]] = field(default_factory=dict)
    shapes: tuple[Shape, ...] = ()
    rounds: int = ROUNDS
    efforts: tuple[Effort, ...] = EVERY

    def decide(self, indices: Sequence[int]) -> StepAssignment:
        """InputError for a sample that no rank has room for: its number in the dataset and what would do."""
        step = self.step(indices)
        hard = self.costs.room
        room = hard or self._soft_room(step)
        assignment = assign(step, room, self.rounds, list(indices), self.shapes)
        assignment = with_known_sizes(step, assignment, hard or [SPARE * one for one in room], self.efforts)
        groups = tuple(
            tuple(tuple(int(indices[i]) for i in group) for group in replica) for replica in assignment.groups
        )
        layout = self._layout(indices)
        sizes = tuple(tuple(layout.sizes(replica)) for replica in assignment.groups)
        return StepAssignment(groups, sizes, assignment.seconds)

    def step(self, indices: Sequence[int]) -> SampleCosts:
        """These samples against the model's costs."""
        layout = self._layout(indices)
        kinds = layout.samples.shape[1]
        return SampleCosts(
            layout.samples, self.costs.pipeline, self.costs.placement, self.costs.orders, self.replicas,
            self.microbatches, (1.0,) * kinds, layout,
        )  # fmt: skip

    def _layout(self, indices: Sequence[int]) -> BatchLayout:
        samples = list(indices)
        return BatchLayout(
            self.lengths.tokens[samples], self.lengths.units[samples], self.packed, self.multiple, self.known
        )

    def _soft_room(self, step: SampleCosts) -> list[float]:
        """Bytes by rank: what nobody limits, and is not to become much more than it was."""
        count = step.replicas * step.microbatches
        mean = np.concatenate([[1.0], step.samples.sum(axis=0) / count])
        equal = peaks(step.work(np.tile(mean, (step.microbatches, 1))), step.orders)
        return [max(ROOM * limit, other) for limit, other in zip(equal, step.peaks(even(step)))]

    def with_shapes(self, batch_size: int) -> Decider:
        """With shapes for steps of so many of the dataset's samples."""
        drawn = [self.step(indices) for _, indices in zip(range(LESSONS), self._draws(batch_size, longest=False))]
        room = self.costs.room or [min(peaks) for peaks in zip(*(self._soft_room(step) for step in drawn))]
        return replace(self, shapes=tuple(learned(drawn, room)))

    def with_sizes(self, batch_size: int) -> Decider:
        """Knowing the sizes of a few steps of random samples, each of which kept to those before where that was cheap;
        of some the longest samples are a part, which hardly any other sizes would have room for.
        """
        decider = replace(self, rounds=0, efforts=CHEAP)
        for indices in self._draws(batch_size):
            decided = decider.decide(indices)
            new = dict(zip(chain(*decided.sizes), chain(*decided.groups)))
            decider = replace(decider, examples={**new, **decider.examples})
        return replace(decider, rounds=self.rounds, efforts=self.efforts)

    def _draws(self, batch_size: int, longest: bool = True) -> Iterator[list[int]]:
        random, count = np.random.default_rng(0), min(batch_size, len(self.lengths))
        most = np.argsort(-self.lengths.tokens, kind="stable")[: LONG * LONGEST].tolist()
        for number in range(DRAWS):
            drawn = random.choice(len(self.lengths), count, replace=False).tolist()
            longest_samples = most[number::LONG][: count // 2] if longest and number < LONG else []
            yield [*longest_samples, *(sample for sample in drawn if sample not in longest_samples)][:count]

    @cached_property
    def known(self) -> Mapping[Kind, tuple[int, ...]]:
        """By kind the widths of these sizes; see csc.planning.assign.step."""
        return widths_of(self.sizes)

    @property
    def sizes(self) -> list[Size]:
        """All known ones."""
        return sorted(self.examples)


# --- What a DataLoader's worker does for a step: decide, load this replica's samples, collate them -------------------
#
# Terms
#   ticket      a step's number and its samples, which travel to the worker
#   delivered   what comes back: the microbatches of a replica, and in words what the whole step was divided into
#   failed      what went wrong there, in its place: an error that is made again in the process that trains


class Ticket(NamedTuple):
    epoch: int
    step: int
    samples: tuple[int, ...]


class Delivered(NamedTuple):
    """said: the same on all ranks, or they have not divided the step alike. A tuple, so that its tensors are pinned."""

    microbatches: list[dict[str, Any]]
    said: str
    seconds: float


@dataclass(frozen=True)
class Failed:
    """error: as csc says it; trace: where it came from, as text."""

    error: CscError
    trace: str


class Delivery:
    """A dataset whose items are steps. replicas: whose microbatches are loaded here."""

    def __init__(
        self, collation: Collation, decider: Decider, replicas: Sequence[int], counted: Sequence[Counted]
    ) -> None:
        self._collation, self._replicas, self._counted = collation, list(replicas), list(counted)
        self.decider = decider

    def __getitem__(self, ticket: Ticket) -> Delivered | Failed:
        try:
            return self._delivered(ticket)
        except CscError as error:
            return Failed(error, traceback.format_exc())

    def examples(self) -> Iterator[tuple[Size, list[dict[str, Any]]]]:
        """Of each known size a step of this process, all of whose microbatches have it."""
        count = self.decider.microbatches * len(self._replicas)
        for size, group in sorted(self.decider.examples.items()):
            yield size, [self._microbatch(Ticket(0, 0, group), group, size[-1])] * count

    def _delivered(self, ticket: Ticket) -> Delivered:
        decided = self.decider.decide(ticket.samples)
        batches = [
            self._microbatch(ticket, group, size[-1])
            for replica in self._replicas
            for group, size in zip(decided.groups[replica], decided.sizes[replica])
        ]
        return Delivered(batches, _said(ticket, decided), decided.seconds)

    def _microbatch(self, ticket: Ticket, group: Sequence[int], width: int) -> dict[str, Any]:
        decider = self.decider
        try:
            return self._collation.checked(group, decider.lengths, decider.packed, width, self._counted)
        except CscError:
            raise
        except Exception as error:  # of the user's dataset or collate
            raise InputError(
                f"{type(error).__name__} while samples {', '.join(map(str, group))} were loaded for step {ticket.step} "
                f"of epoch {ticket.epoch}: {error}", user_line(error) or "dataset",
                "mend the dataset or collate; going on with the loader takes the step up again",
            ) from error  # fmt: skip


def _said(ticket: Ticket, decided: StepAssignment) -> str:
    return f"step {ticket.step} of epoch {ticket.epoch}, divided as {digest(repr(decided.groups)) & 0xFFFFFFFF:08x}"


# --- In which order an epoch goes through its samples, and how it goes on in the middle of one -----------------------
#
# Terms
#   epoch    one pass over the sampler's order; a step takes the next `batch_size` samples of it
#   step     the number, within the epoch, of the step that comes next


class EpochOrder:
    """The same for an epoch on every rank: shuffled by `seed` and the epoch, or as a sampler says."""

    def __init__(self, count: int, sampler: Iterable[int] | None, shuffle: bool, seed: int) -> None:
        if sampler is not None and shuffle:
            raise InputError("a sampler and shuffle=True are given", "csc.balanced", "give one of them")
        if getattr(sampler, "num_replicas", 1) > 1:
            raise InputError(
                f"a {type(sampler).__name__} gives each process samples of its own, and csc divides them itself",
                "csc.balanced", "leave it out (shuffle=True, seed=...): every rank goes through all lengths",
            )  # fmt: skip
        self.count, self.seed, self.sampler, self._shuffle = count, seed, sampler, shuffle

    def of(self, epoch: int) -> list[int]:
        """The samples of an epoch. InputError for one that the dataset does not have."""
        if self.sampler is not None:
            move = getattr(self.sampler, "set_epoch", None)
            if callable(move):
                move(epoch)
            return self._checked(list(self.sampler), epoch)
        if not self._shuffle:
            return list(range(self.count))
        generator = torch.Generator().manual_seed(self.seed + epoch)
        return torch.randperm(self.count, generator=generator).tolist()

    def _checked(self, sampled: list[Any], epoch: int) -> list[int]:
        if not sampled:
            raise InputError(
                f"the sampler gives no samples in epoch {epoch}", "csc.balanced",
                "give one that can be gone through in every epoch; a generator can be once",
            )  # fmt: skip
        indices = []
        for place, sample in enumerate(sampled):
            try:
                indices.append(operator.index(sample))
            except TypeError:
                raise InputError(
                    f"the sampler gives {sample!r} at place {place}, which is no sample's number", "csc.balanced",
                    "give a sampler of whole numbers; batches are made by csc.balanced itself",
                ) from None  # fmt: skip
            if not 0 <= indices[-1] < self.count:
                raise InputError(
                    f"the sampler gives {sample} at place {place}, and the dataset has {self.count} samples",
                    "csc.balanced", "give a sampler of this dataset",
                )  # fmt: skip
        return indices

    def length(self) -> int:
        """How many samples an epoch has."""
        return len(self.sampler) if isinstance(self.sampler, Sized) else self.count


def steps_of(order: Sequence[int], batch_size: int, drop_last: bool) -> list[list[int]]:
    """The samples of each step; the last one may have fewer."""
    steps: list[Any] = [list(order[start : start + batch_size]) for start in range(0, len(order), batch_size)]
    return steps[:-1] if drop_last and steps and len(steps[-1]) < batch_size else steps


# --- Steps that are divided by what each stage pays for their samples, from torch's DataLoader and its workers -------


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
                delivered = next(source)
            except StopIteration:
                return
            except RuntimeError as error:
                if "DataLoader worker" not in str(error):
                    raise
                raise _WorkerLost(str(error).strip().splitlines()[0]) from error
            except (ConnectionError, EOFError) as error:  # it had announced tensors that were not fetched yet
                raise _WorkerLost(f"a DataLoader worker was gone before its tensors were fetched ({error})") from error
            divided = _divided(delivered)
            self._step += 1
            self.seconds = delivered[2]
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
        for name, now in self._made_of().items():
            if state["made_of"].get(name) != now:
                raise InputError(
                    f"the position is of a loader with {name} {state['made_of'].get(name)!r}, and this one has {now!r}",
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


def _begin_worker(first: Callable[[int], None] | None, number: int) -> None:
    """first: what the user wants done before. A worker has all objects of the process that trains, and never frees
    one: to look through them for garbage took longer than several decisions.
    """
    gc.freeze()
    if first is not None:
        first(number)


def _as_it_is(delivered: Any) -> Any:
    return delivered


def _of_one(delivered: list[Any]) -> ReplicaShare:
    return _divided(delivered[0])


def _divided(delivered: Any) -> ReplicaShare:
    """What train_step takes. Raises what went wrong."""
    if isinstance(delivered, Failed):
        delivered.error.add_note(delivered.trace)
        raise delivered.error
    return ReplicaShare(delivered[0], (delivered[1],))
