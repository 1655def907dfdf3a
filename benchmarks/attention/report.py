"""What was measured, as JSON and as tables.

document(gpu, cpu, tuned) -> dict
show(console, gpu, cpu, tuned)
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.attention.cpu import Row as CpuRow
from benchmarks.attention.gpu import Found, Row
from benchmarks.attention.tune import Tried

NO_GPU = "No GPU was at hand: figures of the GPU are left out."


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def document(gpu: Found | None, cpu: Sequence[CpuRow], tuned: Sequence[Tried]) -> dict[str, Any]:
    """gpu is None where none was at hand or it was not asked for; nothing is estimated."""
    return {
        "torch": torch.__version__,
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "summary": summary(gpu, cpu),
        "gpu": None if gpu is None else _gpu(gpu),
        "cpu": [asdict(row) for row in cpu],
        "tuned": [asdict(one) for one in tuned],
        "notes": [] if torch.cuda.is_available() else [NO_GPU],
    }


def _gpu(gpu: Found) -> dict[str, Any]:
    rows = []
    for row in gpu.rows:
        engines = {"csc": row.csc, "flex": row.flex, "sdpa_dense": row.sdpa, "sdpa_causal": row.flash}
        shown = {"mask": row.mask, "tokens": row.tokens, "pairs": row.pairs, "difference": row.difference}
        shown["pack_seconds"] = row.pack
        for name, times in engines.items():
            if times is None:
                continue
            rates = row.tflops(times)
            for i, way in enumerate(("forward", "backward")):
                shown[f"{name}_{way}_seconds"] = times[i]
                shown[f"{name}_{way}_tflops"] = rates[i]
                shown[f"{name}_{way}_of_peak"] = rates[i] / gpu.peak
        rows.append(shown)
    return {"device": gpu.device, "matmul_tflops": gpu.peak, "rows": rows, "not_run": gpu.not_run}


def summary(gpu: Found | None, cpu: Sequence[CpuRow]) -> dict[str, float]:
    """Speedups are the rival's time over csc's; only figures that were measured are in it."""
    found: dict[str, float] = {}
    if gpu is not None and gpu.rows:
        for i, way in enumerate(("forward", "backward")):
            over = [row.flex[i] / row.csc[i] for row in gpu.rows]
            found[f"{way}_over_flex_geomean"], found[f"{way}_over_flex_worst"] = geomean(over), min(over)
        causal = [row.tflops(row.csc) for row in gpu.rows if row.mask == "causal"]
        if causal:
            found["causal_forward_tflops"] = max(rates[0] for rates in causal)
            found["causal_backward_tflops"] = max(rates[1] for rates in causal)
            found["causal_forward_of_peak"] = found["causal_forward_tflops"] / gpu.peak
    if cpu:
        found["cpu_forward_over_sdpa_geomean"] = geomean(row.sdpa_forward / row.csc_forward for row in cpu)
        found["cpu_step_over_sdpa_geomean"] = geomean(
            (row.sdpa_forward + row.sdpa_backward) / (row.csc_forward + row.csc_backward) for row in cpu
        )
    return found


def show(console: Console, gpu: Found | None, cpu: Sequence[CpuRow], tuned: Sequence[Tried]) -> None:
    if gpu is not None:
        console.print(_gpu_table(gpu))
        if gpu.not_run:
            console.print("Not run, for time:", ", ".join(f"{name} {tokens}" for name, tokens in gpu.not_run))
    elif not torch.cuda.is_available():
        console.print(NO_GPU)
    if cpu:
        console.print(_cpu_table(cpu))
    if tuned:
        console.print(_tuned_table(tuned))
    for name, value in summary(gpu, cpu).items():
        console.print(f"{name}: {value:.3f}")


def _gpu_table(gpu: Found) -> Table:
    title = f"{gpu.device}, bfloat16; matrix product {gpu.peak:.0f} TFLOP/s. Forward / backward TFLOP/s, speedups"
    table = Table(title=title)
    for column in (
        "mask",
        "tokens",
        "csc",
        "of peak",
        "FlexAttention",
        "SDPA dense",
        "SDPA causal",
        "over Flex",
        "diff",
    ):
        table.add_column(column, justify="left" if column == "mask" else "right")
    for row in gpu.rows:
        rates, over = row.tflops(row.csc), [row.flex[i] / row.csc[i] for i in (0, 1)]
        table.add_row(
            row.mask, str(row.tokens), _rates(row, row.csc), f"{rates[0] / gpu.peak:.2f} / {rates[1] / gpu.peak:.2f}",
            _rates(row, row.flex), _rates(row, row.sdpa), _rates(row, row.flash), f"{over[0]:.2f} / {over[1]:.2f}",
            f"{row.difference:.1e}",
        )  # fmt: skip
    return table


def _rates(row: Row, times: tuple[float, float] | None) -> str:
    return "-" if times is None else "{:.0f} / {:.0f}".format(*row.tflops(times))


def _cpu_table(cpu: Sequence[CpuRow]) -> Table:
    table = Table(title=f"CPU, float32, {torch.get_num_threads()} threads. Forward / backward milliseconds, speedups")
    for column in ("mask", "tokens", "density", "csc", "SDPA dense", "speedup", "diff"):
        table.add_column(column, justify="left" if column == "mask" else "right")
    for row in cpu:
        table.add_row(
            row.mask, str(row.tokens), f"{row.density:.3f}",
            f"{row.csc_forward * 1e3:.0f} / {row.csc_backward * 1e3:.0f}",
            f"{row.sdpa_forward * 1e3:.0f} / {row.sdpa_backward * 1e3:.0f}",
            f"{row.sdpa_forward / row.csc_forward:.2f} / {row.sdpa_backward / max(row.csc_backward, 1e-9):.2f}",
            f"{row.difference:.1e}",
        )  # fmt: skip
    return table


def _tuned_table(tuned: Sequence[Tried]) -> Table:
    table = Table(title="Configurations, the fastest first; *: the default")
    for column in ("kernel", "queries x keys", "warps", "stages", "milliseconds", "difference"):
        table.add_column(column)
    for one in sorted(tuned, key=lambda one: (one.kernel, one.seconds or math.inf)):
        c = one.config
        told = f"{one.seconds * 1e3:.3f}" if one.seconds is not None else one.error or ""
        size = f"{c.block_q} x {c.block_k}{' *' if one.default else ''}"
        apart = "" if one.difference is None else f"{one.difference:.0e}"
        table.add_row(one.kernel, size, str(c.warps), str(c.stages), told, apart)
    return table
