"""The benchmark of attention: its masks, FlexAttention's view of them, and that no figure is made up."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from csc.kernels.attention import attention
from torch.nn.attention.flex_attention import create_mask, flex_attention

from benchmarks.attention import report
from benchmarks.attention.cpu import Row as CpuRow
from benchmarks.attention.cpu import measure
from benchmarks.attention.flex import BLOCK, Flex, mask_mod
from benchmarks.attention.gpu import BACKWARD, FORWARD, NAMES, Found, Row, cases
from benchmarks.attention.masks import mask
from benchmarks.context_parallel import masks as rules

TOKENS = 640


@pytest.mark.parametrize("name", NAMES)
def test_masks_and_mask_mods_are_those_of_the_tables(name: str) -> None:
    wanted = torch.from_numpy(rules.dense(rules.build(name, TOKENS, 0)))
    given = mask(name, TOKENS)
    assert torch.equal(given.dense()[0], wanted)
    assert torch.equal(create_mask(mask_mod(given), 1, 1, TOKENS, TOKENS, device="cpu")[0, 0], wanted)
    blocks = wanted.view(TOKENS // BLOCK, BLOCK, TOKENS // BLOCK, BLOCK).transpose(1, 2).flatten(2).any(-1)
    assert torch.equal(Flex(given).blocks.to_dense()[0, 0].bool(), blocks)


def test_flex_attention_and_csc_agree() -> None:
    given = mask("generation", 256)
    q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    assert torch.allclose(flex_attention(q, k, v, block_mask=Flex(given).blocks), attention(q, k, v, given), atol=1e-5)


def test_a_row_of_the_cpu_part() -> None:
    row = measure(["packed"], [256], 1, lambda *_: None)[0]
    assert row.difference < 1e-5 and 0 < row.density < 0.6
    assert min(row.csc_forward, row.sdpa_forward) > 0


def test_cases_hold_every_mask_and_length() -> None:
    assert {name for name, _ in cases(False)} == set(NAMES)
    assert {tokens for _, tokens in cases(False)} == {8192, 16384, 32768, 65536}
    assert len(set(cases(False))) == len(cases(False))


def test_figures_follow_from_times() -> None:
    pairs = 10**6
    row = Row("causal", 1024, pairs, (0.5, 1.0), (1.0, 1.5), None, None, 0.0, 0.0)
    found = Found("a GPU", 2 * pairs * FORWARD / 0.5 / 1e12, [row], [("packed", 8192)])
    told = report.document(found, [], [])
    assert told["summary"]["forward_over_flex_geomean"] == pytest.approx(2.0)
    assert told["summary"]["backward_over_flex_worst"] == pytest.approx(1.5)
    assert told["summary"]["causal_forward_of_peak"] == pytest.approx(0.5)
    assert told["gpu"]["rows"][0]["csc_backward_tflops"] == pytest.approx(pairs * BACKWARD / 1e12)
    assert "sdpa_dense_forward_tflops" not in told["gpu"]["rows"][0]
    assert told["gpu"]["not_run"] == [("packed", 8192)]


def test_cpu_summary() -> None:
    row = CpuRow("causal", 8, 0.5, csc_forward=1, csc_backward=1, sdpa_forward=2, sdpa_backward=4, difference=0)
    wanted = {"cpu_forward_over_sdpa_geomean": 2, "cpu_step_over_sdpa_geomean": 3}
    assert report.summary(None, [row]) == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is left out where there is no GPU")
@pytest.mark.long
def test_without_a_gpu_its_figures_are_left_out() -> None:
    command = [sys.executable, "-m", "benchmarks.attention", "--json", "--part", "gpu"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert told["gpu"] is None and told["summary"] == {} and told["notes"] == [report.NO_GPU]
    refused = subprocess.run([*command[:3], "--tune", "128"], capture_output=True, text=True)
    assert refused.returncode != 0 and "none is at hand" in refused.stderr
