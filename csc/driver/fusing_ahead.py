"""Where the functions of a model's programs are compiled, and what is begun for that before there are any.

ahead = FusingAhead(compiler)
ahead.begin(options)         when a program is not in the cache: the model is going to be traced
ahead.folder                 for the programs' trainers
"""

from __future__ import annotations

from functools import cached_property

from csc.cache.inductor_folder import inductor_folder
from csc.capture.batch import device_of
from csc.driver.compiler import Compiler
from csc.ir.program import Options
from csc.runtime.compile_pool import FunctionFolder, worker_count
from csc.runtime.fusing import lacks


class FusingAhead:
    """Of one model."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler

    @cached_property
    def folder(self) -> FunctionFolder:
        """It is there then."""
        return FunctionFolder.of(inductor_folder(self._compiler.store))

    def begin(self, options: Options) -> None:
        """Start the workers that `fuse` will need on a CPU."""
        device = device_of(self._compiler.model)
        if options.fuse and device.type == "cpu" and not lacks(device):
            self.folder.workers.start(worker_count(), self.folder.path)
