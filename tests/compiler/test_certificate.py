"""Certificates of gradients: what is written, what is noticed, and that the plain script and csc hold each other."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import csc
from csc.check import certificate as format_
from csc.check.certificate import (
    Certificate,
    CertificateComparison,
    Gradient,
    batch_digests,
    compare,
    fingerprint,
    unlike,
)
from csc.commands.main import app
from csc.errors import InputError
from csc.reports.certifying import against, certificate, same_step
from csc.reports.verification import verify
from tests.compiler import small
from tests.tiers import long

SCRIPT = Path(__file__).parents[2] / "examples" / "certificate.py"
CODE_LINES = 60


@pytest.fixture(scope="module")
def plain() -> ModuleType:
    """The script, as a module of its own."""
    module = ModuleType("plain_certificate")
    exec(compile(SCRIPT.read_text(), str(SCRIPT), "exec"), vars(module))
    return module


def hand_made(gradients: dict[str, torch.Tensor], loss: float = 1.0, allowed: float = 1e-5) -> Certificate:
    prints = {name: fingerprint(name, gradient) for name, gradient in gradients.items()}
    made = {name: Gradient(one.shape, one.norm, one.sums, allowed) for name, one in prints.items()}
    batch = batch_digests({"x": torch.ones(2)})
    return Certificate({"program": "test"}, batch, batch, 0, loss, allowed, made)


# --- the script and csc ----------------------------------------------------------------------------------------------


def test_the_script_is_short_and_without_csc() -> None:
    text = SCRIPT.read_text()
    tree = ast.parse(text)
    said: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node):
            said.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = [line for number, line in enumerate(text.splitlines(), 1) if number not in said]
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= CODE_LINES
    imported = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("csc") for name in imported)


def test_the_script_and_csc_make_the_same_digests(plain: ModuleType) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    batch: dict[str, Any] = {
        "matrix": matrix, "column": matrix.t(), "every other": matrix[:, ::2], "whole": torch.tensor(3), "on": True,
        "flags": matrix > 4, "half": matrix.bfloat16(), "byte": matrix.to(torch.float8_e4m3fn), "absent": None,
        "nothing": torch.zeros(0, 4), "complex": torch.complex(matrix, -matrix), "scale": 0.1, "name": "é",
        "images": [matrix[0], (matrix[1], {"size": 3, "a.b": matrix[2]})],
    }  # fmt: skip
    own = batch_digests(batch)
    assert {n: (d.dtype, list(d.shape), d.sha256) for n, d in own.items()} == {
        n: (d["dtype"], d["shape"], d["sha256"]) for n, d in plain.digests(batch).items()
    }
    assert {"images[0]", "images[1][1]['a.b']", "nothing"} <= own.keys() and "absent" not in own
    assert own["matrix"] != own["column"] and len({d.sha256 for d in own.values()}) == len(own)
    assert batch_digests([{"x": matrix}]).keys() == plain.digests([{"x": matrix}]).keys() == {"0['x']"}
    assert batch_digests({"x": np.ones((2, 2), np.float32)}) == batch_digests({"x": torch.ones(2, 2)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (0, 4)])
def test_the_script_and_csc_make_the_same_fingerprints(
    plain: ModuleType, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(format_, "CHUNK", 4)  # signs do not depend on how many are made at once
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    own, other = fingerprint("a.weight", gradient), plain.fingerprint("a.weight", gradient)
    assert own.shape == shape and other["norm"] == pytest.approx(own.norm, rel=1e-14)
    assert other["sums"] == pytest.approx(own.sums, rel=1e-12, abs=1e-14)


def documented_sign(name: str, place: int, bit: int) -> int:
    """As docs/certificates.md has it, in Python's own integers."""
    mask = 2**64 - 1
    state = (
        int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") + (place + 1) * 0x9E3779B97F4A7C15
    ) & mask
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & mask
    return -1 if (state ^ state >> 31) >> bit & 1 else 1


def test_fingerprints_and_digests_are_the_documented_ones() -> None:
    """Whoever changes these changes the version."""
    own = fingerprint("layers.0.wëight", torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
    signs = [[documented_sign("layers.0.wëight", place, bit) for place in range(4)] for bit in range(8)]
    assert own.norm == pytest.approx(math.sqrt(85))
    assert own.sums == tuple(sum(sign * 2.0**place for place, sign in enumerate(row)) for row in signs)
    numbers = batch_digests({"x": torch.tensor([[1, 2]])})["x"]
    assert numbers.sha256 == hashlib.sha256(b"int64 1,2\n" + bytes([1, *[0] * 7, 2, *[0] * 7])).hexdigest()
    assert batch_digests({"x": 0.5})["x"].sha256 == hashlib.sha256(b"float \n0.5").hexdigest()
    assert format_.total({"b": [1, 2.5], "a": "é"}) == hashlib.sha256(rb'{"a":"\u00e9","b":[1,2.5]}').hexdigest()


# --- what a comparison sees ------------------------------------------------------------------------------------------

MATRIX = torch.randn(40, 30, generator=torch.Generator().manual_seed(5))
ONE_ENTRY = MATRIX.clone()
ONE_ENTRY[11, 7] += 1.0
SAME_NORM = {
    "negated": -MATRIX, "rows swapped": MATRIX[torch.randperm(40, generator=torch.Generator().manual_seed(6))],
    "transposed": MATRIX.t().reshape(40, 30), "flipped": MATRIX.flip(1),
}  # fmt: skip
OTHERS = SAME_NORM | {"twice": 2 * MATRIX, "one entry": ONE_ENTRY, "zero": 0 * MATRIX, "a part": MATRIX * (MATRIX > -2)}


def compared(there: torch.Tensor, here: torch.Tensor) -> CertificateComparison:
    return compare(hand_made({"a.weight": there}), hand_made({"a.weight": here}))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_gradients_are_told_and_how_far_they_are(kind: str) -> None:
    result = compared(MATRIX, OTHERS[kind])
    assert result.differing == ("a.weight",) and not result.good
    right = float((OTHERS[kind] - MATRIX).norm() / MATRIX.norm())
    assert result.differences["a.weight"] == pytest.approx(right, rel=0.6)
    if kind in SAME_NORM:
        assert OTHERS[kind].norm() == pytest.approx(float(MATRIX.norm()))


def test_rounding_passes_and_more_does_not() -> None:
    noise = torch.randn(40, 30, generator=torch.Generator().manual_seed(8))
    assert compared(MATRIX, MATRIX + 1e-7 * noise).good
    assert not compared(MATRIX, MATRIX + 1e-4 * noise).good
    assert compare(hand_made({"w": MATRIX}), hand_made({"w": MATRIX + 1e-4 * noise}), tolerance=1e-2).good


def test_estimates_hold_over_many_gradients() -> None:
    """Eight sums estimate a norm to a factor of three, nearly always; and never make a difference vanish."""
    generator = torch.Generator().manual_seed(9)
    for number in range(200):
        change = torch.randn(50, generator=generator) * (torch.rand(50, generator=generator) < 0.2)
        change[number % 50] += 0.1
        gradient = torch.randn(50, generator=generator)
        sums = [fingerprint(f"p{number}", one).sums for one in (gradient, gradient + change)]
        estimate = math.dist(*sums) / math.sqrt(8)
        assert 0.3 < estimate / float(change.norm()) < 2.2


def test_names_that_one_side_alone_has() -> None:
    result = compare(hand_made({"a": MATRIX, "b": MATRIX}), hand_made({"b": MATRIX, "c": MATRIX}))
    assert (result.missing, result.unexpected, result.good) == (("a",), ("c",), False)


def test_noise_is_measured_by_its_module_and_zeros_are_equal() -> None:
    there = {"a.weight": MATRIX, "a.bias": torch.full((3,), 1e-9), "b.weight": torch.zeros(2), "c": torch.zeros(0)}
    assert compare(hand_made(there), hand_made(there | {"a.bias": torch.full((3,), -1e-9)})).good
    assert compare(hand_made(there), hand_made(there | {"b.weight": torch.full((2,), 1e-9)})).differing == ("b.weight",)
    assert compare(hand_made(there), hand_made(there | {"c": torch.zeros(0, 2)})).differing == ("c",)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_differs_and_is_not_written(value: float, tmp_path: Path) -> None:
    broken = hand_made({"a.weight": torch.tensor([1.0, value])})
    assert not compare(hand_made({"a.weight": torch.ones(2)}), broken).good
    assert not compare(hand_made({}), hand_made({}, loss=value)).good
    kept = tmp_path / "step.json"
    kept.write_text("as it was")
    with pytest.raises(InputError, match=r"no numbers are the gradients of 'a\.weight'"):
        broken.write(kept)
    with pytest.raises(InputError, match=f"the loss is {value}"):
        hand_made({}, loss=value).write(kept)
    assert kept.read_text() == "as it was" and list(tmp_path.iterdir()) == [kept]


def test_huge_and_tiny_gradients_keep_their_norms() -> None:
    for scale in (1e-200, 1e200):
        own = fingerprint("w", torch.full((4,), scale, dtype=torch.float64))
        assert own.norm == pytest.approx(2 * scale)


# --- files -----------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path, plain: ModuleType) -> None:
    made = hand_made({"a.weight": MATRIX})
    made.write(tmp_path / "new" / "step.json")
    assert Certificate.read(tmp_path / "new" / "step.json") == made
    assert plain.read(tmp_path / "new" / "step.json")["gradients"].keys() == {"a.weight"}


def resealed(content: dict[str, Any]) -> dict[str, Any]:
    return content | {"sha256": format_.total({name: v for name, v in content.items() if name != "sha256"})}


def _without(*path: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def change(content: dict[str, Any]) -> dict[str, Any]:
        inner = content
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]
        return resealed(content)

    return change


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another number": (lambda c: c | {"loss": 2.0}, "not as it was written"),
    "no seal": (lambda c: {n: v for n, v in c.items() if n != "sha256"}, "not as it was written"),
    "another file": (lambda c: {"loss": 1.0}, "no certificate of gradients"),
    "a list": (lambda c: [c], "no certificate of gradients"),
    "a later version": (lambda c: resealed(c | {"version": 2}), "of version 2, and this csc reads version 1"),
    "NaN": (lambda c: resealed(c | {"loss": math.nan}), "NaN, which is no number"),
    "a text": (lambda c: resealed(c | {"loss": "much"}), "lacks what a certificate has"),
    "no gradients": (_without("gradients"), "lacks what a certificate has: KeyError: 'gradients'"),
    "no norm": (_without("gradients", "a.weight", "norm"), "lacks what a certificate has"),
    "no tensors": (_without("weights", "tensors"), "lacks what a certificate has"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_told(kind: str, tmp_path: Path) -> None:
    change, said = DAMAGED[kind]
    file = tmp_path / "step.json"
    hand_made({"a.weight": MATRIX}).write(file)
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(InputError, match=said) as error:
        Certificate.read(file)
    assert str(error.value).startswith(str(file)) and "csc" in error.value.remedy


@pytest.mark.parametrize("content", [b"", b"\xff\xfe{}", b'{"certificate": "csc gradients"', b"[" * 100_000])
def test_what_is_no_json_is_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "step.json").write_bytes(content)
    with pytest.raises(InputError, match="no JSON"):
        Certificate.read(tmp_path / "step.json")


def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match="the certificate cannot be read"):
            Certificate.read(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError):
        hand_made({}).write(tmp_path / "file" / "step.json")


def test_what_has_no_digest_is_refused() -> None:
    with pytest.raises(InputError, match=r"the batch entry 'x\[0\]' is a object, which has no digest"):
        batch_digests({"x": [object()]})
    with pytest.raises(InputError, match="two entries"):
        batch_digests({"x": {"y": 1}, "x['y']": 2})
    with pytest.raises(InputError, match="'x' has no data"):
        batch_digests({"x": torch.ones(2, device="meta")})


def test_sentences_name_what_differs() -> None:
    there = batch_digests({"a": MATRIX, "b": MATRIX, "c": MATRIX, "d": MATRIX, "same": MATRIX})
    here = batch_digests({"b": MATRIX[:3], "c": MATRIX.double(), "d": MATRIX + 1, "e": MATRIX, "same": MATRIX.clone()})
    assert unlike(there, here) == (
        "only the certificate has 'a'; it does not have 'e'; other shapes have 'b'; other dtypes have 'c'; "
        "other values have 'd'"
    )
    many = {f"p{number}": MATRIX for number in range(6)}
    assert unlike(batch_digests(many), {}) == "only the certificate has 'p0', 'p1', 'p2', 'p3' and 2 more"


# --- models ----------------------------------------------------------------------------------------------------------


class Unusual(nn.Module):
    """A tied weight, a frozen one, one without a gradient, an empty one, buffers that are stored or not."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.text = small.text(1)
        if tied:
            self.text.lm_head.weight = self.text.embed_tokens.weight
        else:
            self.text.lm_head.weight = nn.Parameter(self.text.embed_tokens.weight.detach().clone())
        self.unused, self.empty = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.text(tokens, labels) * self.frozen * self.scale.sum() * self.hidden.sum()


BATCH = small.text_batch(4)


@pytest.fixture(scope="module")
def unusual() -> csc.CompiledModel:
    return csc.compile(Unusual(), example=BATCH, check=False)


def of(compiled: csc.CompiledModel) -> Certificate:
    return certificate(compiled, verify(compiled, certify=True))


@pytest.mark.parametrize("mesh", ["pp=1", "pp=2,dp=2", long("tp=2"), long("cp=2"), long("dp=2,tp=2,pp=2")])
@pytest.mark.long_cases("pp=1")
def test_layouts_and_plain_pytorch_certify_each_other(
    unusual: csc.CompiledModel, plain: ModuleType, mesh: str, tmp_path: Path
) -> None:
    compiled = unusual.with_options(mesh=mesh, microbatches=2)
    own = of(compiled)
    own.write(tmp_path / "csc.json")
    assert own.layout["mesh"] == str(compiled.options.mesh)
    assert own.without_gradient == ("empty", "frozen", "unused")
    assert own.weights.keys() >= {"scale", "text.lm_head.weight", "frozen"} and "hidden" not in own.weights
    model = compiled.model
    eager = plain.certificate(model, BATCH, lambda: model(**BATCH))
    model.zero_grad()
    plain.write(eager, tmp_path / "plain.json")
    assert plain.differences(plain.read(tmp_path / "csc.json"), eager) == []
    there = Certificate.read(tmp_path / "plain.json")
    same_step(there, compiled)
    result = against(there, own)
    assert result.good and max(result.differences.values()) < 2e-6


def test_wrong_gradients_are_named_on_both_sides(unusual: csc.CompiledModel, plain: ModuleType, tmp_path: Path) -> None:
    """A loop that forgets a factor of one weight, and one that has untied a weight."""
    of(unusual).write(tmp_path / "csc.json")
    there, model = plain.read(tmp_path / "csc.json"), Unusual()

    def doubled() -> torch.Tensor:
        model.text.norm.weight.register_hook(lambda gradient: 2 * gradient)
        return model(**BATCH)

    lines = plain.differences(there, plain.certificate(model, BATCH, doubled))
    assert len(lines) == 1 and lines[0].startswith("'text.norm.weight' differs by ")
    untied = Unusual(tied=False)
    lines = plain.differences(there, plain.certificate(untied, BATCH, lambda: untied(**BATCH)))
    assert [line for line in lines if "one side alone" in line] == [
        "'text.lm_head.weight' has a gradient on one side alone"
    ]
    assert any(line.startswith("'text.embed_tokens.weight' differs") for line in lines)


def test_other_weights_and_batches_are_named_before_anything_runs(unusual: csc.CompiledModel) -> None:
    there = of(unusual)
    other = Unusual()
    with torch.no_grad():
        other.text.norm.weight[0] += 1e-3
    with pytest.raises(InputError, match=r"weights are not .*other values have 'text.norm.weight'\."):
        same_step(there, csc.compile(example=BATCH)(lambda: other))
    with pytest.raises(InputError, match="other dtypes have"):
        same_step(there, csc.compile(example=BATCH)(lambda: Unusual().double()))
    with pytest.raises(InputError, match=r"batch is not .*other values have 'labels'"):
        same_step(there, unusual, BATCH | {"labels": BATCH["tokens"]})


def test_random_numbers_are_told(unusual: csc.CompiledModel, plain: ModuleType, tmp_path: Path) -> None:
    own = of(unusual)
    random = Certificate(**{**vars(own), "random_operations": 2})
    with pytest.raises(InputError, match=r"this run is of a step with random numbers \(dropout\)"):
        against(own, random)
    random.write(tmp_path / "random.json")
    with pytest.raises(ValueError, match="dropout, which csc alone repeats"):
        plain.read(tmp_path / "random.json")
    model = nn.Dropout(0.5)
    with pytest.raises(ValueError, match="set dropout to 0"):
        plain.certificate(model, {}, lambda: model(torch.ones(3, requires_grad=True)).sum())


MODEL = """
import csc, torch
from tests.compiler import small
def text(change=0.0):
    model = small.text(1)
    with torch.no_grad():
        model.norm.weight[0] += change
    return model
batch = small.text_batch(4)
wrong = {**batch, "labels": batch["tokens"]}
other = lambda: text(1e-2)
"""


@pytest.mark.usefixtures("traces")
def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    file, target = tmp_path / "step.json", f"{tmp_path}/model.py:"

    def run(name: str, *options: str, batch: str = "batch") -> Any:
        return CliRunner().invoke(app, ["verify", target + name, "--example", batch, *options])

    written = run("text", "--certificate", str(file))
    assert written.exit_code == 0 and f"wrote {file}" in written.stdout, written.output
    assert Certificate.read(file).made_by["torch"] == importlib.metadata.version("torch")
    checked = run("text", "--mesh", "pp=2", "--microbatches", "2", "--against", str(file))
    assert checked.exit_code == 0 and "the same step: 9 gradients as certified" in checked.stdout, checked.output
    assert re.search(r"certificate of csc 0\.\S+, \S+, torch", checked.stdout)
    frozen = run("text", "--freeze", "lm_head", "--against", str(file), "--certificate", str(file), "--json")
    assert Certificate.read(file).without_gradient == ()  # as it was
    told = json.loads(frozen.stdout)
    assert frozen.exit_code == 1 and told["ok"] and not told["against"]["ok"], frozen.output
    assert told["against"]["missing"] == ["lm_head.weight"] and told["against"]["differing"] == []
    none = tmp_path / "none.json"
    strict = run("text", "--mesh", "pp=2", "--microbatches", "2", "--tolerance", "0", "--certificate", str(none))
    assert strict.exit_code == 1 and f"there is no certificate in {none}" in strict.stdout and not none.exists()
    for name, batch, said in (("other", "batch", "other values have 'norm.weight'"), ("text", "wrong", "'labels'")):
        refused = run(name, "--against", str(file), batch=batch)
        assert isinstance(refused.exception, InputError) and said in str(refused.exception)
