"""Optimizers over what this process trains, which may be shards of parameters, and their state on disk."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from csc import devices
from csc.errors import InputError
from csc.runtime import weights
from csc.runtime.loaded_program import read_json, within
from csc.runtime.meeting import NOTHING, Vote
from csc.runtime.parameters import DataShards
from csc.runtime.specs import Box, ParameterSpec, overlap, part_in_box, whole_box
from csc.runtime.trainer import Trainer
from csc.runtime.weights import digest, published

# --- Whether an optimizer works entry by entry, so that steps on shards of a tensor are steps on the tensor ----------
#
# It is tried, not looked up: the optimizer steps tensors whole, and a second time cut in three, each shard with an
# optimizer of its own as each rank has one. Gradients of the shards differ up to 900-fold, so that norms, means over
# rows or columns, blocks and counts of all entries show.


Make = Callable[..., torch.optim.Optimizer]

SHAPES = ((129, 128), (4099,))  # cut in three: above and below the sizes from which 8-bit states are blocks of 256
SHARDS, STEPS, RATE = 3, 3, 1e-2
APART = 1e-3  # of the largest move within a shard: kernels round the end of a tensor in another way


@torch.no_grad()
def check(make: Make, groups: Sequence[Mapping[str, Any]], device: torch.device) -> None:
    """make: takes parameters as torch.optim does. groups: options of its groups of parameters. InputError for an
    optimizer that looks at more than an entry, or takes none of these steps.
    """
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in SHAPES]
    gradients = [[_uneven(torch.randn(shape, generator=generator)) for shape in SHAPES] for _ in range(STEPS)]
    with devices.forked(device):  # what it draws is no draw of the user's
        tensors = [starts, *gradients]
        moved = [_stepped(make, group, tensors, device) for group in groups]
        for shard in range(SHARDS):
            cut = [[tensor.tensor_split(SHARDS)[shard] for tensor in tensors] for tensors in tensors]
            for group, expected in zip(groups, moved, strict=True):
                stepped = _stepped(make, group, cut, device)
                if not all(map(_same, stepped, (tensor.tensor_split(SHARDS)[shard] for tensor in expected))):
                    raise InputError(
                        f"{_name(make)} steps a shard of a parameter in another way than the whole: it does not work "
                        "entry by entry",
                        "optimizer",
                        "use one that does (AdamW, Adam, SGD, ...), or leave the parameters whole: zero=0 and tp=1",
                    )


def _uneven(gradient: torch.Tensor) -> torch.Tensor:
    """Gradients of the three shards differ in size."""
    parts = gradient.tensor_split(SHARDS)
    return torch.cat([part * 30.0 ** (number - 1) for number, part in enumerate(parts)])


def _stepped(
    make: Make, group: Mapping[str, Any], tensors: Sequence[Sequence[torch.Tensor]], device: torch.device
) -> list[torch.Tensor]:
    """By how much parameters move. tensors: these, and their gradients of each step."""
    parameters = [nn.Parameter(tensor.clone().to(device)) for tensor in tensors[0]]
    try:
        optimizer = make([{**group, "params": parameters}] if group else parameters)
        for one in optimizer.param_groups:
            _set_rate(one)
        for gradients in tensors[1:]:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone().to(device)
            optimizer.step()
    except Exception as error:
        raise InputError(
            f"{_name(make)} takes no step of parameters that ranks divide: {type(error).__name__}: {error}",
            "optimizer",
            "use an optimizer that works entry by entry and asks for no closure (AdamW, Adam, SGD, ...)",
        ) from error
    return [parameter - start.to(device) for parameter, start in zip(parameters, tensors[0], strict=True)]


def _set_rate(group: dict[str, Any]) -> None:
    """A rate that shows what it does: a warm-up starts with none."""
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        group["lr"] = torch.full_like(rate, RATE)
    elif rate is not None:
        group["lr"] = RATE


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    room = APART * float(expected.abs().max())
    return bool(((actual - expected).abs() <= room).all())


def _name(make: Make) -> str:
    return str(getattr(make, "__name__", type(make).__name__))


# --- Optimizers over what this process trains, which may be shards of parameters -------------------------------------
#
# Where ranks divide parameters (tp, zero), it is proven first that the optimizer works entry by entry. What is
# returned is torch's own object: schedulers, groups and hooks are those of any optimizer.


def make_optimizer(trainer: Trainer, make: Make, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """make: a class of torch.optim, or a function that takes parameters as one does. parameters: as torch.optim takes
    them. options: for `make`. InputError for an optimizer that does not work entry by entry where ranks divide
    parameters, and for parameters that are not those of this process.
    """
    manifest = trainer.program.manifest
    if not isinstance(make, type) and not callable(make):
        raise InputError(
            f"{type(make).__name__} makes no optimizer", "optimizer",
            "pass the class and its options: compiled.optimizer(torch.optim.AdamW, lr=1e-4)",
        )  # fmt: skip
    groups = list(parameters)
    if manifest.zero or manifest.mesh.tp > 1:
        of_groups = [
            {k: v for k, v in group.items() if k != "params"} for group in groups if isinstance(group, Mapping)
        ]
        check(_named(make, options), _different(of_groups) or [{}], trainer.device)
    optimizer = make(groups, **options)
    if trainer.own.data is not None:
        _check_own(optimizer, trainer)
        hook(optimizer, trainer.own.data)
        optimizer.register_load_state_dict_pre_hook(_check_state)
    return optimizer


def hook(optimizer: torch.optim.Optimizer, data: DataShards) -> None:
    """It is proven to work entry by entry: its steps on these shards are right."""
    optimizer.register_step_pre_hook(lambda *_: data.check_current())
    optimizer.register_step_post_hook(lambda *_: data.stepped())


def _named(make: Make, options: Mapping[str, Any]) -> Make:
    named = partial(make, **options)
    named.__name__ = getattr(make, "__name__", type(make).__name__)  # type: ignore[attr-defined]
    return named


def _different(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups_found: list[dict[str, Any]] = []
    for group in groups:
        if group not in groups_found:
            groups_found.append(group)
    return groups_found


def _check_own(optimizer: torch.optim.Optimizer, trainer: Trainer) -> None:
    """Whole parameters would be stepped by no gradient."""
    parameters_here = {id(parameter) for parameter in trainer.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in parameters_here and parameter.numel():
                raise InputError(
                    f"the optimizer was given a parameter of shape {list(parameter.shape)} that this process does not "
                    f"step: with zero={trainer.program.manifest.zero} a rank steps its shard of each",
                    "optimizer",
                    "take parameters from compiled.parameters() or compiled.named_parameters(), not from the model",
                )


def _check_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """A state of other shards would be loaded as it is, and broadcast by the next step."""
    saved = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(saved, parameters):
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                raise InputError(
                    f"{key!r} of parameter {number} is {list(value.shape)} there, and this rank's shard "
                    f"{list(parameter.shape)}",
                    "load_state_dict",
                    "it is the state of another rank or mesh: save it with compiled.save(directory, optimizer=...), "
                    "which any mesh loads",
                )


# --- The state of an optimizer on disk, by the names of parameters ---------------------------------------------------
#
# Any mesh and level of ZeRO writes it, and any reads it.
#
# Terms: each process writes the *parts* that it alone has, or has before others: a box of a parameter's entries
# (csc.runtime.specs) for each tensor of its state. An *index* lists the parts of all processes, numbers that are no
# entries (Adam's `step`), and the options of the groups. It names the weights that the state belongs to.
#
# Nothing is pickled. A state is there whole, or the one before is.


INDEX = "optimizer.index.json"
FORMAT = 1
_PART = re.compile(r"optimizer-\d{5}-of-\d{5}-[0-9a-f]{8}\.safetensors")


@dataclass(frozen=True)
class SteppedParameter:
    """A parameter that this process steps: what of its entries, and whether no process before this one has them."""

    name: str
    spec: ParameterSpec
    parameter: torch.nn.Parameter
    box: Box
    writes: bool

    def box_of(self, tensor: torch.Tensor) -> Box:
        """What a tensor of the state has: the parameter's entries, or, as in Adafactor, something of the whole one."""
        return self.box if tensor.shape == self.parameter.shape else whole_box(tensor.shape)

    @property
    def is_whole(self) -> bool:
        """Whether this process steps all of it."""
        return self.box == whole_box(self.spec.shape)


Assemble = Callable[[SteppedParameter, str, Any], torch.Tensor]
Unfit = Callable[[str], InputError]


def owned(trainer: Trainer) -> list[SteppedParameter]:
    """What this process steps."""
    stepped = []
    for spec in trainer.own.trained:
        box = trainer.own.box(spec) or whole_box(spec.shape)
        if trainer.own.data is not None and not trainer.own.data.apart and trainer.own.data.of(spec.name) is not None:
            box = part_in_box(box, *trainer.own.data.shard(spec.name))
        stepped.append(SteppedParameter(spec.name, spec, trainer.own.stepped(spec.name), box, trainer.own.counts(spec)))
    return stepped


def mirrored(trainer: Trainer) -> list[SteppedParameter]:
    """What it steps as another rank does, which may be lost: its optimizer has this too, and nobody else saves it."""
    mirror = trainer.own.mirror
    if mirror is None:
        return []
    return [
        SteppedParameter(piece.spec.name, piece.spec, parameter, piece.box, mirror.stands_in(piece))
        for piece, parameter in mirror.trained
    ]


def save(directory: str | Path, optimizer: torch.optim.Optimizer, trainer: Trainer) -> None:
    """Write the state beside the weights that `directory` has. If one process cannot, all raise, and the state that was
    there is what is read there. InputError for state that is neither numbers nor tensors of a parameter's entries.
    """
    path, meeting = Path(directory), trainer.transport.meeting
    rank, count = trainer.transport.ranks[0], trainer.program.manifest.mesh.size // len(trainer.transport.ranks)
    drawn = meeting.total("save the optimizer", lambda: float(secrets.randbits(32)) if rank == 0 else 0.0)
    file = f"optimizer-{rank + 1:05d}-of-{count:05d}-{int(drawn):08x}.safetensors"

    def write() -> tuple[Vote, str]:
        parameters = [*owned(trainer), *mirrored(trainer)]
        tensors, index = _placed(
            listed(optimizer, parameters), {one.name: one for one in parameters if one.writes}, file, rank
        )
        if tensors:
            digests = json.dumps({name: digest(tensor) for name, tensor in tensors.items()})
            published(path / file, lambda made: save_file(tensors, made, metadata={weights.DIGESTS: digests}))
        return NOTHING, json.dumps(index)

    try:
        text = meeting.hold("the parts of an optimizer's state", write)
        texts = meeting.texts("save the optimizer", text)
    except BaseException:
        with contextlib.suppress(OSError):
            (path / file).unlink(missing_ok=True)
        raise

    def index() -> tuple[Vote, None]:
        if rank == 0:
            index = _joined([json.loads(text) for text in texts], weights.identity(path))
            published(path / INDEX, lambda made: made.write_text(json.dumps(index, indent=1) + "\n"))
            _clear(path, {part["file"] for entry in index["parameters"].values() for part in _parts(entry)})
        return NOTHING, None

    meeting.hold("the index of an optimizer's state", index)


def _placed(
    index: dict[str, Any], parameters: Mapping[str, SteppedParameter], file: str, rank: int
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of what `listed` tells, and the same with their parts in their place."""
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in index["parameters"].items():
        for key, value in entry["tensors"].items():
            written = f"{name}/{key}/{rank}"
            if value.numel():
                tensors[written] = value.cpu().contiguous().clone()
            part: dict[str, Any] = {"file": file, "key": written, "box": parameters[name].box_of(value)}
            if value.shape != parameters[name].parameter.shape:
                part["apart"] = True  # of another shape than the parameter
            entry["tensors"][key] = [part] if value.numel() else []
    return tensors, index


def _parts(entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [part for parts in entry["tensors"].values() for part in parts]


def _clear(path: Path, listed: set[str]) -> None:
    """Remove what older saves, or one that was cut off, have left."""
    for file in list(path.iterdir()):
        if _PART.fullmatch(file.name) and file.name not in listed:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def listed(optimizer: torch.optim.Optimizer, own: Sequence[SteppedParameter]) -> dict[str, Any]:
    """Its kind, the options and names of its groups, and of each parameter that this process writes the numbers and
    tensors of its state, by key.
    """
    of_parameter = {id(parameter.parameter): parameter for parameter in own}
    apart = next((key for key in optimizer.state if not isinstance(key, torch.Tensor)), None)
    if apart is not None:
        raise InputError(
            f"the optimizer keeps {apart!r}, which is of no parameter", "save",
            "keep it in its groups, or in the state of parameters; or save the optimizer's own state_dict()",
        )  # fmt: skip
    parameters: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        members = [of_parameter[id(p)] for p in group["params"] if id(p) in of_parameter]
        strange = next((p for p in group["params"] if id(p) not in of_parameter and p.numel()), None)
        if strange is not None:
            raise InputError(
                f"the optimizer steps a parameter of shape {list(strange.shape)} that the model does not train",
                "save",
                "make it with compiled.optimizer(...), or over compiled.parameters()",
            )
        names = dict.fromkeys(parameter.name for parameter in members)  # of some another rank's shard is kept, too
        groups.append({"names": list(names), "options": _options(group)})
        for parameter in members:
            if parameter.writes and parameter.parameter in optimizer.state:
                numbers, tensors = _state_of(parameter, optimizer.state[parameter.parameter])
                parameters[parameter.name] = {
                    "shape": list(parameter.spec.shape),
                    "numbers": numbers,
                    "tensors": tensors,
                }
    return {"kind": type(optimizer).__name__, "groups": groups, "parameters": parameters}


def _state_of(parameter: SteppedParameter, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Numbers, as the index has them, and tensors."""
    numbers: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape == parameter.parameter.shape and value.dim():
            tensors[key] = value.detach()
        elif isinstance(value, torch.Tensor) and value.numel() == 1:
            numbers[key] = {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item(),
                            "shape": list(value.shape)}  # fmt: skip
        elif value is None or isinstance(value, (bool, int, float, str)):
            numbers[key] = {"value": value}
        elif isinstance(value, torch.Tensor) and parameter.is_whole:
            tensors[key] = value.detach()
        else:
            form = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise InputError(
                f"{key!r} of {parameter.name!r} is {form}, neither a number nor a tensor of the parameter's entries",
                "save",
                "save this optimizer's own state_dict() on every rank, and load it with the same mesh",
            )
    return numbers, tensors


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Of a group, as JSON has them."""
    options = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        try:
            options[key] = json.loads(json.dumps(value))
        except TypeError:
            raise InputError(
                f"option {key!r} of a group of parameters is a {type(value).__name__}", "save",
                "give groups numbers, texts and lists of these",
            ) from None  # fmt: skip
    return options


def _joined(indices: Sequence[Mapping[str, Any]], identity: str) -> dict[str, Any]:
    """The index, of what all processes tell."""
    index = joined(indices)
    return {"format": FORMAT, "kind": index["kind"], "weights": identity, **index}


def joined(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all processes have listed, with lists of parts for tensors. InputError if they have other optimizers."""
    groups = [{**group, "names": list[str]()} for group in told[0]["groups"]]
    parameters: dict[str, Any] = {}
    for index in told:
        if len(index["groups"]) != len(groups) or index["kind"] != told[0]["kind"]:
            raise InputError(
                f"ranks have other optimizers: {told[0]['kind']} with {len(groups)} groups of parameters, and "
                f"{index['kind']} with {len(index['groups'])}",
                "save",
                "make the same groups on every rank, empty ones too",
            )
        for group, theirs in zip(groups, index["groups"]):
            group["names"] += [name for name in theirs["names"] if name not in group["names"]]
        for name, entry in index["parameters"].items():
            known = parameters.setdefault(name, {**entry, "tensors": {}})
            for key, parts in entry["tensors"].items():
                known["tensors"].setdefault(key, []).extend(parts)
    return {"kind": told[0]["kind"], "groups": groups, "parameters": parameters}


def load(directory: str | Path, optimizer: torch.optim.Optimizer, trainer: Trainer) -> None:
    """Give the optimizer the state that is in a directory. A parameter that was not trained when it was written starts
    without a state, as in a new optimizer. InputError, with nothing changed, if it is of another kind of optimizer, of
    other groups or parameters, or belongs to other weights than those beside it.
    """

    def read() -> tuple[Vote, dict[str, Any]]:
        try:
            return NOTHING, _read(Path(directory), optimizer, [*owned(trainer), *mirrored(trainer)])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"it is damaged: {type(error).__name__}: {error}", str(Path(directory) / INDEX),
                "Take another copy of it, or an older checkpoint",
            ) from error  # fmt: skip

    put(optimizer, trainer.transport.meeting.hold("load the optimizer", read))


def put(optimizer: torch.optim.Optimizer, made: dict[str, Any]) -> None:
    """Give it what was `restored`, in the dtypes that it was saved in: torch turns state into the parameter's."""
    optimizer.load_state_dict(made)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in made["state"].items():
        now = optimizer.state[parameters[number]]
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and getattr(now.get(key), "dtype", value.dtype) != value.dtype:
                now[key] = value.to(now[key].device)


def _read(path: Path, optimizer: torch.optim.Optimizer, parameters: Sequence[SteppedParameter]) -> dict[str, Any]:
    """What `load_state_dict` takes."""
    table = _table(path)
    fits(table, optimizer, lambda fault: _unfit(path, fault))
    if table["weights"] != weights.identity(path):
        raise _unfit(path, "the weights beside it are of another save: a save was cut off, or had no optimizer")

    def assemble(parameter: SteppedParameter, key: str, parts: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        return _assembled(path, parameter, key, parts)

    return restored(table, optimizer, parameters, assemble, lambda fault: _unfit(path, fault))


def restored(
    table: Mapping[str, Any],
    optimizer: torch.optim.Optimizer,
    own: Sequence[SteppedParameter],
    assemble: Assemble,
    unfit: Unfit,
) -> dict[str, Any]:
    """What `load_state_dict` takes, of what was `joined`. assemble: makes this process' entries of a tensor out of what
    stands for it there.
    """
    of_parameter = {id(stepped.parameter): stepped for stepped in own}
    home = {name: i for i, group in enumerate(table["groups"]) for name in group["names"]}
    state, groups, number = {}, [], 0
    for i, group in enumerate(optimizer.param_groups):
        numbers = []
        for parameter in group["params"]:
            stepped = of_parameter.get(id(parameter))
            if stepped is not None and home.get(stepped.name, i) != i:
                raise unfit(f"{stepped.name!r} is in group {home[stepped.name]} there, and in group {i} here")
            if stepped is not None and stepped.name in table["parameters"]:
                state[number] = _of_one(stepped, table["parameters"][stepped.name], assemble, unfit)
            numbers.append(number)
            number += 1
        then = table["groups"][i]["options"]
        now = {key: _like(value, then.get(key, value)) for key, value in group.items()}
        groups.append({**then, **now, "params": numbers})  # what a scheduler has left there, too
    return {"state": state, "param_groups": groups}


def _like(now: Any, then: Any) -> Any:
    """An option as it was, in the type that it has now."""
    if isinstance(now, torch.Tensor):
        return torch.full_like(now, then) if not isinstance(then, torch.Tensor) else then
    return tuple(then) if isinstance(now, tuple) and isinstance(then, list) else then


def _table(path: Path) -> dict[str, Any]:
    """The index."""
    if not (path / INDEX).is_file():
        raise InputError(f"it has no {INDEX}", str(path), "Save with compiled.save(directory, optimizer=optimizer)")
    table = read_json(path / INDEX, lambda fault: InputError(fault, str(path / INDEX), "Take an older checkpoint"))
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise _unfit(path, "it is no index of an optimizer's state that this csc reads")
    return table


def fits(table: Mapping[str, Any], optimizer: torch.optim.Optimizer, unfit: Unfit) -> None:
    """Raise what `unfit` makes unless it is of this kind, with as many groups."""
    if table["kind"] != type(optimizer).__name__:
        raise unfit(f"it is the state of {table['kind']}, and this is {type(optimizer).__name__}")
    if len(table["groups"]) != len(optimizer.param_groups):
        count = len(optimizer.param_groups)
        raise unfit(f"it has {len(table['groups'])} groups of parameters, and the optimizer has {count}")


def _unfit(path: Path, fault: str) -> InputError:
    return InputError(fault, str(path / INDEX), "Make the optimizer as it was made for that save, or begin a new one")


def _of_one(parameter: SteppedParameter, entry: Mapping[str, Any], assemble: Assemble, unfit: Unfit) -> dict[str, Any]:
    """The state of what this process steps of a parameter."""
    if entry["shape"] != list(parameter.spec.shape):
        raise unfit(f"{parameter.name!r} is {entry['shape']} there, and {list(parameter.spec.shape)} in the model")
    state: dict[str, Any] = {}
    for key, number in entry["numbers"].items():
        dtype = number.get("dtype")
        value = number["value"]
        state[key] = torch.full(number["shape"], value, dtype=getattr(torch, dtype)) if dtype else value
    for key, parts in entry["tensors"].items():
        state[key] = assemble(parameter, key, parts)
    return state


def check_whole(one: SteppedParameter, key: str, shape: Sequence[int], unfit: Unfit) -> None:
    """Raise what `unfit` makes if state that is not of a parameter's entries would go to a shard of it."""
    if not one.is_whole:
        raise unfit(
            f"{key!r} of {one.name!r} is {list(shape)}, for the whole parameter, and this process steps a shard"
        )


def _assembled(path: Path, parameter: SteppedParameter, key: str, parts: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """This process' entries, out of all parts that have some of them."""
    files = {row["key"]: within(path, row["file"], lambda fault: _unfit(path, fault)) for row in parts}
    assembled: torch.Tensor | None = None
    filled = 0
    with weights.Files(files) as opened:
        for row in parts:
            box: Box = tuple(tuple((int(a), int(b)) for a, b in dim) for dim in row["box"])
            if row.get("apart"):
                check_whole(parameter, key, opened.header(row["key"]).shape, lambda fault: _unfit(path, fault))
                return opened.tensor(row["key"], parameter.parameter.device)
            blocks = list(overlap(parameter.box, box))
            if not blocks and assembled is not None:
                continue
            tensor = opened.tensor(row["key"], "cpu") if blocks else opened.header(row["key"])
            if assembled is None:
                assembled = torch.empty(parameter.parameter.shape, dtype=tensor.dtype)
            for here, source in blocks:
                assembled[here] = tensor[source]
                filled += assembled[here].numel()
    if assembled is None or filled != assembled.numel():
        raise _unfit(path, f"{key!r} of {parameter.name!r} is not all there")
    return assembled.to(parameter.parameter.device)
