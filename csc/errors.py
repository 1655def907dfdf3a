"""Errors that a user can act on.

Terms: *what* is wrong, *where* it is wrong, and the *remedy*: what to do about it. Every error that csc
raises on purpose carries the three, and reads as one or two sentences. Anything else that escapes is a bug of
csc.
"""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from functools import cache
from importlib.util import find_spec
from pathlib import Path


def _sentence(text: str) -> str:
    text = text.strip()
    return text if not text or text[-1] in ".!?:\n" else text + "."


class CscError(Exception):
    """An error that says what is wrong, where, and what to do. `str()` joins the three into sentences.

    Args:
        what: What is wrong.
        where: The place: a line of the user's code, a module, an argument.
        remedy: What to do about it.
    """

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


EXTRAS = {  # what is imported: the extra of csc-compiler that has it, and what pip knows it by
    "transformers": ("hf", "transformers>=5.0"), "accelerate": ("hf", "accelerate>=1.1"), "peft": ("hf", "peft>=0.18"),
    "PIL": ("hf", "pillow>=10"), "sklearn": ("demo", "scikit-learn>=1.5"), "lightning": ("lightning", "lightning>=2.5"),
    "pynvml": ("energy", "nvidia-ml-py>=12"), "matplotlib": ("plot", "matplotlib>=3.9"),
    "triton": ("gpu", "triton>=3.6"),
}  # fmt: skip


def installing(package: str) -> str:
    """The command that installs a package of an extra, however csc was installed, for a remedy.

    Args:
        package: the name that is imported, one of EXTRAS.
    """
    extra, requirement = EXTRAS[package]
    return f'pip install "{requirement}", or in a clone of csc pip install -e ".[{extra}]" for all that goes with it'


class MissingPackage(CscError, ImportError):
    """A package is not installed that only some parts of csc need; the remedy installs it, and names its extra."""

    @classmethod
    def of(cls, error: ModuleNotFoundError, where: str) -> MissingPackage | None:
        """For a failed import, if one of csc's extras has the package. where: what needs it."""
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            return None
        return cls(f"{package} is not installed", where, installing(package))


class ProgramError(CscError):
    """The program directory cannot be read or contradicts itself."""


class ScheduleError(ProgramError):
    """The schedule is not a valid order of work: incomplete, out of order, or deadlocked."""


class DifferenceError(CscError):
    """A program would not train what eager PyTorch trains. csc does not run it."""


class RankLost(CscError):
    """Another rank of the group went away or stopped answering. This rank cannot go on."""


class StepFailed(CscError):
    """Another rank failed, or was about to do something else: no rank has done the step. Gradients are as they were,
    the ranks are in step, and the next one can be made.
    """


def user_line(error: BaseException) -> str:
    """`file:line: code` of the innermost frame outside torch, the standard library and csc; "" if there is none."""
    innermost = ""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for item in chain:
        innermost = _innermost(traceback.extract_tb(item.__traceback__)) or innermost
    return innermost


def calling_line() -> str:
    """The same, of the code that is running."""
    return _innermost(traceback.extract_stack())


def raised_in_csc(error: BaseException) -> str:
    """`file:line, in function` of the innermost frame, if that is csc's own: then csc failed, whatever it was given.
    "" if other code raised the error.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not is_of_csc(frames[-1].filename):
        return ""
    last = frames[-1]
    folder = next(candidate for candidate in _csc_folders() if last.filename.startswith(candidate))
    return f"{os.path.relpath(last.filename, Path(folder).parent)}:{last.lineno}, in {last.name}"


def _innermost(frames: traceback.StackSummary) -> str:
    innermost = ""
    for frame in frames:
        name = frame.filename
        if not is_of_libraries(name) and not name.startswith("<"):
            code = (frame.line or linecache.getline(name, frame.lineno or 0)).strip()
            innermost = f"{name}:{frame.lineno}: {code}"
    return innermost


def is_of_libraries(file: str) -> bool:
    """Whether a file is torch's, csc's or Python's own."""
    standard = sysconfig.get_paths()["stdlib"]
    torch_home = str(Path(find_spec("torch").origin).parent)  # type: ignore[union-attr, arg-type]
    of_python = file.startswith(standard) and "site-packages" not in file
    return of_python or file.startswith(torch_home + os.sep) or is_of_csc(file)


def is_of_csc(file: str) -> bool:
    """Whether a file is csc's own, wherever its packages lie."""
    return file.startswith(_csc_folders())


@cache
def _csc_folders() -> tuple[str, ...]:
    """Of a checkout several; found without importing what stands on higher floors."""
    inside = [find_spec(f"csc.{name}") for name in ("passes", "codegen", "kernels")]
    folders = [place for spec in inside if spec is not None for place in spec.submodule_search_locations or ()]
    ours = os.path.dirname(os.path.abspath(__file__))
    return tuple(os.path.abspath(folder) + os.sep for folder in (ours, *folders))
