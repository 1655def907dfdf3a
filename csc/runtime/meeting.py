"""What all ranks do next, agreed on before anything moves between them; what they say, and where each stands."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import re
import struct
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from csc import devices, errors
from csc.errors import CscError, DifferenceError, InputError, RankLost, StepFailed
from csc.ir.schedule import WHOLE, Action
from csc.runtime.stores import ANSWER, Guarded

# --- Short texts that ranks tell each other, as bytes: nothing is unpickled ------------------------------------------


CONNECTIONS = re.compile(  # in what backends say of them; "gloo/transport" is where gloo's errors of them come from
    r"gloo/transport|connect|closed|closure|reset by peer|broken pipe|time?d? ?-?out|aborted|socket|remote|unreachable|"
    r"shut ?down|destroyed|eof|watchdog",
    re.IGNORECASE,
)


def gathered_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Every rank's text, by rank. All ranks of the group (None: the default one) call it."""
    device = devices.meeting_place(str(dist.get_backend_config(group)))
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([encoded.numel()], device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: encoded.numel()] = encoded
    rows = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(rows, padded, group=group)
    return [row[: int(size)].cpu().numpy().tobytes().decode() for row, size in zip(rows, sizes)]


def destroy(groups: list[dist.ProcessGroup]) -> None:
    """Take them out of the list, and let go of them: the garbage of a large process is looked through, which takes a
    second, only if something refers to one.
    """
    left = [weakref.ref(group) for group in groups]
    while groups:
        if devices.aborts(dist.get_backend(groups[-1])):
            groups[-1].abort()  # what runs on the device would be waited for
        dist.destroy_process_group(groups.pop())
    if any(group() is not None for group in left):
        gc.collect()


def first_line(error: BaseException) -> str:
    """The first line of an error, or its kind if it says nothing."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*\]\s*|\s*This is typically caused by.*$", "", line).rstrip(". ")[:200]


def is_silence(line: str) -> bool:
    """Whether the first line of a backend's error says that nobody answered in time."""
    return "timed out" in line.lower() or "timeout" in line.lower()


def is_lost(error: BaseException) -> bool:
    """Whether an error of a process group says that a rank went away or is silent; else it is of the call itself, as
    of a dtype that the backend does not take.
    """
    typed = getattr(dist, "DistError", ())
    return bool(CONNECTIONS.search(str(error))) or (isinstance(error, typed) and "support" not in str(error))


def cannot(error: BaseException, what: str, where: str) -> CscError:
    """What the backend does not do. what: that was asked of it; where: which rank asked."""
    backend = dist.get_backend_config() if dist.is_initialized() else "torch.distributed"
    return CscError(
        f"the process group ({backend}) does not do '{what}' ({first_line(error)}): it takes neither every dtype nor "
        "every operation, and of float8, int16 and uint16 gloo has no sums",
        where,
        "Have what ranks exchange in float32, bfloat16, float16, int32 or int64 (model.to(torch.bfloat16)), or choose "
        "a mesh without that exchange",
    )


# --- Votes: what ranks say when they meet, and what is wrong with it -------------------------------------------------
#
# A vote travels as numbers, texts as digests. Only where ranks do not agree their texts follow.
#
# Terms
#   signature   lines of text that must be the same on every rank, such as the sizes of a batch
#   shared      lines of text that must be the same on ranks of one replica: the sizes of its own samples
#   content     a number that ranks of one replica must have in common: a digest of the tokens of their share


SAME_SAMPLES = (
    "Give the ranks of a replica the same samples: those of compiled.dp_rank, shuffled with the same seed, and skip a "
    "batch on all of them or on none. No gradient was touched"
)

CHANGED = "the model has changed"  # in the signature of a rank whose programs are for the model as it was


@dataclass(frozen=True)
class StepVote:
    """What a rank says of the step that it is about to make; ranks need not agree.

    uneven: its microbatches may leave parameters out. stale: it has stepped parameters in shards, and not gathered
    them. nothing_ahead: it encodes nothing for the next step. prepares: its compiled functions are to be prepared
    (csc.runtime.fusing). unserved: it has no program for its microbatches. common: a digest of what replicas must have
    in common. kind, sizes: digests of the kind and of the sizes of its replica's samples.
    """

    uneven: bool = False
    stale: bool = False
    nothing_ahead: bool = False
    prepares: bool = False
    unserved: bool = False
    common: int = 0
    kind: int = 0
    sizes: int = 0

    @classmethod
    def of_any(cls, votes: Iterable[StepVote]) -> StepVote:
        """What at least one of them says; of digests nothing."""
        votes = list(votes)
        said = (field.name for field in fields(cls) if isinstance(field.default, bool))
        return cls(**{name: any(getattr(vote, name) for vote in votes) for name in said})


@dataclass(frozen=True)
class Vote:
    """What a rank says in a meeting, besides the operation. replica: its place on the dp axis. value, step: for the
    others, which need not agree.
    """

    signature: tuple[str, ...] = ()
    replica: int = 0
    content: int = 0
    value: float = 0.0
    shared: tuple[str, ...] = ()
    step: StepVote = StepVote()


NOTHING = Vote()


@dataclass(frozen=True)
class VoteTexts:
    """The texts of a vote, which follow when something is amiss. cause: see `cause`. difference: of a DifferenceError
    what, where and the remedy, which all ranks then raise.
    """

    operation: str
    cause: str
    signature: tuple[str, ...]
    content: int
    replica: int
    shared: tuple[str, ...] = ()
    difference: tuple[str, ...] = ()


def disagreement(operation: str, words: Sequence[VoteTexts]) -> StepFailed | None:
    """The first thing in which ranks differ, as an error."""
    first = words[0]
    for rank, word in enumerate(words):
        if word.operation != first.operation:
            return StepFailed(
                f"rank 0 is at '{first.operation}', and rank {rank} at '{word.operation}'",
                operation,
                "Every rank calls the same things in the same order, as often as the others: look for a rank whose "
                "data ended earlier, or for a call that only some ranks make",
            )
        if (CHANGED in word.signature) != (CHANGED in first.signature):
            changed_rank, not_there = (rank, 0) if CHANGED in word.signature else (0, rank)
            return StepFailed(
                f"the model has changed on rank {changed_rank} since it was compiled, and not on rank {not_there}",
                operation,
                "Make the same change on every rank, before the same step; a note on that rank says what has changed. "
                "No gradient was touched",
            )
        if word.signature != first.signature:
            return StepFailed(
                f"rank 0 and rank {rank} were given different batches: "
                f"{_difference(first.signature, word.signature, 0, rank)}",
                operation,
                "Give every rank the same global batch, or with local=True its replica's samples in as many "
                "microbatches. No gradient was touched",
            )
    for replica in sorted({word.replica for word in words}):
        ranks = [rank for rank, word in enumerate(words) if word.replica == replica]
        had = [(words[rank].shared, words[rank].content) for rank in ranks]
        other = next((rank for rank, signature in zip(ranks, had) if signature != had[0]), None)
        if other is not None:
            return _other_samples(operation, words, ranks[0], other)
    return None


def _other_samples(operation: str, words: Sequence[VoteTexts], one: int, other: int) -> StepFailed:
    """Two ranks of a replica differ in its samples."""
    local = words[one].shared or words[other].shared
    fault = f"rank {one} and rank {other} were given batches of the same sizes with other tokens"
    if local:
        same = words[one].shared == words[other].shared
        difference = "other tokens" if same else _difference(words[one].shared, words[other].shared, one, other)
        fault = f"rank {one} and rank {other} belong to one replica and were given different samples: {difference}"
    remedy = (
        SAME_SAMPLES
        if local
        else "Give every rank the same global batch: shuffle with the same seed everywhere, and skip a batch on all "
        "ranks or on none. No gradient was touched"
    )
    return StepFailed(fault, operation, remedy)


def agree(rows: Sequence[Sequence[int]]) -> bool:
    """Whether nobody failed, and operation, step and signature are the same; the content within each replica.

    A row: operation, step, failed, signature, replica, content, value, whether ranks wait to be taken up, and the
    fields of a StepVote; texts as digests.
    """
    contents = {(row[4], row[5]) for row in rows}
    same = len({tuple(row[:4]) for row in rows}) == 1 and len(contents) == len({row[4] for row in rows})
    return same and not rows[0][2]


def _difference(first_lines: Sequence[str], other: Sequence[str], first: int, second: int) -> str:
    ours = [line for line in first_lines if line not in other] or ["fewer entries"]
    theirs = [line for line in other if line not in first_lines] or ["fewer entries"]
    return f"{ours[0]} on rank {first}, {theirs[0]} on rank {second}"


def cause(error: BaseException | None) -> str:
    """Why a rank failed, as others tell of it; "" if it did not, or only saw another one go."""
    if error is None or isinstance(error, RankLost):
        return ""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in rank")]
    text = str(error) if isinstance(error, CscError) else f"{type(error).__name__}: {first_line(error)}"
    return " ".join([text, *(f"({note})" for note in notes)])


def digest(text: str) -> int:
    """64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def as_int(value: float) -> int:
    """The bits of a float64."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def as_float(bits: int) -> float:
    """The inverse."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


# --- Where every rank stands, for what a timeout says ----------------------------------------------------------------
#
# Terms
#   place      what a rank is doing: an action of its schedule, a meeting; None: between steps, in code of the user
#   waits      what for, and the rank that it comes from (None: from any of several)
#   failure    what went wrong on this rank, while it meets the others over it
#   tell       write into the store of the process group. A rank begins once it has stood at a place for a while, so
#              that nothing is written while all is well, and tells at every look from then on: one that has become
#              silent is stopped


SHOWN = 8  # ranks that a sentence names
TICKS, SHORTEST, LONGEST = 20, 0.05, 5.0  # of a timeout; seconds
CONNECTING = 10  # seconds
STALE = 2  # a part of a timeout after which a rank that has told nothing more is stopped; at least 5 s

Place = Action | str | None
Waits = tuple[str, int | None]


def store_of_processes(name: str, of_attempt: bool = True) -> dist.Store | None:
    """A connection of its own to the store where the processes found each other, and in it what is said under a name;
    None if the environment does not say where it is (MASTER_ADDR, MASTER_PORT). of_attempt: by processes that torchrun
    has started as often as this one, else by any.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        return None
    try:
        store = dist.TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=CONNECTING))
    except dist.DistError:
        return None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if of_attempt else "any"
    return dist.PrefixStore(f"csc/positions/{attempt}/{name}", store)


@dataclass(frozen=True)
class Standing:
    """Of one rank, as it told. silent: seconds since then, if that is long; 0: it stands there now."""

    place: str
    waits: str = ""
    peer: int | None = None
    silent: float = 0.0

    def text(self, rank: int) -> str:
        """In a clause."""
        source = "" if self.peer is None else f" from rank {self.peer}"
        stands = f"rank {rank}, {self.place}" + (f", waits for {self.waits}{source}" if self.waits else "")
        if not self.silent:
            return stands
        return (
            f"{stands} (said {self.silent:.0f} s ago and nothing since: stopped, or in a call that holds Python's lock)"
        )


class Positions:
    """One rank's. store: None: nobody is told. seconds: after which a silent rank counts as lost."""

    def __init__(self, store: dist.Store | None, rank: int, ranks: int, seconds: float) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._patience = max(LONGEST, seconds / STALE)
        self.place: Place = None
        self.waits: Waits | None = None
        self.failure: BaseException | None = None  # which this rank is about to raise, and first tells the others
        self._done = threading.Event()
        if store is not None:
            every = min(LONGEST, max(SHORTEST, seconds / TICKS))
            arguments = (weakref.ref(self), self._done, every)
            threading.Thread(target=_watch, args=arguments, name="csc-positions", daemon=True).start()
            weakref.finalize(self, self._done.set)

    def moved(self, place: Place) -> None:
        """It is there now, and waits for nothing."""
        self.place, self.waits = place, None

    def close(self) -> None:
        """Tell nobody any more."""
        self._done.set()

    @property
    def now(self) -> Standing:
        """Where this rank stands."""
        waits = self.waits
        return Standing(_words(self.place), *(waits if waits is not None else ()))

    def tell(self, standing: Standing) -> bool:
        """False if the store is gone."""
        assert self._store is not None
        try:
            standing_text = [standing.place, standing.waits, standing.peer, time.time()]
            self._store.set(str(self._rank), json.dumps(standing_text))
        except RuntimeError:
            return False
        return True

    def told(self) -> str:
        """To be added to a sentence: this rank's place, and those of the ranks that it waits for, each for the next;
        where it waits for any of several, those that wait for nobody or are silent. "" if nobody can be asked.
        """
        if self._store is None:
            return ""
        try:
            own = self.now
            texts = {self._rank: own.text(self._rank)}
            if own.peer is None:
                texts |= self._idle()
            else:
                peer: int | None = own.peer
                while peer is not None and peer not in texts and len(texts) < SHOWN:
                    standing = self._of(peer)
                    texts[peer] = standing.text(peer) if standing else f"rank {peer} has not said where it is"
                    peer = standing.peer if standing else None
            return f". Where they stand: {'; '.join(texts.values())}"
        except RuntimeError:  # the store is gone as well
            return ""

    def _idle(self) -> dict[int, str]:
        """Other ranks that wait for nobody; and those that did when they were last heard of, and may be stopped."""
        texts: dict[int, str] = {}
        for rank in range(self._ranks):
            standing = self._of(rank) if rank != self._rank else None
            is_idle = standing is None or not standing.waits or standing.silent > 0
            if rank != self._rank and len(texts) < SHOWN - 1 and is_idle:
                texts[rank] = standing.text(rank) if standing else f"rank {rank} has not said where it is"
        return texts

    def _of(self, rank: int) -> Standing | None:
        assert self._store is not None
        if not self._store.check([str(rank)]):
            return None
        place, waits, peer, when = json.loads(self._store.get(str(rank)))
        ago = time.time() - when  # by the clocks of two machines, which differ by less than a rank is waited for
        return Standing(place, waits, peer, ago if ago > self._patience else 0.0)


def _words(place: Place) -> str:
    if place is None:
        return "between steps"
    if isinstance(place, str):
        return f"at {place}"
    if place.kind == "REDUCE":
        return "at REDUCE, the sum of gradients"
    if place.kind in WHOLE:
        return f"at {place}"
    which = {"SEND": "after", "RECV": "before"}.get(place.kind, "at")
    kind = place.message or place.kind
    return f"{which} {kind} of stage {place.stage}, microbatch {place.microbatch}"


def _watch(positions: weakref.ref[Positions], done: threading.Event, every: float) -> None:
    """Tell a place that the rank has stood at since the last look, and at every look from then on where it is."""
    before, speaks = None, False
    while not done.wait(every):
        held_positions = positions()
        if held_positions is None:
            return
        now = held_positions.now
        speaks = speaks or now == before
        if speaks and not held_positions.tell(now):
            return
        before = now
        del held_positions


# --- What all ranks do next, agreed on before anything moves between them --------------------------------------------
#
# Terms
#   meeting     every rank says in a few numbers what it is about to do and whether it can; nobody goes on before all
#               have
#   operation   what that is: "train_step", "save", ...
#   said        with what: see csc.runtime.meeting
#   broken      some rank may have done what others have not: nothing is done together any more
#
# A rank that raises in `make` still comes, and all raise for the same step. It costs one small all_gather of a gloo
# group of its own; only if something is amiss, texts travel as well. Nothing is unpickled.


MIDDLE = "the middle of a step"
NEWS = 10.0  # seconds in which a death is seen after an error that it is the cause of, on a busy machine
LATE = 1.0  # the same after a rank was waited for in vain: a death would have been seen long before
STEP, FIRST_STEP, OWN_SAMPLES = "train_step", "the first step of its size", "the samples of a step"
EVALUATION, COMPILATION = "eval_step", "compile_for"
STEPS = (STEP, EVALUATION)  # what counts as a step
AGREED = (*STEPS, FIRST_STEP, OWN_SAMPLES)  # what is followed by messages
CLIP = "clip_grad_norm_"
PREPARED = (*STEPS, FIRST_STEP, COMPILATION)  # what takes a program
REPEATED = (*PREPARED, CLIP)  # what ranks that are left agree on anew, without those that died
Result = TypeVar("Result")


@dataclass(frozen=True)
class VoteNumbers:
    """What the others learn of a vote."""

    content: int
    value: float
    step: StepVote = StepVote()

    @classmethod
    def of(cls, row: Sequence[int]) -> VoteNumbers:
        """Of a row (see `agree`)."""
        said: dict[str, Any] = {}
        for field, number in zip(fields(StepVote), row[8:], strict=True):
            said[field.name] = bool(number) if isinstance(field.default, bool) else number
        return cls(row[5], as_float(row[6]), StepVote(**said))


class Interrupted(StepFailed):
    """A rank died meanwhile, and the others have come together without it."""


def without_dead(call: Callable[[], Result]) -> Result:
    """What a call of several meetings returns: begun again if a rank dies meanwhile. All ranks call it."""
    while True:
        with contextlib.suppress(Interrupted):
            return call()


def let_go(error: BaseException) -> None:
    """Clear the frames of this room and of torch.distributed that an error went through: they refer to groups, and to
    operations that are under way.
    """
    cause: BaseException | None = error
    while cause is not None:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            if str(frame.f_globals.get("__name__", "")).startswith(("csc.runtime.", "torch.distributed.")):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
        cause = cause.__cause__ or cause.__context__


class Survives(Protocol):
    """What a meeting asks of csc.runtime.survival.Survival. failures: how many ranks may die. mirror: whether a
    neighbour has what a lost rank had; lacks: whether that is so, and a mesh of fewer is to be made.
    """

    failures: int
    mirror: bool
    lacks: bool

    def lost(self, seconds: float = 0.0) -> bool:
        """Whether a member has died."""

    def recover(self, error: BaseException) -> None:
        """Come together with those that are left."""

    def waiting(self) -> bool:
        """Whether all that were lost wait to be taken up, as the first rank knows."""

    def rows(self, number: int) -> list[list[int]] | None:
        """Of a meeting that others have finished."""


class Joining(Exception):
    """All ranks that were lost have been started again, and ask to be taken up."""


class FewerRanks(Exception):
    """A rank is lost that is mirrored, and all that are left make a mesh of fewer."""


class _Anew(Exception):
    """Ranks have come together without some that died: they say everything again."""


class Meeting:
    """One rank's seat in the meetings of a group; without a group it is alone, and nothing has to be agreed on.

    step: how many steps were begun, failed ones included: the same on every rank. broken: since when and why; "": not.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, positions: Positions | None = None) -> None:
        """positions: what its ranks tell of where they stand; None: nothing."""
        self._group = group
        self.positions = positions or Positions(None, 0, 1, 0.0)
        self._alone = group is None
        self._lock = threading.RLock()
        self._closing: list[Callable[[], None]] = []
        self._agreed = False  # on a step that has not begun
        self.step = 0
        self.broken = ""
        self.survival: Survives | None = None  # if ranks may die
        self.rounds, self.rows = 0, list[list[int]]()  # how many were held, and what was said in the last one

    @classmethod
    def of_all(cls, timeout: float) -> Meeting:
        """Of all processes. All of them call it. timeout: seconds after which a rank that does not come is lost."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        store = store_of_processes(group.group_name)
        return cls(group, Positions(store, dist.get_rank(), dist.get_world_size(), timeout))

    @contextmanager
    def turn(self, operation: str) -> Iterator[None]:
        """Keep other threads of this process out. InputError, before anything is said, if one is in."""
        if not self._lock.acquire(blocking=False):
            raise InputError(
                "another thread of this process is in the middle of a step of the same model",
                operation,
                "Call it from one thread, or wait until the other call has returned",
            )
        try:
            yield
        except BaseException:
            if self._agreed:  # stopped between the agreement and what was agreed on: the others have begun
                self.give_up(f"rank {dist.get_rank()} was stopped at its beginning")
            raise
        finally:
            self.positions.moved(None)
            self._lock.release()

    def began(self) -> None:
        """A step that was agreed on begins: what goes wrong from now on is for `failed`."""
        self._agreed = False

    def closing(self, close: Callable[[], None]) -> None:
        """What to call when the group breaks, so that nobody waits for this rank any more."""
        self._closing.append(close)

    def hold(self, operation: str, make: Callable[[], tuple[Vote, Result]]) -> Result:
        """Run `make` on every rank, and return its result if all are about to do the same.

        Raises what `make` raised. StepFailed, on every rank, if another one failed, is about to do something else or
        has another batch; the next call is in order. RankLost if a rank does not come, or if the group is broken.
        """
        return self._held(operation, make)[0]

    def votes(self, operation: str, make: Callable[[], tuple[Vote, Result]]) -> tuple[Result, list[VoteNumbers]]:
        """As `hold`, with the votes of all ranks, by rank; of one alone its own."""
        own: list[Vote] = []

        def noted() -> tuple[Vote, Result]:
            vote, result = make()
            own.append(vote)
            return vote, result

        result, rows = self._held(operation, noted)
        votes = [VoteNumbers.of(row) for row in rows]
        return result, votes or [VoteNumbers(own[0].content, own[0].value, own[0].step)]

    def texts(self, operation: str, text: str) -> list[str]:
        """A text of every rank, by rank, right after a meeting in which all learnt that they would tell. RankLost."""
        if self._alone:
            return [text]
        texts = lambda: self.guarded(lambda: gathered_texts(text, self._group), operation)  # noqa: E731
        return list(self.surviving(texts, operation))

    def surviving(self, call: Callable[[], Result], operation: str) -> Result:
        """What all ranks do outside of a meeting. Interrupted if one of them dies meanwhile, and the others have come
        together without it.
        """
        try:
            return call()
        except RankLost as lost:
            if self.survival is None or not self.survival.lost(LATE if is_silence(lost.what) else NEWS):
                raise
            let_go(lost)
            self.survival.recover(lost)
            raise self._interrupted(operation) from None

    def _interrupted(self, operation: str) -> Interrupted:
        return Interrupted(
            f"a rank died {self._place(operation)}", "the ranks that are left", "Call it again on every rank"
        )

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Over which ranks meet, a gloo one; None: this one is alone."""
        return self._group

    def total(self, operation: str, make: Callable[[], float]) -> float:
        """The sum of what `make` returns on the ranks."""

        def vote() -> tuple[Vote, float]:
            value = make()
            return Vote(value=value), value

        own, rows = self._held(operation, vote)
        return sum(as_float(row[6]) for row in rows) if rows else own

    def _held(self, operation: str, make: Callable[[], tuple[Vote, Result]]) -> tuple[Result, Sequence[Sequence[int]]]:
        with self.turn(operation):
            self._refuse(operation)
            self.step += operation in STEPS
            self._agreed = False
            if self._alone:
                return make()[1], ()
            while True:
                try:
                    return self._once(operation, make)
                except _Anew:
                    if self.survival is not None and self.survival.lacks and operation in PREPARED:
                        raise FewerRanks from None
                    if operation not in REPEATED:
                        raise self._interrupted(operation) from None

    def _once(self, operation: str, make: Callable[[], tuple[Vote, Result]]) -> tuple[Result, Sequence[Sequence[int]]]:
        try:
            vote, result = make()
        except BaseException as error:
            rows, words = self._round(operation, NOTHING, error)
            self._check_middle(words)
            error.add_note(self._note(operation))
            raise
        rows, words = self._round(operation, vote, None)
        if words:
            raise self._amiss(operation, words)
        if any(row[7] for row in rows):
            raise Joining
        self._agreed = operation in AGREED
        return result, rows

    def failed(self, error: BaseException) -> BaseException:
        """All ranks call it that could not finish a step, and have let go of the others. Returns what to raise: the
        error itself on ranks that failed on their own, StepFailed on the others; a RankLost if the group is broken now.
        """
        if self.broken:
            return error
        try:
            _, words = self._round(MIDDLE, NOTHING, error)
        except RankLost as lost:
            return error if isinstance(error, RankLost) else lost
        except _Anew:  # a rank has died while this one failed on its own
            self.give_up(str(error))
            return error
        failed = [rank for rank, word in enumerate(words) if word.cause]
        if not failed or any(word.operation != MIDDLE for word in words):
            self.give_up(str(error))
            return error
        if not isinstance(error, RankLost):
            error.add_note(self._note(STEP))
            return error
        return self._of_others(STEP, words, failed)

    def give_up(self, why: str) -> None:
        """Break the group: this rank's place in it is lost. The others see it when they wait for this rank."""
        self.broken, self._agreed = self.broken or f"in step {self.step}: {why}", False
        self.positions.close()
        for close in self._closing:
            close()
        self.leave()

    def leave(self) -> None:
        """Free those who wait for this rank in a meeting."""
        if self._group is not None:
            groups, self._group = [self._group], None
            destroy(groups)

    def rejoin(self, seconds: float, store: dist.Store) -> None:
        """Ranks that are left meet from now on, in a new default group. All of them call it."""
        self.positions.close()
        self._group, self.broken = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds)), ""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        told = Guarded(dist.PrefixStore("positions", store), ANSWER, "the rank with the store")
        self.positions = Positions(told, rank, ranks, seconds)

    # one round

    def _refuse(self, operation: str) -> None:
        if self.broken:
            raise RankLost(
                f"the group of ranks is broken since something went wrong {self.broken}",
                operation,
                "Start again from saved weights",
            )

    def _round(
        self, operation: str, vote: Vote, error: BaseException | None
    ) -> tuple[Sequence[Sequence[int]], list[VoteTexts]]:
        """The votes of all, and their texts if they do not agree."""
        row = [
            digest(operation), self.step, int(error is not None), digest("\n".join(vote.signature)), vote.replica,
            vote.content ^ digest("\n".join(vote.shared)), as_int(vote.value),
            int(self.survival is not None and operation == STEP and self.survival.waiting()),
            *map(int, astuple(vote.step)),
        ]  # fmt: skip
        rows = self._said_by_all(operation, row)
        if agree(rows):
            return rows, []
        self.step = max(row[1] for row in rows)  # a rank that was at something else has not counted this step
        own = {
            "operation": operation, "cause": cause(error), "signature": list(vote.signature),
            "content": vote.content, "replica": vote.replica, "shared": list(vote.shared),
            "difference": list(error.args) if isinstance(error, DifferenceError) else [],
        }  # fmt: skip
        texts = self.guarded(lambda: gathered_texts(json.dumps(own), self._group), operation)
        words = [json.loads(text) for text in texts]
        listed = ("signature", "shared", "difference")
        return rows, [VoteTexts(**{**word, **{name: tuple(word[name]) for name in listed}}) for word in words]

    def _said_by_all(self, operation: str, row: Sequence[int]) -> list[list[int]]:
        number = self.rounds + 1
        try:
            rows_found: list[list[int]] = self.guarded(lambda: self._gathered(row), operation)
        except RankLost as lost:
            if self.survival is None or not self.survival.lost(LATE if is_silence(lost.what) else NEWS):
                raise
            let_go(lost)
            self.survival.recover(lost)
            known = self.survival.rows(number)
            if known is None:
                raise _Anew from None
            rows_found = known
        self.rounds, self.rows = number, rows_found
        return rows_found

    def _gathered(self, row: Sequence[int]) -> list[list[int]]:
        encoded = torch.tensor(row, dtype=torch.int64)
        gathered = [torch.empty_like(encoded) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(gathered, encoded, group=self._group)
        return torch.stack(gathered).tolist()

    def guarded(self, call: Callable[[], Any], operation: str) -> Any:
        """What all ranks do right after a meeting. If not all leave it the same way, the group breaks: RankLost."""
        self.positions.moved(f"'{operation}' of step {self.step}")
        self.positions.waits = ("the others", None)
        try:
            result = call()
        except RuntimeError as error:
            if not is_lost(error):
                refused = cannot(error, operation, f"rank {dist.get_rank()}")
                self.give_up(refused.what)
                raise refused from error
            let_go(error)  # of the group, so that it ends here
            reason = first_line(error)
            positions_text = self.positions.told() if is_silence(reason) else ""
            lost = RankLost(
                f"not every rank came to '{operation}' of step {self.step} ({reason}){positions_text}",
                f"rank {dist.get_rank()}",
                "Look at the output of the other ranks for the cause (one whose data ended earlier just ends), then "
                "start again from saved weights",
            )
            self.give_up(lost.what)
            raise lost from error
        except BaseException as error:
            self.give_up(f"rank {dist.get_rank()} was stopped in a meeting ({type(error).__name__})")
            raise
        self.positions.waits = None
        return result

    # what is amiss

    def _amiss(self, operation: str, words: Sequence[VoteTexts]) -> CscError:
        self._check_middle(words)
        failed = [rank for rank, word in enumerate(words) if word.cause]
        if failed:
            return self._of_others(operation, words, failed)
        error_found = disagreement(operation, words)
        if error_found is None:
            self.give_up("the ranks do not agree how many steps there were")
            return RankLost("the ranks do not agree how many steps there were", operation, "Start again")
        return error_found

    def _check_middle(self, words: Sequence[VoteTexts]) -> None:
        """RankLost if a rank is still in a step that this one has finished."""
        inside = [rank for rank, word in enumerate(words) if word.operation == MIDDLE]
        if inside:
            fault = f"rank {inside[0]} failed at the end of a step that others finished ({words[inside[0]].cause})"
            self.give_up(fault)
            raise RankLost(fault, f"rank {dist.get_rank()}", "Start again from saved weights")

    def _of_others(self, operation: str, words: Sequence[VoteTexts], failed: Sequence[int]) -> CscError:
        difference = next((words[rank].difference for rank in failed if words[rank].difference), None)
        if difference is not None:
            return DifferenceError(*difference)
        several = f" (and rank{'s' * (len(failed) > 2)} {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
        return StepFailed(
            f"rank {failed[0]}{several} failed {self._place(operation)}: {words[failed[0]].cause}",
            f"rank {dist.get_rank()}",
            "No gradient was touched on any rank, and the next call is in order"
            if operation in (*STEPS, OWN_SAMPLES)
            else "Mend that, and call it again on every rank",
        )

    def _note(self, operation: str) -> str:
        return f"{self._place(operation)}, which fails on every rank; the next call is in order"

    def _place(self, operation: str) -> str:
        return (
            f"in step {self.step}" if operation in (*STEPS, OWN_SAMPLES) else f"at '{operation}' after step {self.step}"
        )


# --- One rank makes something, the others get it as bytes; or all raise the same error -------------------------------
#
# Terms: the *first* rank is rank 0 of the default process group. Names and sizes travel as JSON, contents as they are,
# in chunks: nothing is unpickled. The group is a gloo one of its own, whose timeout is that of a long compilation.


LONGEST_MAKING = timedelta(hours=24)  # of a compilation that others wait for
CHUNK = 32 * 2**20  # bytes

Files = Mapping[str, bytes]


def broadcast_group() -> dist.ProcessGroup:
    """A group of all ranks. All of them call it."""
    return dist.new_group(backend="gloo", timeout=LONGEST_MAKING)


def first_makes(make: Callable[[], Files | None], group: dist.ProcessGroup) -> dict[str, bytes] | None:
    """What `make` returns on the first rank, on every rank; on the others `make` is not called.

    Raises, on every rank, the CscError that `make` raises; another error of it goes on as it is on the first rank, and
    as a CscError elsewhere. RankLost if the first rank goes away.
    """
    if dist.get_rank() != 0:
        return _received(group)
    try:
        files = make()
    except BaseException as error:  # from the keyboard, too: the others would wait for a day
        _send({"error": told(error, "rank 0 failed while it compiled")}, {}, group)
        raise
    listed = None if files is None else [[name, len(content)] for name, content in files.items()]
    _send({"files": listed}, files or {}, group)
    return None if files is None else dict(files)


def told(error: BaseException, doing: str) -> list[str]:
    """An error as texts that `heard` makes one of again. doing: a clause, for what is no CscError."""
    if isinstance(error, CscError):
        return [type(error).__name__, error.what, error.where, error.remedy]
    text = (str(error).strip().splitlines() or [""])[0]
    return ["CscError", f"{doing}: {type(error).__name__}: {text}", "", "See its own output"]


def heard(texts: Sequence[str]) -> CscError:
    """The error that another rank has told of."""
    kind, fault, where, remedy = texts
    error_class: type[CscError] = getattr(errors, kind, CscError)
    return error_class(fault, where, remedy)


def _send(header: Mapping[str, Any], files: Files, group: dist.ProcessGroup) -> None:
    text = json.dumps(header).encode()
    _broadcast(torch.tensor([len(text)]), group)
    _broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), group)
    content = bytearray(b"".join(files.values()))
    for start in range(0, len(content), CHUNK):
        _broadcast(torch.frombuffer(content[start : start + CHUNK], dtype=torch.uint8), group)


def _received(group: dist.ProcessGroup) -> dict[str, bytes] | None:
    length = torch.zeros(1, dtype=torch.int64)
    _broadcast(length, group)
    header = json.loads(_bytes(int(length), group))
    if "error" in header:
        raise heard(header["error"])
    if header["files"] is None:
        return None
    total = sum(size for _, size in header["files"])
    content = b"".join(_bytes(min(CHUNK, total - start), group) for start in range(0, total, CHUNK))
    files, start = {}, 0
    for name, size in header["files"]:
        files[name] = content[start : start + size]
        start += size
    return files


def _bytes(size: int, group: dist.ProcessGroup) -> bytes:
    chunk = torch.empty(size, dtype=torch.uint8)
    _broadcast(chunk, group)
    return chunk.numpy().tobytes()


def _broadcast(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    with answering("a rank", "the program was handed out"):
        dist.broadcast(tensor, src=0, group=group)


@contextmanager
def answering(who: str, doing: str) -> Iterator[None]:
    """RankLost in place of what a process group raises, or a CscError of what its backend does not do. who: went away;
    doing: meanwhile, a clause.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise cannot(error, doing, f"rank {dist.get_rank()}") from error
        text = (str(error).strip().splitlines() or [""])[0][:200]
        raise RankLost(
            f"{who} went away while {doing} ({text})",
            f"rank {dist.get_rank()}",
            "Look at the output of the others for the cause, then start again",
        ) from error
