"""A program directory, read and checked, and the rank modules in it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import stat
import sys
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from csc.errors import ProgramError, ScheduleError
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.ir.schedule import Message, Schedule, check_whole_forward, parse, part, verify
from csc.runtime.made_once import Constants
from csc.runtime.specs import Manifest, manifest

# --- Files that may not be what csc wrote, read with care: damaged, changed, or something else under the name --------
#
# Terms: *fail* makes the error to raise out of a sentence that says what is wrong.


LONGEST = 2**28  # bytes; the program.json of 1,024 ranks has some 10**7

Fail = Callable[[str], Exception]


def checked_file(file: Path, fail: Fail) -> Path:
    """The path, if a regular file is there."""
    try:
        mode = os.stat(file).st_mode
    except FileNotFoundError:
        raise fail("there is no such file") from None
    except (OSError, ValueError) as error:
        raise fail(f"it cannot be read: {error}") from None
    if not stat.S_ISREG(mode):
        raise fail("it is not a file")
    return file


def read_text(file: Path, fail: Fail) -> str:
    """The text of a file."""
    size = checked_file(file, fail).stat().st_size
    if size > LONGEST:
        raise fail(f"it has {size} bytes, and at most {LONGEST} are read")
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise fail(f"it cannot be read as text: {error}") from None


def read_json(file: Path, fail: Fail) -> Any:
    """The value in a JSON file."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(items)
        if len(table) < len(items):
            names = [name for name, _ in items]
            twice = next(name for name in table if names.count(name) > 1)
            raise ValueError(f"key {twice[:60]!r} stands there twice")
        return table

    text = read_text(file, fail)
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except ValueError as error:
        raise fail(f"it is not JSON: {error}") from None
    except RecursionError:
        raise fail("it is not JSON that csc wrote: it is nested too deeply") from None


def within(directory: Path, name: str, fail: Fail) -> Path:
    """A file named in a list. Its own link may lead elsewhere, as in a Hugging Face cache; its folder may not."""
    parts = PurePosixPath(name).parts
    if not parts or "\0" in name or PurePosixPath(name).is_absolute() or ".." in parts:
        raise fail(f"it lists {name!r:.80}, which is no name of a file within it")
    file = directory / name
    if len(parts) > 1 and not file.parent.resolve().is_relative_to(directory.resolve()):
        raise fail(f"it lists {name!r:.80}, which a link leads out of it")
    return file


# --- A program directory, read and checked; and the rank modules in it -----------------------------------------------
#
# Terms: a *program directory* is what the compiler wrote (program.json, schedule.txt, constants, one rank_R.py per
# rank, position_P.py for what the ranks of a pipeline position share). It may lack the files of some ranks. A file of
# text whose hash is no longer the one that program.json lists is *edited*: allowed, since they are there to be read
# and changed. program.json itself and constants are what was compiled, or an error.


@dataclass(frozen=True)
class LoadedProgram:
    """A checked program directory.

    `package` is the unique name under which its modules are imported: two loads, of one directory or of two,
    never share modules. `edited` lists the files, of those that its ranks use, whose content differs from what the
    compiler wrote.
    """

    directory: Path
    manifest: Manifest
    schedule: Schedule
    edited: tuple[str, ...]
    package: str

    def example(self) -> dict[str, torch.Tensor]:
        """Example inputs of one microbatch, by name."""
        return read_tensors(self.directory / "example.safetensors")

    def constants(self, rank: int, device: torch.device | str = "cpu") -> Constants:
        """The constants that the stages of a position on the pp axis read, on `device`."""
        stages_here = {stage.stage for stage in self.manifest.stages_of(rank)}
        return self.named_constants(
            [c.name for c in self.manifest.constants if stages_here.intersection(c.stages)], device
        )

    def named_constants(self, names: Iterable[str], device: torch.device | str) -> Constants:
        """These constants, on `device`."""
        tensors = read_tensors(self.directory / "constants.safetensors", list(names))
        return Constants({name: tensor.to(device) for name, tensor in tensors.items()})


def load(directory: str | Path, ranks: Iterable[int] | None = None) -> LoadedProgram:
    """Read DIR/program.json and DIR/schedule.txt and check both. Nothing is executed.

    ranks: those that are going to run here: their files, and those that all ranks share, have to be there and are
    compared with what was emitted. None: all ranks. That program.json is the same everywhere, with what it says of the
    other files, ranks make sure of before they start.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ProgramError(
            "there is no such directory",
            str(path),
            "Point to one that `csc compile TARGET -o DIR` or `compiled.write(DIR)` made",
        )
    file = path / "program.json"
    if not file.exists():
        raise ProgramError("there is no program.json", str(path), "Point to a directory that csc compiled")
    table = read_json(file, _failing(file))
    checked = manifest(table, str(file))
    _check_fingerprint(table, checked, file)
    edited = _edited(path, checked, range(checked.mesh.size) if ranks is None else ranks)
    return LoadedProgram(path, checked, _schedule(path, checked), edited, f"_csc_program_{uuid.uuid4().hex}")


def _failing(file: Path, remedy: str = "Compile the program again") -> Callable[[str], ProgramError]:
    return lambda fault: ProgramError(fault, str(file), remedy)


def _check_fingerprint(table: Mapping[str, Any], checked: Manifest, file: Path) -> None:
    """ProgramError if program.json is not what the compiler wrote, but for the times that compiling took."""
    rest = {key: value for key, value in table.items() if key not in ("fingerprint", "timings")}
    try:
        actual = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
    except RecursionError:
        raise _failing(file)("it is nested too deeply") from None
    if actual != checked.fingerprint:
        raise ProgramError(
            "it has changed since it was compiled: its fingerprint is another one",
            str(file),
            f"Compile the program again; or, if you mean the change, make its fingerprint {actual!r}",
        )
    for name, expected in checked.tensors.items():
        actual = _hash(within(file.parent, name, _failing(file)))
        if actual != expected:
            fault = f"{name} is not the one that was compiled"
            raise ProgramError(fault, str(file.parent), "Compile the program again, or copy its directory again")


def _hash(file: Path) -> str:
    with checked_file(file, _failing(file)).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def own_files(mesh: Mesh, rank: int) -> tuple[str, str]:
    """A rank's file, and the one that it shares with the other ranks of its position, if there is one."""
    return f"rank_{rank}.py", f"position_{mesh.coordinates(rank).pp}.py"


def edited_files(program: LoadedProgram, rank: int) -> list[str]:
    """Edited files that a rank is to tell of: the first one of all, the first of a position its file, each its own."""
    mesh = program.manifest.mesh
    if rank == 0 or rank >= mesh.size:
        return list(program.edited) if rank == 0 else []
    alone, position = own_files(mesh, rank)
    speaks = mesh.group(Group.POSITION, rank)[0] == rank
    return [name for name in program.edited if name == alone or (name == position and speaks)]


def _edited(path: Path, checked: Manifest, ranks: Iterable[int]) -> tuple[str, ...]:
    mesh = checked.mesh
    here = [rank for rank in ranks if 0 <= rank < mesh.size]  # of others the transport says that they are too many
    of_rank = {name: rank for rank in range(mesh.size) for name in own_files(mesh, rank)}
    rank_of = {name: rank for rank in here for name in own_files(mesh, rank)}
    needed = {"__init__.py", "schedule.txt", *(f"rank_{rank}.py" for rank in here)}
    edited = []
    for name in [*checked.files, *sorted(needed - set(checked.files))]:
        if name in of_rank and name not in rank_of:
            continue
        file = within(path, name, _failing(path / "program.json"))
        if not file.is_file():
            remedy = f", with --rank {rank_of[name]} or for all ranks" if name in rank_of else ""
            raise ProgramError(f"its file {name} is missing", str(path), f"Compile the program again{remedy}")
        if name in checked.files and _hash(file) != checked.files[name]:
            edited.append(name)
    return tuple(edited)


def _schedule(path: Path, checked: Manifest) -> Schedule:
    file = path / "schedule.txt"
    text = read_text(file, _failing(file))
    try:
        schedule = parse(text)
        verify(
            schedule,
            [message.channel for message in checked.messages],
            [stage.backward_input for stage in checked.stages],
            [stage.backward_weight for stage in checked.stages],
            checked.microbatches,
            checked.divided,
        )
        _check_placement(schedule, checked)
        if checked.loss.over_batch is not None:
            check_whole_forward(schedule, checked.loss.stage)
    except ScheduleError as error:
        raise ScheduleError(error.what, f"{file}, {error.where}", error.remedy) from None
    return schedule


def _check_placement(schedule: Schedule, checked: Manifest) -> None:
    """ScheduleError unless it is for the ranks that program.json gives the stages to."""
    if len(schedule.ranks) != checked.mesh.pp:
        fault = f"it has {len(schedule.ranks)} ranks, the program has pp={checked.mesh.pp}"
        raise ScheduleError(fault, "schedule", "List every rank of the pipeline once")
    for stage in checked.stages:
        if schedule.placement[stage.stage] != stage.rank:
            fault = (
                f"stage {stage.stage} is on rank {schedule.placement[stage.stage]}, program.json has it on {stage.rank}"
            )
            raise ScheduleError(fault, "schedule", f"Move it to rank {stage.rank}, or compile with placement=")


def read_tensors(
    file: Path, names: list[str] | None = None, remedy: str = "Compile the program again"
) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file, or those named, on the CPU. ProgramError if it has none such."""
    checked_file(file, _failing(file, remedy))
    try:
        with safe_open(file, framework="pt") as opened:
            stored = set(opened.keys())
            wanted = sorted(stored) if names is None else names
            missing = [name for name in wanted if name not in stored]
            if missing:
                raise ProgramError(f"{missing[0]!r} is not in it", str(file), remedy)
            return {name: opened.get_tensor(name) for name in wanted}
    except (SafetensorError, OSError) as error:
        raise ProgramError(f"it is not safetensors: {error}", str(file), remedy) from None


@dataclass(frozen=True)
class StageFunctions:
    """What a rank file defines for one stage. A function that the stage's actions do not call is None.

    forward(batch, received, weights, constants) -> sent, saved
    backward_input(saved, received, weights, constants) -> sent, saved for weights
    backward_weight(saved for weights, weights, constants) -> iterable of (parameter name, gradient)
    backward(saved, received, weights, constants) -> the two in one: a generator of such pairs, its result what is sent
    loss_tokens(batch, constants) -> 0-d tensor; of a loss of several terms a number for each divisor
    """

    forward: Callable[..., Any]
    backward_input: Callable[..., Any] | None = None
    backward_weight: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None
    loss_tokens: Callable[..., Any] | None = None


# visibility(batch, constants) -> (ranges, admits, kinds) of each mask, None for what it does not have
Visibility = Callable[..., list[tuple[torch.Tensor | None, ...]]]


def visibility(program: LoadedProgram) -> Mapping[str, Visibility]:
    """What the masks of each component's spread tokens are made of, from layers/tables.py; empty if none are spread.
    Call it after `functions`. ProgramError if the file does not define it.
    """
    if not program.manifest.contexts:
        return {}
    tables = importlib.import_module(f"{program.package}.layers.tables")
    functions = getattr(tables, "VISIBILITY", None)
    names = [context.component for context in program.manifest.contexts]
    if not isinstance(functions, dict) or not all(callable(functions.get(name)) for name in names):
        fault = f"VISIBILITY should have a function for each of {', '.join(names)}"
        raise ProgramError(fault, str(program.directory / "layers/tables.py"), "Mend it")
    return functions


def functions(program: LoadedProgram, rank: int) -> dict[int, StageFunctions]:
    """The functions of a rank's stages, from rank_R.py. In a file for several stages each name ends in the stage:
    `forward_3`.

    ProgramError for code that does not import, with file and line, and for functions that are missing.
    """
    return _found(program, rank, _imported(program, f"rank_{rank}"), program.directory / f"rank_{rank}.py")


def encoder(program: LoadedProgram) -> Callable[..., Any]:
    """forward(batch, {}, weights, constants) -> ({value: features}, None) of features.py. ProgramError."""
    forward = getattr(_imported(program, "features"), "forward", None)
    if not callable(forward):
        raise ProgramError("function forward is missing", str(program.directory / "features.py"), "Mend it")
    return forward


def batch_loss(program: LoadedProgram) -> Callable[..., torch.Tensor]:
    """batch_loss(values, weights, constants, sizes) -> 0-d tensor, of batch_loss.py. ProgramError."""
    found = getattr(_imported(program, "batch_loss"), "batch_loss", None)
    if not callable(found):
        raise ProgramError("function batch_loss is missing", str(program.directory / "batch_loss.py"), "Mend it")
    return found


def _imported(program: LoadedProgram, name: str) -> ModuleType:
    """A file as a member of the program's package, so that `from .layers import x` works in it. No bytecode is written:
    a cached file could outlive an edit made within the same second.
    """
    file = program.directory / f"{name}.py"
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        importlib.invalidate_caches()  # the directory may have been written a moment ago
        if program.package not in sys.modules:
            _import_package(program)
        return importlib.import_module(f"{program.package}.{name}")
    except SyntaxError as error:
        raise ProgramError(
            f"syntax error: {error.msg}", f"{error.filename}, line {error.lineno}", "Mend that line"
        ) from None
    except Exception as error:
        inside = [f for f in traceback.extract_tb(error.__traceback__) if str(program.directory) in f.filename]
        where = f"{inside[-1].filename}, line {inside[-1].lineno}" if inside else str(file)
        raise ProgramError(f"importing it raised {type(error).__name__}: {error}", where, "Mend that line") from error
    finally:
        sys.dont_write_bytecode = writes


def _import_package(program: LoadedProgram) -> None:
    spec = importlib.util.spec_from_file_location(
        program.package,
        program.directory / "__init__.py",
        submodule_search_locations=[str(program.directory)],
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[program.package] = package
    try:
        spec.loader.exec_module(package)
    except BaseException:
        del sys.modules[program.package]
        raise


def _found(program: LoadedProgram, rank: int, module: ModuleType, file: Path) -> dict[int, StageFunctions]:
    manifest = program.manifest
    stages = manifest.stages_of(manifest.mesh.coordinates(rank).pp)
    indices = tuple(stage.stage for stage in stages)
    if getattr(module, "STAGES", None) != indices:
        raise ProgramError(
            f"STAGES is {getattr(module, 'STAGES', None)}, rank {rank} runs stages {indices}", str(file), "Mend it"
        )
    functions = {}
    called = {(action.kind, action.stage) for actions in program.schedule.ranks for action in actions}
    for stage in stages:
        needed = {
            "forward": True,
            "backward_input": ("B", stage.stage) in called,
            "backward_weight": ("W", stage.stage) in called,
            "backward": ("BW", stage.stage) in called,
            "loss_tokens": stage.weighs or (manifest.loss.stage == stage.stage and manifest.loss.weight == "tokens"),
        }
        parts: dict[str, Any] = {}
        for name, exists in needed.items():
            full = name if len(indices) == 1 else f"{name}_{stage.stage}"
            if exists and not callable(getattr(module, full, None)):
                raise ProgramError(f"function {full} is missing", str(file), "Stages with this work must define it")
            parts[name] = getattr(module, full) if exists else None
        functions[stage.stage] = StageFunctions(**parts)
    return functions


# --- Programs of one model for microbatches of different sizes, run together in one step -----------------------------
#
# Terms: the *members* of one set have the mesh, the stages, the order of work and the parameters in common. They
# differ in the sizes of what they read, compute and send. A *part* is for microbatches without some entries (images):
# its stages may have nothing to do, and lack a B, a W, messages and parameters that the first member has.


def check_member(first: LoadedProgram, other: LoadedProgram) -> None:
    """ProgramError, naming what differs, unless a step may hold microbatches of both."""
    ours, theirs = _common(first), _common(other)
    if is_part(first.manifest, other.manifest):
        differing = _beyond(first, other)
    else:
        differing = [part for part in ours if ours[part] != theirs[part]]
    if differing:
        raise ProgramError(
            f"it cannot run in one step with {first.directory}: {' and '.join(differing)} differ",
            str(other.directory),
            "Compile both from one CompiledModel, which cuts them the same way",
        )


def is_part(first: Manifest, other: Manifest) -> bool:
    """Whether a program lacks entries of the batch that the first one reads."""
    return not {entry.name for entry in other.inputs} >= {entry.name for entry in first.inputs}


def _beyond(first: LoadedProgram, other: LoadedProgram) -> list[str]:
    """In what a part has more than the first program, or something else."""
    ours, theirs = _common(first), _common(other)
    alike = [part for part in ("meshes", "zero", "microbatches", "losses") if ours[part] != theirs[part]]
    first_stages = {stage[0]: stage for stage in ours["stages"]}
    stages = all(
        rank == first_stages[stage][1] and has_b <= first_stages[stage][2] and has_w <= first_stages[stage][3]
        for stage, rank, has_b, has_w in theirs["stages"]
    )
    known = {name: (rest, set(stages)) for name, *rest, stages in ours["parameters"]}
    parameters = all(
        name in known and known[name][0] == rest and known[name][1] >= set(stages)
        for name, *rest, stages in theirs["parameters"]
    )
    schedule = part(
        first.schedule,
        theirs["messages"],
        [stage.backward_input for stage in other.manifest.stages],
        [stage.backward_weight for stage in other.manifest.stages],
        other.manifest.divided,
    )
    place = {stage: rank for stage, rank, *_ in theirs["stages"]}

    def stays(channel: Message) -> bool:
        return bool(place[channel[1]] == place[channel[2]])

    good = {
        "stages": stages and len(first_stages) == len(theirs["stages"]),
        "messages": {channel for channel in theirs["messages"] if not stays(channel)} <= ours["messages"].keys(),
        "parameters": parameters,
        "schedules": str(schedule) == str(other.schedule),
    }
    return alike + [part for part, fine in good.items() if not fine]


def _common(program: LoadedProgram) -> dict[str, Any]:
    manifest = program.manifest
    return {
        "meshes": manifest.mesh,
        "zero": manifest.zero,
        "microbatches": manifest.microbatches,
        "stages": [(s.stage, s.rank, s.backward_input, s.backward_weight) for s in manifest.stages],
        "messages": {m.channel: [value.name for value in m.values] for m in manifest.messages},
        "parameters": [
            (p.name, p.shape, p.dtype, p.trainable, p.weight, p.gradient, p.boxes, p.stages)
            for p in manifest.parameters
        ],
        # A step of one microbatch alone has none to combine.
        "losses": (
            (manifest.loss.for_any_size, [s.weighs for s in manifest.stages])
            if manifest.microbatches * manifest.mesh.dp > 1
            else manifest.loss.stage
        ),
        "schedules": str(program.schedule),
    }
