"""The parameters of this process: what its ranks compute with, what an optimizer steps of them, their values on disk.

Terms: *held* are the parameters of this process' ranks, each once. Of several processes each holds its part of those
that ranks divide (csc.runtime.shards, csc.runtime.data_shards).

    own = OwnParameters(program, transport, device, weights, kept, data)
    own.trained -> specs          .stepped(name) -> nn.Parameter         .data: what of them is stepped in shards
    own.values, .wholes, .shards  by name: all, as they are computed with; kept whole; boxes, for the next trainer
    own.load(path)   .fill(fill)   .save(directory)   .collect(into)   .refresh()           all ranks call these
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from csc.errors import InputError
from csc.ir.groups import Group
from csc.runtime import saving, weights
from csc.runtime.boxes import cut, whole_box
from csc.runtime.consistency import Shared, checksum
from csc.runtime.data_shards import DataShards
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.shards import Given, Kept, Shards
from csc.runtime.specs import Box, ParameterSpec
from csc.runtime.transport import InProcess, Transport
from csc.runtime.words import NOTHING, Said

log = logging.getLogger("csc")


class OwnParameters:
    """Of the ranks of this process. given, kept, data: as for csc.runtime.trainer.Trainer."""

    def __init__(
        self,
        program: LoadedProgram,
        transport: Transport,
        device: torch.device,
        given: Given,
        kept: Mapping[str, Kept],
        data: DataShards | None,
    ) -> None:
        self._manifest, self._transport, self._device = program.manifest, transport, device
        mesh = self._manifest.mesh
        positions = {mesh.coordinates(rank).pp for rank in transport.ranks}
        self.specs = [p for p in self._manifest.parameters if positions & set(p.ranks)]
        self.parts = Shards(mesh, transport, device, self._manifest.zero)
        self.values, self._empty = self.parts.parameters(program, self.specs, given, kept)
        refuse_elsewhere(self.values, device)
        self.data = self._data_shards(data)
        self._compare(self.parts.sources)
        self._filled = False  # then frozen parameters, too, are known to the ranks that hold them alone

    @property
    def _first(self) -> int:
        """Of this process' ranks."""
        return self._transport.ranks[0]

    def _data_shards(self, before: DataShards | None) -> DataShards | None:
        """None where every rank steps whole parameters, or all ranks are in this process, which holds each once."""
        manifest, rank = self._manifest, self._first
        group = manifest.mesh.group(Group.DATA, rank)
        if not manifest.zero or len(group) == 1 or isinstance(self._transport, InProcess):
            return None
        apart = manifest.zero >= 3
        fits = before is not None and (before.ranks, before.apart) == (group, apart)
        found = before if before is not None and fits else DataShards(manifest.mesh, rank, apart)
        found.add(self.specs, self.values)
        return found

    def _compare(self, wholes: Mapping[str, torch.Tensor]) -> None:
        """InputError unless all ranks that hold a parameter, frozen or not, hold the same values, or parts of the same.
        wholes: the tensors that parts were taken from, or checksums of them.
        """
        parameters = self._manifest.parameters
        alike = [spec for spec in parameters if not self.parts.in_shards(spec)]
        shared = [Shared("parameter", spec.name, spec.ranks, spec.equal) for spec in alike]
        self._transport.compare_values(shared, {n: p for n, p in self.values.items() if n not in self._empty})
        divided = [spec for spec in parameters if spec.boxes or self.parts.in_shards(spec)]
        if divided:  # ranks hold different boxes of it, which are to be of one tensor
            shared = [Shared("parameter", spec.name, spec.ranks) for spec in divided]
            self._transport.compare_values(shared, wholes)

    def know(self, other: OwnParameters) -> None:
        """Of the parameters of a program for other decisions of the model. InputError if ranks of several processes
        would have to train a parameter that they did not have before. All ranks call it.
        """
        own = {spec.name: spec for spec in self.specs}
        new = [spec for spec in other.specs if spec.name not in own]
        moved = [spec for spec in other.specs if spec.name in own and spec.ranks != own[spec.name].ranks]
        trained = [spec for spec in (*new, *moved) if spec.trainable]
        if not isinstance(self._transport, InProcess):
            everywhere = self._transport.meeting.total("other decisions", lambda: float(len(trained)))
            if everywhere:
                raise InputError(
                    "with what this batch decides, ranks would train parameters that they did not have before"
                    + (f", such as {trained[0].name!r}" if trained else ""),
                    "train_step",
                    "compile with an example that uses all parts of the model (text, pictures and sound), and with "
                    "stages that each have something to do without the optional ones",
                )
        if new and any(spec.trainable for spec in new):
            log.warning(
                "a batch trains parameters that none did before, such as %s: give them to the optimizer too, or "
                "compile with an example that uses all parts of the model",
                next(spec.name for spec in new if spec.trainable),
            )
        self.specs = [*self.specs, *new]
        self.values = {**self.values, **{spec.name: other.values[spec.name] for spec in new}}
        self._empty = self._empty | (other._empty - own.keys())
        if self.data is not None:
            self.data.add(new, self.values)

    @property
    def trained(self) -> list[ParameterSpec]:
        """Of the trainable parameters of this process."""
        return [spec for spec in self.specs if spec.trainable]

    def box(self, spec: ParameterSpec) -> Box | None:
        """What this process computes with of a parameter; None: all of it."""
        return self.parts.box(spec)

    def stepped(self, name: str) -> nn.Parameter:
        """What this process steps of a parameter that trains."""
        shard = self.data.of(name) if self.data is not None else None
        return self.values[name] if shard is None else shard

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What this process steps, under the model's names, each once, in the program's order."""
        return ((spec.name, self.stepped(spec.name)) for spec in self.trained)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module.zero_grad."""
        for _, parameter in self.named():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their common 2-norm is at most `max_norm`; returns the norm before, on
        the CPU.

        The norm is over all ranks, each parameter once: tied ones count at their owner, replicas not at all.
        All ranks call it. InputError: max_norm is below 0, which would turn gradients round.
        """
        if not max_norm >= 0:
            raise InputError(f"max_norm is {max_norm}", "clip_grad_norm_", "pass a number from 0 on; inf only measures")
        square = self._transport.meeting.total("clip_grad_norm_", self._square)
        norm = torch.tensor(square, dtype=torch.float64).sqrt().float()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0).to(self._device)
        for _, parameter in self.named():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return norm

    def _square(self) -> float:
        """The square of the norm of the gradients that count here."""
        square = torch.zeros(1, dtype=torch.float64, device=self._device)
        for spec in self.specs:
            gradient = self.stepped(spec.name).grad
            if gradient is not None and spec.trainable and self.counts(spec):
                wide = torch.promote_types(gradient.dtype, torch.float32)
                square += torch.linalg.vector_norm(gradient, dtype=wide).double() ** 2
        return float(square)

    def counts(self, spec: ParameterSpec) -> bool:
        """Whether this process' gradient of a parameter has entries that no process before it counts."""
        first, mesh = self._first, self._manifest.mesh
        if self.data is not None and self.data.of(spec.name) is not None:
            position, part = mesh.coordinates(first).pp, mesh.shard(first)
            one = mesh.shard(mesh.group(spec.equal, first)[0])  # of those that hold the same
            return (position, part) == (spec.owner, one)
        return mesh.group(spec.equal, first, spec.ranks)[0] in self._transport.ranks

    @property
    def wholes(self) -> Mapping[str, nn.Parameter]:
        """The whole parameters of this process, frozen ones too: what trains, not copies."""
        return {spec.name: self.values[spec.name] for spec in self.specs if self.parts.box(spec) is None}

    @property
    def shards(self) -> Mapping[str, Kept]:
        """Those of which it keeps a part for itself, with what that is; without those that have no values."""
        own = [spec for spec in self.specs if spec.name not in self._empty]
        found = {spec.name: self.parts.kept(spec, self.values[spec.name]) for spec in own}
        return {name: kept for name, kept in found.items() if kept is not None}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This process' parameters, frozen ones too, detached, under the model's names; of those that data-parallel
        ranks step in shards its own shard.
        """
        return self._held_now | {name: parameter.detach() for name, parameter in self.named()}

    @property
    def _held_now(self) -> dict[str, torch.Tensor]:
        """This process' parameters as it computes with them, detached. `refresh` comes before."""
        return {spec.name: self.values[spec.name].detach() for spec in self.specs}

    def refresh(self) -> None:
        """Bring what ranks have stepped in shards into the parameters that they compute with, if any has. All ranks
        call it.
        """
        if self._manifest.zero == 0 or isinstance(self._transport, InProcess):
            return

        def stale() -> float:
            if self.data is not None:
                self.data.check_steps("parameters")
            return float(self.stale)

        anywhere = self._transport.meeting.total("parameters that ranks have stepped in shards", stale)
        if anywhere:
            self.gather()

    def check_step(self, where: str) -> None:
        """InputError if a step would not train what the model has."""
        self._check_values(where)
        self.parts.check_sources(where)
        if self.data is not None:
            self.data.check_steps(where)

    @property
    def stale(self) -> bool:
        """Whether whole parameters lack what this rank has stepped, as far as it knows."""
        return self.data is not None and self.data.stale

    def gather(self) -> None:
        """Bring what ranks have stepped in shards into the parameters that they compute with. All ranks call it."""
        if self.data is not None:
            self.data.gather(self._transport)

    def _check_values(self, where: str) -> None:
        """InputError if there are parameters that were made without values, and `load` has not been called since."""
        if self._empty:
            count, first = len(self._empty), min(self._empty)
            raise InputError(
                f"{count} parameters of {self._manifest.name} have no values yet, {first!r} for one: they were "
                "given on the meta device, or a load failed halfway",
                where,
                "Load weights with compiled.load(...) first",
            )

    @torch.no_grad()
    def load(self, path: str | Path, format: weights.WeightLayout = weights.OWN) -> None:
        """Read this process' parameters from a safetensors file or a directory of them. All ranks call it.

        InputError if one is missing or of another shape or dtype, then nothing was changed; or if ranks that hold the
        same parameter have read other values.
        """

        wholes: dict[str, torch.Tensor] = {}

        def read() -> tuple[Said, None]:
            boxes = {spec.name: self.parts.box(spec) for spec in self.specs}
            into = {name: tensor for name, tensor in self.values.items() if boxes.get(name) is None}
            for name, tensor in weights.each(path, self.specs, self._device, format, into=into):
                self._empty = set(self.values)  # until all have come
                box = boxes[name]
                if tensor is not self.values[name]:
                    self.values[name].copy_(tensor if box is None else cut(tensor, box))
                if box is not None:
                    wholes[name] = checksum(tensor)
            return NOTHING, None

        self._transport.meeting.hold("load", read)
        self._have_come()
        self._compare(wholes)

    @torch.no_grad()
    def fill(self, fill: Callable[[str, Box, torch.Tensor], None]) -> None:
        """Have everything that this process holds written by `fill`, which takes a parameter's name, a box of it and
        the tensor of that. All ranks call it. If it fails on one of them, none goes on without values.
        """

        def filled() -> tuple[Said, None]:
            for spec in self.specs:
                self._empty = set(self.values)  # until all have come
                fill(spec.name, self.parts.box(spec) or whole_box(spec.shape), self.values[spec.name].detach())
            return NOTHING, None

        self._transport.meeting.hold("load", filled)
        self._have_come()

    def _have_come(self) -> None:
        """All values were read."""
        self._filled = True
        self._empty = set()
        if self.data is not None and self.data.apart:
            self.data.known()

    @torch.no_grad()
    def collect(self, into: Mapping[str, torch.Tensor]) -> None:
        """Copy what was trained (after `load`: all that was read) into these tensors, from the ranks that own it.

        All ranks call it; `into` has every parameter of the program by name, on any device.
        """
        manifest = self._manifest
        wanted = [spec for spec in manifest.parameters if spec.trainable or self._filled]

        def check() -> tuple[Said, None]:
            self._check_values("collect")
            for spec in wanted:
                if into[spec.name].is_meta:
                    raise InputError(
                        f"parameter {spec.name!r} of the model is on the meta device, which holds no values", "collect",
                        "save with compiled.save(directory), or give the model memory first: "
                        "model.to_empty(device='cpu')",
                    )  # fmt: skip
            return NOTHING, None

        self._transport.meeting.hold("collect", check)
        self.refresh()
        for spec in wanted:
            into[spec.name].copy_(self.parts.whole(spec, self.values.get(spec.name)))
            self.parts.put_back(spec)

    def save(self, directory: str | Path, format: weights.WeightLayout = weights.OWN) -> None:
        """Write the weights as HF does: a shard per pipeline rank, or one file from one process. All ranks call. If one
        of them cannot write, all raise, and what was saved there before is what is read there.
        """
        manifest, meeting, ranks = self._manifest, self._transport.meeting, self._transport.ranks
        mesh = manifest.mesh
        if set(ranks) == set(mesh.group(Group.WORLD, self._first)):
            self._check_values("save")
            saving.write(directory, manifest, None, self._held_now, format)
            return

        self.refresh()

        def name() -> float:
            self._check_values("save")
            return float(secrets.randbits(32)) if self._first == 0 else 0.0

        def shards() -> tuple[Said, None]:
            for position in own:
                saving.write(directory, manifest, position, state, format, save)
            return NOTHING, None

        def index() -> tuple[Said, None]:
            if self._first == 0:
                saving.write_index(directory, manifest, format, save)
            return NOTHING, None

        own = [mesh.coordinates(rank).pp for rank in ranks if rank == mesh.group(Group.POSITION, rank)[0]]
        state = self._held_now
        for spec in manifest.parameters:  # all ranks have their part in each that is divided
            if self.parts.in_parts(spec):
                whole = self.parts.whole(spec, state.get(spec.name))
                state |= {spec.name: whole.cpu()} if spec.owner in own else {}
        save = f"{int(meeting.total('save', name)):08x}"
        try:
            meeting.hold("the shards of what is saved", shards)
        except BaseException:
            for position in own:
                saving.discard(directory, manifest, position, save)
            raise
        meeting.hold("the index of what is saved", index)


def refuse_elsewhere(values: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """InputError if a parameter lies on another device of this machine than the one that this process works on."""
    for name, one in values.items():
        if one.device.type == device.type and one.device.index != device.index:
            raise InputError(
                f"parameter {name!r} is on {one.device}, and this process works on {device}", "compile",
                f"make each process' model on its own device, which LOCAL_RANK tells: model.to('{device}')",
            )  # fmt: skip
