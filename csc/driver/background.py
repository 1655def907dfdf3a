"""A checkpoint that is written while training goes on.

saving = Saving(folder, write)                  write: what is left to do once values were copied
saving.begin(background)                        now, or in a thread
saving.wait() -> folder     saving.done
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("csc")


class BackgroundSave:
    """Of one checkpoint.

    Attributes:
        folder: Where it will be.
        copied: Bytes that this process has copied before training went on; 0 where it waited.
        seconds: What that took.
    """

    def __init__(self, folder: Path, write: Callable[[], object], copied: int = 0, seconds: float = 0.0) -> None:
        self.folder, self.copied, self.seconds = folder, copied, seconds
        self._write = write
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, background: bool) -> None:
        """Write it; in the background, errors are kept for `wait`."""
        if not background:
            self._write()
            return
        # No daemon: a script that ends has its last checkpoint written, unless it has left the process group.
        self._thread = threading.Thread(target=self._run, name=f"csc-{self.folder.name}")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            log.error("the checkpoint %s was not saved: %s", self.folder, error)

    @property
    def done(self) -> bool:
        """Whether it is on the disk, or failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Until it is on the disk, on all ranks.

        Returns:
            The folder.

        Raises:
            InputError: It could not be written here; StepFailed: on another rank. What was saved before is as it was.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self.folder
