"""Compiles the attention kernels as they would be launched, for architectures that need not be there.

Terms
  case       kernel, architecture, head dim and mask: what decides about a compilation
  spilled    bytes (NVIDIA) or registers (AMD) that a thread keeps in memory because it has no registers left

    build(case) -> Resources
    key(case) -> str                         equal where the kernels' code, its constants, target and Triton are
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from csc.kernels import triton_kernels
from csc.kernels.triton_kernels import dkv_kernel, dq_kernel, forward_kernel
from csc.kernels.triton_launch import Config, HeadDimConfigs, choose, padded
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {"sm_80": 166912, "sm_86": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
TENSOR_CORES = {"sm_80": "mma.sync", "sm_86": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CUOBJDUMP = Path(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")

TENSORS = {"q", "k", "v", "d_out"}
TYPES = {
    **dict.fromkeys(("lse", "levels", "deltas"), "*fp32"),
    **dict.fromkeys(("order", "admits", "kinds"), "*i64"),
    **dict.fromkeys(("index", "counts", "ranges"), "*i32"),
    **dict.fromkeys(("inner", "factor", "scale"), "fp32"),
}


@dataclass(frozen=True)
class Case:
    """kernel: forward, dq, dkv, or dv and dk where a configuration makes them apart. rules 0: no mask."""

    kernel: str
    architecture: str
    head_dim: int
    rules: int = 1
    kinds: bool = False
    softcap: bool = False
    dtype: torch.dtype = torch.bfloat16
    group: int = 8

    @property
    def choice(self) -> HeadDimConfigs:
        return choose(self.architecture, self.head_dim, self.dtype)

    @property
    def config(self) -> Config:
        if self.kernel == "forward":
            return self.choice.of_forward(self.rules, self.kinds, self.softcap)
        if self.kernel == "dq":
            return self.choice.dq
        return dict(self.choice.dkv_capped if self.softcap else self.choice.dkv)[self.kernel[1:]]

    def __str__(self) -> str:
        flags = ("kinds" if self.kinds else "") + (" cap" if self.softcap else "")
        dtype = "" if self.dtype == torch.bfloat16 else f" {DTYPES[self.dtype]}"
        return f"{self.kernel} {self.architecture} D={self.head_dim} R={self.rules} {flags}".strip() + dtype


@dataclass(frozen=True)
class Resources:
    registers: int
    spilled: int
    shared: int  # bytes
    tensor_cores: int  # instructions
    tma: int  # instructions that load through a tensor descriptor


def kernels(choice: HeadDimConfigs, softcap: bool = False) -> list[str]:
    """The names of a choice's kernels."""
    return ["forward", "dq", *(f"d{which}" for which, _ in (choice.dkv_capped if softcap else choice.dkv))]


def build(case: Case) -> Resources:
    """Compiles one kernel with the constants that csc.kernels.triton_launch gives it."""
    source, options = _source(case)
    compiled = triton.compile(source, target=TARGETS[case.architecture], options=options)
    if case.architecture == "gfx942":
        return _of_amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    assembly = compiled.asm["ptx"]
    registers, stack = _of_nvidia(compiled.asm["cubin"])
    cores = assembly.count(TENSOR_CORES[case.architecture])
    return Resources(registers, stack, compiled.metadata.shared, cores, assembly.count("cp.async.bulk.tensor"))


def key(case: Case) -> str:
    """A hash of all that decides about `build`."""
    source, options = _source(case)
    given = sorted(source.signature.items()), sorted(source.constants.items()), sorted(source.attrs.items())
    decides = (code(), source.name, given, sorted(options.items()), TARGETS[case.architecture], triton.__version__)
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:16]


@cache
def code() -> str:
    """Of all kernels, but for docstrings, comments and lines, which Triton's own hash counts, too."""
    tree = ast.parse(Path(triton_kernels.__file__).read_text())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _source(case: Case) -> tuple[ASTSource, dict[str, Any]]:
    """The kernel with its constants, and how Triton is to build it."""
    function = {"forward": forward_kernel, "dq": dq_kernel}.get(case.kernel, dkv_kernel)
    config, width, dtype = case.config, padded(case.head_dim), DTYPES[case.dtype]
    constants = {
        "GROUP": case.group, "RULES": case.rules, "KINDS": case.kinds, "CAP": case.softcap,
        "TILE_Q": case.choice.tile[0], "TILE_K": case.choice.tile[1],
        "BLOCK_Q": config.block_q, "BLOCK_K": config.block_k,
        "DIM": case.head_dim, "DIM_PADDED": width, "DESCRIPTORS": config.descriptors,
    }  # fmt: skip
    if function is dkv_kernel:
        constants |= {"DK": "k" in case.kernel, "DV": "v" in case.kernel, "STAGES": config.stages}
    signature, attributes = {}, {}
    for position, name in enumerate(function.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in TENSORS and config.descriptors:
            rows = config.block_q if name in ("q", "d_out") else config.block_k
            signature[name] = f"tensordesc<{dtype}[1,1,{rows},{width}]>"
        elif name in TENSORS or name in ("out", "dq", "dk", "dv"):
            signature[name] = f"*{dtype}"
        else:
            signature[name] = TYPES.get(name, "i32")
        strided = name.endswith(("_batch", "_head", "_row"))
        if strided or signature[name] == f"*{dtype}":
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
    return source, {"num_warps": config.warps, "num_stages": config.stages, "enable_fp_fusion": True}


def _of_nvidia(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert found is not None, told
    return int(found[1]), int(found[2])


def _of_amd(assembly: str, shared: int) -> Resources:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", assembly)
        assert found is not None, name
        return int(found[1])

    # Scalar registers spill into lanes of vector registers, not into memory: they are not counted.
    return Resources(number("vgpr_count"), number("vgpr_spill_count"), shared, assembly.count("v_mfma"), 0)
