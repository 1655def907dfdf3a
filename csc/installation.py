"""Where this csc's modules are, in every process of it, and the releases of other packages that it was tried with.

In a wheel csc.passes, csc.codegen and csc.kernels are folders of csc. In a clone they are folders beside it, which
pyproject.toml maps (package-dir). A clone that is imported by its place, since Python was started in it, is used
whole, whatever else is installed: its csc is never joined with the passes of a wheel or of another clone.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from importlib import metadata
from pathlib import Path

TOP = ("passes", "codegen", "kernels")  # of csc in a wheel, beside it in a clone
TRIED = {"torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 9))}  # first and last minor release (docs/installation.md)

_START = (
    "import runpy, sys; root, module = sys.argv[1:3]; del sys.argv[1:3]; sys.path.insert(0, root); import csc; "
    "sys.path.remove(root); runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def top_folders(folder: str) -> list[str]:
    """The folder that has csc.passes, csc.codegen and csc.kernels besides the package's own; none in a wheel.

    Args:
        folder: that of csc's `__init__.py`. What lies beside it counts if that is a clone of csc, whole.
    """
    package = Path(folder)
    root = package.parent
    if any((package / name / "__init__.py").exists() for name in TOP):
        return []
    if not all((root / name / "__init__.py").is_file() for name in TOP):
        return []
    try:
        project = (root / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        return []
    return [str(root)] if re.search(r'^name = "csc-compiler"', project, re.M) else []


def own_process(module: str, *words: str) -> list[str]:
    """The command for another process of this csc. `python -m` would take the csc of the current directory, or the one
    that is installed, where this one is another.
    """
    return [sys.executable, "-c", _START, str(Path(__file__).resolve().parents[1]), module, *words]


def warn_of_untried() -> None:
    """A warning for each package with a newer minor release than csc was tried with, said by the first rank alone."""
    for package, (first, last) in TRIED.items():
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:  # Triton is not everywhere; torch may be a build that is not installed
            continue
        number = re.match(r"(\d+)\.(\d+)", version)
        if number is None or tuple(map(int, number.groups())) <= last or not _speaks():
            continue
        warnings.warn(
            f"csc was tried with {package} {_dotted(first)} to {_dotted(last)}, and {version} is newer: it may work as "
            "well, and csc compares each program with eager PyTorch before it trains. "
            'PYTHONWARNINGS="ignore:csc was tried" leaves this line out',
            stacklevel=3,  # the line that imports csc
        )


def _speaks() -> bool:
    """Whether this process is the first of those that would all say the same: ranks, and workers of a loader."""
    from multiprocessing import parent_process

    return os.environ.get("RANK", "0") == "0" and parent_process() is None


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
