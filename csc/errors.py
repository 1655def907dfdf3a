"""Errors that a user can act on.

Terms: *what* is wrong, *where* it is wrong, and the *remedy*: what to do about it. Every error that csc
raises on purpose carries the three, and reads as one or two sentences. Anything else that escapes is a bug of
csc.

    CscError(what, where="", remedy="")    str(): "WHERE: WHAT. REMEDY."
"""

from __future__ import annotations


def _sentence(text: str) -> str:
    text = text.strip()
    return text if not text or text[-1] in ".!?:\n" else text + "."


class CscError(Exception):
    """What is wrong, where, and what to do. `str()` joins the three into one line of prose."""

    def __init__(self, what: str, where: str = "", remedy: str = "") -> None:
        super().__init__(what, where, remedy)  # all three as args: the error survives copying between processes
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        text = _sentence(self.what)
        if self.where:
            text = f"{self.where}: {text}"
        return f"{text} {_sentence(self.remedy)}" if self.remedy else text


class InputError(CscError):
    """The user's batch, option or file does not fit the program. Nothing was changed; the call can be
    repeated.
    """


EXTRAS = {
    "transformers": "hf", "accelerate": "hf", "peft": "hf", "lightning": "lightning", "matplotlib": "plot",
    "triton": "gpu", "sklearn": "demo",
}  # fmt: skip


class MissingPackage(CscError, ImportError):
    """A package is not installed that only some parts of csc need; the remedy names the extra that brings it."""

    @classmethod
    def of(cls, error: ModuleNotFoundError, where: str) -> MissingPackage | None:
        """For a failed import, if one of csc's extras has the package. where: what needs it."""
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            return None
        return cls(f"{package} is not installed", where, f'pip install "csc-compiler[{EXTRAS[package]}]"')


class ProgramError(CscError):
    """The program directory cannot be read or contradicts itself."""


class ScheduleError(ProgramError):
    """The schedule is not a valid order of work: incomplete, out of order, or deadlocked."""


class DifferenceError(CscError):
    """A program does not train what eager PyTorch trains. It is not handed out."""


class RankLost(CscError):
    """Another rank of the group went away or stopped answering. This rank cannot go on."""


class StepFailed(CscError):
    """Another rank failed, or was about to do something else: no rank has done the step. Gradients are as they were,
    the ranks are in step, and the next one can be made.
    """
