"""python -m benchmarks.coverage --libraries: models of other libraries, in an environment of their own.

The packages are installed, pinned and without what they ask for, in a temporary environment on top of this one, so that
torch and transformers stay what they are. Each model is compiled and compared with eager PyTorch in a process with
limits, parameter by parameter (benchmarks.judge).

compared(only, seconds, gigabytes) -> rows      {"name", "eager", "ways": {WAY: [kind, reason, differences]}}
markdown(rows), summary(rows)                   the table of docs/models.md
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.coverage.library_models import MODELS, PINS
from benchmarks.coverage.zoo.campaign import limited
from benchmarks.coverage.zoo.try_one import quiet
from benchmarks.judge import judge
from csc import cores

WAY = "step"
SOUND = ("right", "refused")


def compared(only: Sequence[str], seconds: float, gigabytes: float) -> Iterator[dict[str, Any]]:
    """The rows of the models whose names have one of these parts, all if there are none, one after the other."""
    with tempfile.TemporaryDirectory(prefix="csc_libraries_") as folder:
        python = environment(Path(folder))
        command = [str(python), "-m", "benchmarks.coverage.libraries", str(seconds), str(gigabytes), *only]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=cores.environment()) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("ROW "):
                    yield json.loads(line.removeprefix("ROW "))
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")


def environment(folder: Path) -> Path:
    """A new one in a folder: this one's packages, and PINS in front of them. Returns its python."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    beneath = dict.fromkeys(sysconfig.get_paths()[which] for which in ("purelib", "platlib"))
    lines = [f"import site; site.addsitedir({path!r})" for path in beneath]  # with what is installed as a link
    (site / "beneath.pth").write_text("\n".join(lines))
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", *PINS]
    subprocess.run(install, check=True, stdout=sys.stderr, env=cores.environment())
    return python


def row(name: str) -> Iterator[dict[str, Any]]:
    """The row of one model, in the environment."""
    found: dict[str, Any] = {"name": name, "eager": "", "ways": {}}
    outcome = judge(MODELS[name], MODELS[name].setting)
    if outcome.kind == "eager":
        yield found | {"eager": outcome.reason}
        return
    reason = re.sub(r"\S*site-packages/", "", outcome.reason)
    yield found | {"ways": {WAY: [outcome.kind, reason[:600], list(map(list, outcome.differences.items()))[:3]]}}


def every(only: Sequence[str], seconds: float, gigabytes: float) -> Iterator[dict[str, Any]]:
    """All rows, each from a process with limits of its own."""
    import csc.check.first
    import csc.runtime.trainer  # noqa: F401

    for name in MODELS:
        if not only or any(part in name for part in only):
            yield limited({"name": name, "eager": "", "ways": {}}, partial(row, name), (WAY,), seconds, gigabytes)


def kind(found: dict[str, Any]) -> str:
    """What came of a model; "eager" if that does not run."""
    return "eager" if found["eager"] else str(found["ways"][WAY][0])


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many models are right, refused, ..., of how many libraries."""
    counted = Counter(map(kind, rows))
    libraries = len({found["name"].partition(":")[0] for found in rows})
    kinds = ", ".join(f"{count} {one}" for one, count in counted.most_common())
    return f"{len(rows)} models of {libraries} libraries: {kinds}."


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each library, and why a model is not right."""
    pins = dict(pin.split("==") for pin in PINS)
    lines = ["| library | right | not right |", "| --- | --- | --- |"]
    by_library: dict[str, list[dict[str, Any]]] = {}
    for found in rows:
        by_library.setdefault(found["name"].partition(": ")[0], []).append(found)
    for library, models in sorted(by_library.items()):
        cells = [
            "; ".join(found["name"].partition(": ")[2] for found in models if (kind(found) == "right") == right)
            for right in (True, False)
        ]
        lines.append(f"| {library} {pins[library]} | {cells[0]} | {cells[1]} |")
    reasons = [
        f"- **{found['name']}**, {kind(found)}: {found['eager'] or found['ways'][WAY][1]}"
        for found in rows if kind(found) != "right"
    ]  # fmt: skip
    return "\n".join([*lines, "", *reasons]).rstrip()


if __name__ == "__main__":
    quiet()
    for one in every(sys.argv[3:], float(sys.argv[1]), float(sys.argv[2])):
        print("ROW " + json.dumps(one), flush=True)
