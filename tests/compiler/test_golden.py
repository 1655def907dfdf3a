"""What a reader sees of projector-only LLaVA on three stages, word for word: graphs after passes, emitted files.

After a change that is meant: `pytest tests/compiler/test_golden.py --update-golden`, then read `git diff`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from csc.codegen.manifest import manifest
from csc.codegen.write import sources

import csc
from csc.driver.compiled import CompiledModel
from csc.ir.printer import program_text
from csc.reports.inspection import dump
from tests.compiler.conftest import Models
from tests.models import hf

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
OPTIONS = {  # nothing here depends on a cost model: its figures may get better without touching these files
    "mesh": "pp=3",
    "microbatches": 2,
    "freeze": ["vision_tower", "language_model"],
    "cuts": ["model.language_model.layers.1", "model.language_model.layers.3"],
    "schedule": "1f1b",
}
LAYER = "model.language_model.layers.0"


def plan(compiled: CompiledModel) -> str:
    """What `partition` and `schedule` decide, without the graphs."""
    whole = dump(compiled, "schedule")
    return whole[whole.index("\nstage 0") + 1 :]


TEXTS = {
    "regions.txt": lambda compiled: dump(compiled, "regions"),
    "prune_decoder_layer.txt": lambda compiled: dump(compiled, "prune", region=LAYER),
    "stages_and_schedule.txt": plan,
    "rank_0.py": lambda compiled: dump(compiled, "schedule", "python", rank=0),
    "rank_1.py": lambda compiled: dump(compiled, "schedule", "python", rank=1),
    "rank_2.py": lambda compiled: dump(compiled, "schedule", "python", rank=2),
    "layer_multi_modal_projector.py": lambda compiled: dump(
        compiled, "schedule", "python", region="model.multi_modal_projector"
    ),
}


def without_line_numbers(text: str) -> str:
    """`modeling_llama.py:64` as `modeling_llama.py`: the lines of another release of transformers are others."""
    return re.sub(r"(\b\w+\.py):\d+", r"\1", text)


@pytest.mark.parametrize("name", TEXTS)
def test_golden(models: Models, name: str, request: pytest.FixtureRequest) -> None:
    found = without_line_numbers(TEXTS[name](models("llava", **OPTIONS)))
    file = GOLDEN / name
    if request.config.getoption("--update-golden"):
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(found)
    expected = file.read_text() if file.is_file() else ""
    if found != expected:
        lines = (text.splitlines(keepends=True) for text in (expected, found))
        difference = "".join(difflib.unified_diff(*lines, fromfile=f"tests/golden/{name}", tofile="now"))
        pytest.fail(
            f"{difference}\nIf this is meant: pytest tests/compiler/test_golden.py --update-golden", pytrace=False
        )


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(TEXTS)


def test_golden_files_are_small_enough_to_read() -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in GOLDEN.iterdir()}
    assert max(sizes.values()) < 320
    assert sum(sizes.values()) < 900


def every_text(compiled: CompiledModel) -> dict[str, str]:
    files = sources(compiled.program, compiled.options)
    files["program.json"] = repr(manifest(compiled.program, compiled.options, files))
    return files | {f"after {n}": program_text(p) for n, p in enumerate(compiled.history())}


@pytest.mark.slow
def test_the_same_model_built_again_gives_the_same_bytes(models: Models) -> None:
    again = csc.compile(hf.llava(), example=hf.llava_batch(4), **OPTIONS)
    first, second = every_text(models("llava", **OPTIONS)), every_text(again)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_no_path_of_this_machine_is_in_them(models: Models) -> None:
    for name, text in every_text(models("llava", **OPTIONS)).items():
        for foreign in (str(ROOT), str(Path.home()), "site-packages", "/tmp", "0x7f"):
            assert foreign not in text, f"{foreign} in {name}"


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_write_the_same_files(tmp_path: Path) -> None:
    """With other hash seeds: no order of a set or dictionary of objects reaches a file."""
    running = []
    for seed in ("1", "2"):
        command = [
            sys.executable,
            "-c",
            "from csc.commands.main import main; main()",
            "compile",
            "examples/llava.py:llava",
            "-o",
            str(tmp_path / seed),
        ]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL))
    assert [process.wait(timeout=600) for process in running] == [0, 0]
    first, second = (
        {p.relative_to(tmp_path / seed): p.read_bytes() for p in (tmp_path / seed).rglob("*") if p.is_file()}
        for seed in ("1", "2")
    )
    assert len(first) > 10
    listed = [json.loads(files.pop(Path("program.json"))) for files in (first, second)]
    assert all(one.pop("timings") for one in listed)  # the only thing that may differ
    assert first == second and listed[0] == listed[1]
