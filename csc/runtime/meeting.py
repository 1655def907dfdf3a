"""What all ranks do next, agreed on before anything moves between them.

Terms
  meeting     every rank says in a few numbers what it is about to do and whether it can; nobody goes on before all have
  operation   what that is: "train_step", "save", ...
  said        with what: see csc.runtime.words
  broken      some rank may have done what others have not: nothing is done together any more

    meeting = Meeting.of_all(timeout)                   every rank makes it; Meeting() where there is one process
    meeting.hold("train_step", make) -> result          `make` returns (what it says, result)
    meeting.heard("train_step", make) -> (result, [Heard])    the same, and the numbers that each rank said
    meeting.total("clip_grad_norm_", make) -> float     `make` returns a number; the sum over ranks, in their order
    meeting.texts("samples", text) -> [text]            of all ranks, who have just agreed to tell each other
    meeting.failed(error) -> error                      a rank could not finish what was agreed on: what to raise
    meeting.turn("train_step")                          one call at a time: InputError to a second thread

A rank that raises in `make` still comes, and all raise for the same step. It costs one small all_gather of a gloo group
of its own; only if something is amiss, texts travel as well. Nothing is unpickled.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from csc.errors import CscError, InputError, RankLost, StepFailed
from csc.runtime.positions import Positions, store_of_processes
from csc.runtime.texts import cannot, first_line, gathered_texts, is_lost, is_silence
from csc.runtime.words import NOTHING, Said, Word, agree, as_float, as_int, cause, digest, disagreement

MIDDLE = "the middle of a step"
STEP, FIRST_STEP, OWN_SAMPLES = "train_step", "the first step of its size", "the samples of a step"
EVALUATION, COMPILATION = "eval_step", "compile_for"
STEPS = (STEP, EVALUATION)  # what counts as a step
AGREED = (*STEPS, FIRST_STEP, OWN_SAMPLES)  # what is followed by messages
Result = TypeVar("Result")


@dataclass(frozen=True)
class Heard:
    """The numbers of what a rank said."""

    content: int
    value: float
    meets: int = 0


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

    def hold(self, operation: str, make: Callable[[], tuple[Said, Result]]) -> Result:
        """Run `make` on every rank, and return its result if all are about to do the same.

        Raises what `make` raised. StepFailed, on every rank, if another one failed, is about to do something else or
        has another batch; the next call is in order. RankLost if a rank does not come, or if the group is broken.
        """
        return self._held(operation, make)[0]

    def heard(self, operation: str, make: Callable[[], tuple[Said, Result]]) -> tuple[Result, list[Heard]]:
        """As `hold`, with what every rank said, by rank; of one alone what it said itself."""
        own: list[Said] = []

        def said() -> tuple[Said, Result]:
            found, result = make()
            own.append(found)
            return found, result

        result, rows = self._held(operation, said)
        heard = [Heard(row[5], as_float(row[6]), row[7]) for row in rows]
        return result, heard or [Heard(own[0].content, own[0].value, own[0].meets)]

    def texts(self, operation: str, text: str) -> list[str]:
        """A text of every rank, by rank, right after a meeting in which all learnt that they would tell. RankLost."""
        return [text] if self._alone else self.guarded(lambda: gathered_texts(text, self._group), operation)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Over which ranks meet, a gloo one; None: this one is alone."""
        return self._group

    def total(self, operation: str, make: Callable[[], float]) -> float:
        """The sum of what `make` returns on the ranks."""

        def said() -> tuple[Said, float]:
            value = make()
            return Said(value=value), value

        own, rows = self._held(operation, said)
        return sum(as_float(row[6]) for row in rows) if rows else own

    def _held(self, operation: str, make: Callable[[], tuple[Said, Result]]) -> tuple[Result, Sequence[Sequence[int]]]:
        with self.turn(operation):
            self._refuse(operation)
            self.step += operation in STEPS
            self._agreed = False
            if self._alone:
                return make()[1], ()
            try:
                said, result = make()
            except BaseException as error:
                rows, words = self._round(operation, NOTHING, error)
                self._check_middle(words)
                error.add_note(self._note(operation))
                raise
            rows, words = self._round(operation, said, None)
            if words:
                raise self._amiss(operation, words)
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
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
            gc.collect()

    # one round

    def _refuse(self, operation: str) -> None:
        if self.broken:
            raise RankLost(
                f"the group of ranks is broken since something went wrong {self.broken}",
                operation,
                "Start again from saved weights",
            )

    def _round(
        self, operation: str, said: Said, error: BaseException | None
    ) -> tuple[Sequence[Sequence[int]], list[Word]]:
        """What all said, and the words of all if they do not agree."""
        row = [
            digest(operation), self.step, int(error is not None), digest("\n".join(said.signature)),
            said.replica, said.content ^ digest("\n".join(said.shared)), as_int(said.value), said.meets,
        ]  # fmt: skip
        rows = self.guarded(lambda: self._gathered(row), operation)
        if agree(rows):
            return rows, []
        self.step = max(row[1] for row in rows)  # a rank that was at something else has not counted this step
        own = {
            "operation": operation, "cause": cause(error), "signature": list(said.signature),
            "content": said.content, "replica": said.replica, "shared": list(said.shared),
        }  # fmt: skip
        texts = self.guarded(lambda: gathered_texts(json.dumps(own), self._group), operation)
        words = [json.loads(text) for text in texts]
        listed = ("signature", "shared")
        return rows, [Word(**{**word, **{name: tuple(word[name]) for name in listed}}) for word in words]

    def _gathered(self, row: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(row, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(found, own, group=self._group)
        return torch.stack(found).tolist()

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
            reason = first_line(error)
            told = self.positions.told() if is_silence(reason) else ""
            lost = RankLost(
                f"not every rank came to '{operation}' of step {self.step} ({reason}){told}",
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

    def _amiss(self, operation: str, words: Sequence[Word]) -> CscError:
        self._check_middle(words)
        failed = [rank for rank, word in enumerate(words) if word.cause]
        if failed:
            return self._of_others(operation, words, failed)
        found = disagreement(operation, words)
        if found is None:
            self.give_up("the ranks do not agree how many steps there were")
            return RankLost("the ranks do not agree how many steps there were", operation, "Start again")
        return found

    def _check_middle(self, words: Sequence[Word]) -> None:
        """RankLost if a rank is still in a step that this one has finished."""
        inside = [rank for rank, word in enumerate(words) if word.operation == MIDDLE]
        if inside:
            what = f"rank {inside[0]} failed at the end of a step that others finished ({words[inside[0]].cause})"
            self.give_up(what)
            raise RankLost(what, f"rank {dist.get_rank()}", "Start again from saved weights")

    def _of_others(self, operation: str, words: Sequence[Word], failed: Sequence[int]) -> StepFailed:
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
