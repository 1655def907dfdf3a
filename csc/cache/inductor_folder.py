"""Where what Inductor makes of a program's functions is kept, beside the programs.

Its files are torch's: looked up by code, sizes, dtype, device, torch and its settings. Some are pickles, which torch
reads, so they lie where nobody else may write, not in a folder of /tmp. Of the C++ compiler and of the CPU torch's keys
say less than machine code depends on: each pair of them has a folder of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from csc.cache.keys import own_sources
from csc.cache.store import INDUCTOR, Store, refused
from csc.runtime.fusing import host_compiler

log = logging.getLogger("csc")

CPU_FACTS = ("model name", "flags", "Features")  # of /proc/cpuinfo


def inductor_folder(store: Store | None) -> Path | None:
    """The folder, which is there then."""
    if store is None:
        return None
    folder = store.folder / f"{INDUCTOR}-{machine()}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        log.warning("cache: what Inductor makes is not kept in %s: %s", folder, error)
        return None
    why = refused(store.folder) or refused(folder)
    if why:
        log.warning("cache: what Inductor makes is not kept there: %s", why)
    return None if why else folder


def machine() -> str:
    """What compiles functions, besides their text: a hash of torch, Python, CPU, C++ compiler, and of csc, whose
    operators they call.
    """
    facts_of_machine = [own_sources(), torch.__version__, sys.version, platform.machine(), _cpu(), _compiler()]
    return hashlib.sha256("\0".join(facts_of_machine).encode()).hexdigest()[:32]


def _cpu() -> str:
    """What of a CPU machine code may depend on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.processor()} {torch.backends.cpu.get_cpu_capability()}"
    return "\n".join(sorted({line for line in lines if line.startswith(CPU_FACTS)}))


def _compiler() -> str:
    """What the C++ compiler says of itself; its path, if that is nothing."""
    compiler = host_compiler()
    if compiler is None:
        return ""
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        version = ""
    return f"{os.path.realpath(compiler)}\n{version}"
