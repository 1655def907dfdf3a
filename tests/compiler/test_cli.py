"""The command line on examples/llava.py:llava: what it prints, its exit codes, its sentences."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
from csc.passes.pipeline import OWN

import csc.commands.target
from csc.commands import main as cli
from csc.ir.mesh import Mesh
from csc.runtime.loaded_program import load
from tests.exactness import FLOAT32

pytestmark = pytest.mark.usefixtures("traces")

ROOT = Path(__file__).parents[2]
TARGET = f"{ROOT}/examples/llava.py:llava"


@dataclass
class Ran:
    """What a command left."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture(scope="module", autouse=True)
def one_capture() -> Iterator[None]:
    """The commands of this file share the loaded example, and with it its capture, which costs seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csc.commands.target, "load_file", functools.cache(csc.commands.target.load_file))
        yield


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """run("passes", "--json"): the command in this process."""

    def call(*arguments: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["csc", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


def process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The installed command in a process of its own."""
    script = Path(sys.executable).with_name("csc")
    return subprocess.run([script, *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=600)


def test_passes(run: Run) -> None:
    listed = json.loads(run("passes", "--json").out)["passes"]
    assert [p["name"] for p in listed] == [
        "shapes", "dropout", "precision", "attention", "context", "data_parallel", "loss", "head", "regions", "tensor",
        "sequence", "differentiate", "simplify", "views", "freeze", "prune", "features", "recompute", "split",
        "attention_order", "overlap", "in_place", "partition", "schedule",
    ]  # fmt: skip
    for contract in listed:
        assert all(contract[field] for field in ("summary", "requires", "establishes", "ensures", "before", "after")), (
            contract["name"]
        )
    table = run("passes").out
    assert all(step.name in table for step in OWN)


def test_explain(run: Run) -> None:
    found = json.loads(run("explain", TARGET, "--json").out)
    parts = {row["name"]: row for row in found["components"]}
    assert list(parts) == ["vision_tower", "multi_modal_projector", "language_model", "LlavaForConditionalGeneration"]
    assert parts["vision_tower"]["trainable"] == 0
    assert (parts["vision_tower"]["needs_dx"], parts["vision_tower"]["needs_dw"]) == (False, False)
    assert parts["vision_tower"]["matmuls"][1:] == [0, 0]
    assert parts["vision_tower"]["pruned_flops"] > 0
    assert parts["multi_modal_projector"]["trainable"] == parts["multi_modal_projector"]["parameters"] > 0
    assert (parts["language_model"]["needs_dx"], parts["language_model"]["needs_dw"]) == (True, False)
    assert sum(row["matmuls"][1] + row["matmuls"][2] for row in found["regions"]) == 32
    assert {row["stage"] for row in found["regions"]} == {0, 1, 2}
    table = run("explain", TARGET)
    assert table.code == 0
    assert "multi_modal_projector" in table.out


@pytest.mark.slow
def test_memory_options(run: Run) -> None:
    """Precision and recomputation by component; explain says what runs again."""
    more = ("--precision", "bf16", "--keep-fp32", "lm_head", "--recompute", "language_model=full,lm_head=none")
    done = run("verify", TARGET, "--json", "--mesh", "pp=2", *more)
    found = json.loads(done.out)
    assert done.code == 0 and 1e-4 < found["grad_rel_max"] < 0.1
    rows = {row["name"]: row["why"] for row in json.loads(run("explain", TARGET, "--json", *more).out)["regions"]}
    again = {name for name, why in rows.items() if "of F again" in why}
    assert again and all("language_model" in name for name in again)
    assert run("explain", TARGET, "--recompute", "all").code == 2


@pytest.mark.parametrize("freeze", [(), ("--freeze", "vision_tower")])
def test_verify(run: Run, freeze: tuple[str, ...]) -> None:
    done = run("verify", TARGET, "--json", "--mesh", "pp=2", *freeze)
    assert done.code == 0
    found = json.loads(done.out)
    assert found["params_missing"] == []
    assert found["params_checked"] == (43 if freeze else 4)
    assert found["loss_rel"] <= FLOAT32
    assert found["grad_rel_max"] <= FLOAT32
    assert found["loss"] == pytest.approx(found["loss_eager"], rel=FLOAT32)


def test_lists_are_repeated_or_separated_by_commas(run: Run) -> None:
    cuts = "model.multi_modal_projector,model.language_model.layers.2"
    first = run("explain", TARGET, "--json", "--freeze", "vision_tower, language_model", "--cut", cuts)
    second = run(
        "explain", TARGET, "--json", "--freeze", "vision_tower", "--freeze", "language_model",
        "--cut", cuts.split(",")[0], "--cut", cuts.split(",")[1],
    )  # fmt: skip
    assert first.code == second.code == 0 and json.loads(first.out) == json.loads(second.out)
    opens = {row["name"]: row["stage"] for row in json.loads(first.out)["regions"]}
    assert [opens[name] for name in cuts.split(",")] == [1, 2]


@pytest.mark.slow
def test_verify_beside_float64(run: Run) -> None:
    found = json.loads(run("verify", TARGET, "--json", "--mesh", "pp=2", "--float64").out)
    assert len(found["from_float64"]) == found["params_checked"]
    assert all(0 < one < 1e-4 for both in found["from_float64"].values() for one in both)
    assert "eager from float64" in run("verify", TARGET, "--mesh", "pp=2", "--float64").out


def test_verify_fails_on_a_difference(run: Run) -> None:
    """Two microbatches sum in another order than eager does: not equal bit for bit."""
    done = run("verify", TARGET, "--json", "--tolerance", "0")
    found = json.loads(done.out)
    assert 0 < max(found["grad_rel_max"], found["loss_rel"]) < FLOAT32
    assert (done.code, found["ok"]) == (1, False)


class Page(HTMLParser):
    """Collects what is open and what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


REGIONS = ["model.vision_tower.embeddings", "model.multi_modal_projector", "model.merge", "lm_head",
           *(f"model.language_model.layers.{i}" for i in range(4))]  # fmt: skip


def test_compile_single_ranks(run: Run, tmp_path: Path) -> None:
    """`--rank`: the files of these alone, and a program.json as of all."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    run("compile", TARGET, "-o", whole)
    done = run("compile", TARGET, "-o", part, "--rank", 2, "--rank", 1)
    assert done.code == 0
    assert "of 3 ranks only 1, 2" in done.out
    assert load(part, [1, 2]).manifest.fingerprint == load(whole).manifest.fingerprint
    names = {str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file()}
    assert {str(p.relative_to(part)) for p in part.rglob("*") if p.is_file()} == names - {"rank_0.py"}
    assert json.loads(run("compile", TARGET, "-o", part, "--rank", 0, "--json").out)["emitted"] == [0]


@pytest.mark.parametrize(("rank", "said"), [("3", "there is no rank 3"), ("-1", "no rank -1"), ("x", "valid integer")])
def test_compile_a_rank_that_is_not_there(run: Run, tmp_path: Path, rank: str, said: str) -> None:
    done = run("compile", TARGET, "-o", tmp_path / "program", "--rank", rank)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert not (tmp_path / "program").exists()


def test_dump_text(run: Run) -> None:
    after = {name: run("dump", TARGET, "--after", name).out for name in ("capture", "regions", "prune", "schedule")}
    assert "symbolic [1]" in after["capture"]
    assert all(f"region {name}  " in after["regions"] for name in REGIONS)
    assert "variant" not in after["regions"]
    assert "needs nothing" in after["prune"]
    assert "\nrank 2: " in after["schedule"]
    one = run("dump", TARGET, "--after", "prune", "--region", "model.language_model.layers.2").out
    assert one.count("\nregion ") == one.count("\nvariant ") == 1
    rank = run("dump", TARGET, "--rank", "1").out
    assert "\nstage 1 " in rank
    assert "\nstage 0 " not in rank


def test_dump_python(run: Run, tmp_path: Path) -> None:
    whole = run("dump", TARGET, "--format", "python").out
    files = re.split(r"^# ===== (.+)$", whole, flags=re.MULTILINE)[1:]
    names, texts = files[::2], files[1::2]
    assert {"rank_0.py", "rank_1.py", "rank_2.py", "schedule.txt", "layers/tables.py"} <= set(names)
    for name, text in zip(names, texts, strict=True):
        if name.endswith(".py"):
            compile(text, name, "exec")
    output = tmp_path / "rank.py"
    done = run("dump", TARGET, "--format", "python", "--rank", 2, "-o", output)
    assert done.out == ""
    assert "stage 2 of 3" in (ast.get_docstring(ast.parse(output.read_text())) or "")


def test_dump_and_diff_as_json(run: Run, tmp_path: Path) -> None:
    done = json.loads(run("dump", TARGET, "--after", "prune", "--json").out)
    assert done["after"] == "prune" and done["text"] == run("dump", TARGET, "--after", "prune").out
    done = json.loads(run("dump", TARGET, "--json", "-o", tmp_path / "graph.txt").out)
    assert done["output"] == str(tmp_path / "graph.txt") and (tmp_path / "graph.txt").read_text()
    assert "text" not in done
    done = json.loads(run("diff", TARGET, "differentiate", "prune", "--json").out)
    assert done["diff"] == run("diff", TARGET, "differentiate", "prune").out


def test_dump_pictures(run: Run) -> None:
    mermaid = run("dump", TARGET, "--format", "mermaid").out
    assert mermaid.startswith("flowchart TB\n")
    assert all(f'"{name}"' in mermaid for name in REGIONS)
    assert mermaid.count("subgraph") == len(re.findall(r"^  end$", mermaid, re.MULTILINE)) == 3 + 1
    legend = mermaid[mermaid.index("subgraph legend") :]
    assert all(f'"{words}"' in legend for words in ("forward only", "a gradient passes", "trains"))
    fills = set(re.findall(r"fill:(#\w+)", mermaid))
    assert fills == set(re.findall(r"fill:(#\w+)", legend)), "the legend has every colour"


def test_dump_html(run: Run) -> None:
    page = Page()
    page.feed(run("dump", TARGET, "--format", "html").out)
    assert page.open == []
    assert {"svg", "table", "pre"} <= page.seen
    assert all(words in page.text for words in ("forward only", "trains", "no gradient comes back"))
    assert all(name in page.text for name in REGIONS)


def test_diff(run: Run) -> None:
    text = run("diff", TARGET, "differentiate", "prune", "--region", "model.language_model.layers.0").out
    assert text.startswith("--- after differentiate\n+++ after prune\n")
    removed = [line for line in text.splitlines() if line.startswith("-")]
    assert any("d_mlp_down_proj_mm" in line or "aten.mm.default" in line for line in removed)
    assert run("diff", TARGET, "prune", "prune").out == ""


def test_compile(run: Run, tmp_path: Path) -> None:
    done = run("compile", TARGET, "-o", tmp_path / "program", "--mesh", "pp=2,dp=2", "--microbatches", 1, "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["ranks"] == 4
    assert [p["name"] for p in found["passes"]] == [step.name for step in OWN]
    program = load(found["directory"])
    assert program.manifest.mesh == Mesh(dp=2, pp=2)
    assert not (tmp_path / "program" / "weights.safetensors").exists()
    run("compile", TARGET, "-o", tmp_path / "program", "--weights", "--cut", "lm_head", "--mesh", "pp=2")
    assert (tmp_path / "program" / "weights.safetensors").is_file()
    assert load(tmp_path / "program").manifest.stages[1].regions == ("lm_head",)


BAD = [
    (["explain", "no_such.py:llava"], "no file no_such.py", "path of a Python file"),
    (["explain", "llava"], "'llava' names no model", "path.py:name"),
    (["explain", TARGET.replace(":llava", ":lava")], "has no 'lava'", "did you mean llava"),
    (["explain", TARGET.replace(":llava", ":IMAGE_TOKEN")], "is a int", "nn.Module"),
    (["explain", TARGET, "--mesh", "pp=40"], "the mesh asks for 40 stages", "use pp=13 or less"),
    (["explain", TARGET, "--mesh", "pp"], "is not NAME=SIZE", "pp=3"),
    (
        ["explain", TARGET, "--freeze", "vision_towr"],
        "'vision_towr' matches no parameter",
        "did you mean 'vision_tower'",
    ),
    (["explain", TARGET, "--context", "vision_tower"], "--context has 'vision_tower'", "component=ranks"),
    (["explain", TARGET, "--context", "tower=2"], "'tower', which is no component", "vision_tower"),
    (["explain", TARGET, "--cut", "nowhere"], "'nowhere'", ""),
    (["explain", TARGET, "--schedule", "zigzag"], "no schedule 'zigzag'", "gpipe, 1f1b"),
    (["dump", TARGET, "--after", "magic"], "no pass 'magic'", "choose one of capture, shapes"),
    (["dump", TARGET, "--rank", "7"], "no rank 7", "ranks 0 to 2"),
    (["dump", TARGET, "--region", "lm_hed"], "no region 'lm_hed'", "lm_head"),
    (["dump", TARGET, "--format", "pdf"], "no format 'pdf'", "html"),
    (["dump", TARGET, "--after", "capture", "--format", "mermaid"], "not cut into regions yet", "after `regions`"),
    (["explain", TARGET, "--microbatches", "3"], "has 4 samples; 3 microbatches", "multiple of 3"),
    (["explain"], "Missing argument", ""),
    (["fly"], "No such command", ""),
]


@pytest.mark.parametrize(("arguments", "what", "remedy"), BAD, ids=lambda value: str(value)[-40:])
def test_bad_input_is_one_sentence_and_exit_code_2(run: Run, arguments: list[str], what: str, remedy: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    said = " ".join(done.err.split())
    assert what in said
    assert remedy in said
    assert "Traceback" not in done.err


def test_nothing_is_written_for_bad_input(run: Run, tmp_path: Path) -> None:
    done = run("compile", TARGET, "-o", tmp_path / "program", "--mesh", "pp=40")
    assert done.code == 2
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(run: Run) -> None:
    done = run("explain", TARGET, "--freeze", "nothing_like_it", "--debug")
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err
    assert "passes/freeze.py" in done.err


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def broken(:\n", "syntax error"),
        ("import torch\nraise ValueError('no data today')\n", "no data today"),
        ("import does_not_exist\n", "does_not_exist"),
    ],
)
def test_a_users_file_that_fails(run: Run, tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "train.py"
    file.write_text(text)
    done = run("explain", f"{file}:model")
    assert done.code == 2
    said = " ".join(done.err.split())
    assert what in said
    assert f"train.py:{len(text.splitlines())}" in said
    assert "Traceback" not in done.err


USER_FILE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, labels):
        if self.first(x).sum() > 100:
            x = -x
        return nn.functional.cross_entropy(self.head(self.first(x)), labels)

def example():
    return {"x": torch.randn(2, 4), "labels": torch.tensor([0, 2])}
"""


def test_a_plain_class_with_an_example_from_the_same_file(run: Run, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    bad.write_text(USER_FILE)
    talks = USER_FILE.replace("if self.first(x).sum() > 100", "print('in forward')\n        if len(x) > 100")
    good.write_text(f"print('at import')\n{talks}")
    done = run("verify", f"{good}:Model", "--example", "example", "--json")
    assert json.loads(done.out)["params_checked"] == 4  # one object, and what the file prints is on stderr
    assert "at import" in done.err and "in forward" in done.err
    done = run("verify", f"{bad}:Model", "--example", "example", "--json")
    assert (done.code, done.out) == (2, "")
    said = " ".join(done.err.split())
    assert "depends on the values of a tensor" in said
    assert "bad.py:11: if self.first(x).sum() > 100:" in said


@pytest.mark.slow
def test_the_command_itself(run: Run) -> None:
    """A bad command in a process of its own (a good one is below), and the same with --debug."""
    bad = process("explain", "no_such.py:llava", "--json")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "no file no_such.py" in bad.stderr
    assert "Traceback" not in bad.stderr
    assert "Traceback" in run("explain", "no_such.py:llava", "--debug").err


@pytest.mark.slow
def test_the_command_verifies() -> None:
    done = process("verify", "examples/llava.py:llava", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"loss_rel", "grad_rel_max", "params_checked", "params_missing"} <= found.keys()
    assert (found["params_checked"], found["params_missing"]) == (4, [])
    assert os.fspath(ROOT) not in done.stdout


@pytest.mark.slow
def test_fake(run: Run, tmp_path: Path) -> None:
    """Without weights the same program comes out, and the steps of the way to it are told."""
    copied = shutil.copy(TARGET.rpartition(":")[0], tmp_path)  # a file of its own is loaded anew
    fake = (f"{copied}:llava", "--fake", "--no-check")
    done = [
        run("compile", *target, "-o", tmp_path / name, "--json") for name, target in (("1", (TARGET,)), ("2", fake))
    ]
    assert [one.code for one in done] == [0, 0]
    assert load(tmp_path / "1").manifest.fingerprint == load(tmp_path / "2").manifest.fingerprint
    spent = json.loads(done[1].out)["timings"]
    assert {"capture", "normalise", "differentiate", "partition", "emission", "total", "peak_memory"} <= spent.keys()
    shown = run("compile", *fake, "-o", tmp_path / "2", "--timings").out
    assert "planning" in shown and "of memory at its peak" in shown
    refused = run("verify", *fake)
    assert refused.code == 2 and "verify runs the model" in refused.err
