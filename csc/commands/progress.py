"""What a command is doing, while it does it: a line that changes on a terminal, else a line every few seconds.

with shown(console) as tell:
    tell("differentiate")
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

EVERY = 5.0  # seconds between two lines in a log; a command that is done sooner prints none


@contextmanager
def shown(errors: Console, every: float = EVERY) -> Iterator[Callable[[str], None]]:
    """Yields what is to be called with the name of each step."""
    if errors.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=errors, transient=True) as progress:
            task = progress.add_task("loading")
            yield lambda name: progress.update(task, description=escape(name))
        return
    now, done, began = ["loading"], threading.Event(), time.monotonic()

    def speak() -> None:
        while not done.wait(every):
            errors.print(f"csc: {now[0]}, {time.monotonic() - began:.0f} s", highlight=False, markup=False)

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield lambda name: now.__setitem__(0, name)
    finally:
        done.set()
        speaker.join()
