"""Progress of a training loop: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LINES = 5  # printed per phase where there is no terminal


@contextmanager
def showing(quiet: bool = False) -> Iterator[Callable[[str, int, int, float], None]]:
    """A function (phase, step, steps, loss) to call after every step; it shows nothing if `quiet`."""
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bar:
        tasks = {}

        def report(phase: str, step: int, steps: int, loss: float) -> None:
            if quiet:
                return
            if not console.is_terminal:
                if step % max(1, steps // LINES) == 0 or step == steps:
                    console.print(f"{phase:<10} step {step}/{steps}  loss {loss:.4f}", highlight=False)
                return
            if phase not in tasks:
                tasks[phase] = bar.add_task(phase, total=steps)
            bar.update(tasks[phase], completed=step, description=f"{phase:<10} loss {loss:.4f}")

        yield report
