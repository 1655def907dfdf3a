"""What is run on a machine with a GPU, piece by piece.

PIECES: in the order in which they run, the shortest and most telling first; those that take times stand last
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from csc import devices

PYTHON = sys.executable
CSC = str(Path(PYTHON).with_name("csc"))
TARGET = "benchmarks/gpu/model.py"
VISIBLE = "CUDA_VISIBLE_DEVICES"
FIRST = os.environ.get(VISIBLE, "0").partition(",")[0]
DEVICE = os.environ.get("CSC_GPU_DEVICE") or str(devices.default())
MODELS = (
    ("Llama", "Qwen3", "Gemma 3, text", "Mistral", "LLaVA"),
    ("Qwen2.5-VL", "Qwen3-VL", "Gemma 3", "InternVL"),
    ("Mllama", "LLaVA-OneVision", "Qwen2-VL", "Whisper encoder + Llama"),
)
MESHES = ("dp=1", "pp=2", "cp=2", "tp=2", "dp=2,pp=2", "pp=2,cp=2")


@dataclass(frozen=True)
class Piece:
    """shows: what it tells, in a clause. command: from the root of the repository. devices: GPUs it takes at least.
    environment: variables beside those that there are. minutes: after which it is stopped; together they stay below 40
    for one device. takes_times: nothing else may run beside it.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    minutes: float
    devices: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    takes_times: bool = False


def _torchrun(ranks: int, *command: str) -> tuple[str, ...]:
    return PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *command


def _verify(target: str, mesh: str, *more: str) -> tuple[str, ...]:
    return CSC, "verify", f"{TARGET}:{target}", "--mesh", mesh, *more


def _models(*names: str) -> tuple[str, ...]:
    words = [word for name in names for word in ("--model", name)]
    return PYTHON, "-m", "benchmarks.coverage", "--device", DEVICE, "--mesh", "pp=2", "--mesh", "cp=2", *words


def _tests(*paths: str) -> tuple[str, ...]:
    jobs = str(min(os.cpu_count() or 1, 8))  # compilers take longer than kernels
    return PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-n", jobs, *paths


PIECES = (
    Piece("kernels", "attention kernels against dense references", _tests("tests/kernels/test_triton_gpu.py"), 3),
    *(
        Piece(f"verify {mesh}", f"loss and every gradient against eager PyTorch, {mesh}", _verify("llava", mesh), 1)
        for mesh in MESHES
    ),
    Piece(
        "verify bf16", "mixed precision, no further from float64 than eager",
        _verify("llava", "pp=2", "--precision", "bf16", "--float64"), 1,
    ),
    Piece("verify fuse", "functions compiled by Inductor for CUDA", _verify("llava", "pp=2", "--fuse"), 2),
    Piece("verify packed", "documents packed in a row, context parallel", _verify("llama", "cp=2"), 1),
    *(
        Piece(f"models {number}", f"every gradient against eager PyTorch: {', '.join(names)}", _models(*names), 2)
        for number, names in enumerate(MODELS, 1)
    ),
    Piece(
        "shared device", "two gloo processes on one GPU: steps as in one process",
        _torchrun(2, "-m", "benchmarks.gpu.train", "--mesh", "pp=2"), 2, environment={VISIBLE: FIRST},
    ),
    Piece(
        "nccl pp", "two processes over NCCL: steps as in one process",
        _torchrun(2, "-m", "benchmarks.gpu.train", "--mesh", "pp=2"), 2, devices=2,
    ),
    Piece(
        "nccl dp", "gradients summed over NCCL, ZeRO-3",
        _torchrun(2, "-m", "benchmarks.gpu.train", "--mesh", "dp=2", "--zero", "3"), 2, devices=2,
    ),
    Piece(
        "nccl cp and tp", "keys and sums of layers over NCCL",
        _torchrun(4, "-m", "benchmarks.gpu.train", "--mesh", "cp=2,tp=2"), 3, devices=4,
    ),
    Piece(
        "demo", "both phases of the digits' LLaVA on 4 ranks",
        (PYTHON, "examples/digits/demo.py", "--output", "build/gpu/demo"), 4,
    ),
    Piece("profile", "what the device and its links do", (CSC, "profile", f"{TARGET}:llava"), 1.5, takes_times=True),
    Piece(
        "graphs", "steps with cuda_graphs=True against steps that launch: bits, time, memory",
        (PYTHON, "-m", "benchmarks.gpu.graphs"), 1.5, takes_times=True,
    ),
    Piece(
        "step", "a step beside eager and torch.compile; memory predicted and measured",
        (PYTHON, "-m", "benchmarks.gpu.step", "--dtype", "bfloat16"), 5, takes_times=True,
    ),
    Piece(
        "attention", "attention against FlexAttention and SDPA",
        (PYTHON, "-m", "benchmarks.attention", "--part", "gpu", "--quick"), 3, takes_times=True,
    ),
    *(
        Piece(
            f"tuning {width}", f"kernel configurations for heads of {width}",
            (PYTHON, "-m", "benchmarks.attention", "--part", "gpu", "--tune", str(width)), 2, takes_times=True,
        )
        for width in (128, 64)
    ),
)  # fmt: skip
