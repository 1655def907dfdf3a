"""A schedule that the user wrote or edited, given as a file instead of a name."""

from __future__ import annotations

from pathlib import Path

from csc.errors import InputError, ScheduleError
from csc.ir.program import Options
from csc.ir.schedule import Schedule, parse


def given_schedule(options: Options) -> Schedule | None:
    """The schedule that the options hold, or name the file of; None if they name a kind of schedule."""
    if isinstance(options.schedule, Schedule):
        return options.schedule
    if options.schedule.endswith(".txt") or "/" in options.schedule:
        return from_file(Path(options.schedule), options)
    return None


def from_file(path: Path, options: Options) -> Schedule:
    """The schedule of a file. InputError if it cannot be read; ScheduleError, with the line, for text that is none."""
    try:
        found = parse(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read it: {error}", str(path), "give the path of a schedule file") from None
    except ScheduleError as error:
        raise ScheduleError(error.what, f"{path}, {error.where}", error.remedy) from None
    if len(found.ranks) != options.mesh.pp:
        raise InputError(
            f"it lists {len(found.ranks)} ranks, the mesh has pp={options.mesh.pp}", str(path), "make them equal"
        )
    return found
