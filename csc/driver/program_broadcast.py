"""A new program on every rank: found in the cache or compiled by the first one, handed to the others, written to disk.

broadcast = ProgramBroadcast(compiler, compiled, directory)
broadcast.shared(microbatch, options, directory, progress) -> (Packed, how it came about)    all ranks call it
broadcast.directory(index)           where a program is written
broadcast.of_first(make) -> files    what the first rank makes
own_rank() -> [rank]                 None: this process runs all of them
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from csc.cache.model_entries import Files, Packed, packed_bytes, packed_from
from csc.codegen.write import install, of_ranks
from csc.driver.compiled_programs import MADE, CompiledPrograms
from csc.driver.compiler import Compiler, Progress
from csc.ir.capture_guards import Unstorable
from csc.ir.program import Options
from csc.runtime.meeting import broadcast_group, first_makes

log = logging.getLogger("csc")

Microbatch = Mapping[str, Any]


class ProgramBroadcast:
    """Of one model's programs. directory: where they are written; None: a temporary one, removed with this object."""

    def __init__(self, compiler: Compiler, compiled: CompiledPrograms, directory: Path | None) -> None:
        self._compiler, self._compiled, self._home = compiler, compiled, directory
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._group: dist.ProcessGroup | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Over which the first rank hands out what it makes; None: this process is alone."""
        if own_rank() is None:
            return None
        if self._group is None:
            self._group = broadcast_group()
        return self._group

    def of_first(self, make: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
        """What `make` returns on the first rank, on every rank. All ranks call it."""
        group = self.group
        return (first_makes(make, group) if group is not None else None) or make()

    def directory(self, index: int) -> Path:
        """Where the index-th program goes; every process of a group writes its own."""
        if self._home is None and self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="csc-")
        home = self._home or Path(self._temporary.name) / "program"  # type: ignore[union-attr]
        own = own_rank()
        rank = f"-rank{own[0]}" if own is not None else ""
        return home.with_name(f"{home.name}{rank}{f'-{index}' if index else ''}")

    def shared(
        self, microbatch: Microbatch, options: Options, directory: Path, progress: Progress
    ) -> tuple[Packed, str]:
        """The program, written to the directory, and how it came about. Of several ranks the first one makes it."""
        group = self.group
        if group is None:
            return self._written(microbatch, options, directory, progress)
        made: list[tuple[Packed, str]] = []

        def make() -> Files | None:
            made.append(self._written(microbatch, options, directory, progress))
            try:
                return packed_bytes(made[0][0], self._compiler.model)
            except Unstorable as reason:
                log.info("every rank compiles for itself: the program holds %s", reason)
                return None

        files = first_makes(make, group)
        if made:
            return made[0]
        if files is None:
            return self._written(microbatch, options, directory, progress)
        packed = packed_from(files, self._compiler.model)
        self._compiled.take(packed, microbatch, options)
        return self._written(microbatch, options, directory, progress)[0], "from rank 0"

    def _written(
        self, microbatch: Microbatch, options: Options, directory: Path, progress: Progress
    ) -> tuple[Packed, str]:
        own = own_rank()
        match, packed, how = self._compiled.packed(microbatch, options, directory, progress)
        if own is None and how == MADE:
            return packed, how
        files = packed.files if own is None else of_ranks(packed.files, options.mesh, own)
        install(files, directory, match.batch)
        return packed, how


def own_rank() -> list[int] | None:
    """The rank whose files this process runs; None: it runs all of them."""
    return [dist.get_rank()] if dist.is_initialized() and dist.get_world_size() > 1 else None
