"""The Trainer: a loaded program with its weights, ready for training steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from csc import devices
from csc.errors import InputError
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.runtime import batches, context, executor, weights
from csc.runtime.batches import Microbatch
from csc.runtime.c10d import Distributed
from csc.runtime.consistency import Shared
from csc.runtime.executor import Ahead, Encoding, StepResult, Timed, Within, step
from csc.runtime.graphed_stage import GraphedPrograms
from csc.runtime.loaded_program import LoadedProgram, check_member, functions, is_part, visibility
from csc.runtime.loss import Losses, StepLoss
from csc.runtime.meeting import NOTHING, FewerRanks, Meeting, StepVote, Vote
from csc.runtime.parameters import DataShards, Kept, OwnParameters, met_of, receive, taken
from csc.runtime.rank import Rank
from csc.runtime.specs import Manifest, StepCounts
from csc.runtime.transport import InProcess, Transport

if TYPE_CHECKING:
    from csc.runtime.compile_pool import FunctionFolder
    from csc.runtime.fusing import FusedMembers
    from csc.runtime.survival import Survival


# --- What a step was: its loss, its size and its speed, as numbers for a log -----------------------------------------
#
# Terms
#   counts    of one replica's microbatches: tokens, samples, and the FLOPs that its ranks spend on them
#   peak      FLOP/s of a device, as the plan's hardware profile has them for the dtype that is computed in
#   MFU       model FLOPs of the step over what all devices could do in that time (PaLM, Chowdhery et al. 2022); what is
#             computed again for lack of memory is not counted
#
# Tokens are those that count in attention_mask, where the program reads one; else all places of the token ids.


TOKENS = ("input_ids", "decoder_input_ids", "labels")


def counted(manifests: Sequence[Manifest], microbatches: Sequence[Microbatch]) -> StepCounts:
    """What one replica's microbatches are."""
    tokens, samples, flops = 0, 0, 0.0
    for microbatch in microbatches:
        manifest = manifests[microbatch.program]
        text = _text(microbatch.tensors)
        if text is not None:
            mask = microbatch.tensors.get("attention_mask")
            places = mask is not None and mask.shape == text.shape and not mask.is_meta and mask.device.type == "cpu"
            tokens += int(mask.count_nonzero()) if places and mask is not None else text.numel()
            samples += len(text)
        flops += manifest.flops
    return StepCounts(float(tokens), float(samples), float(flops))


def _text(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The token ids, or what is most like them."""
    known = [tensors[name] for name in TOKENS if name in tensors]
    integers = [tensor for tensor in tensors.values() if tensor.dim() and not tensor.is_floating_point()]
    return next(iter([*known, *integers, *(tensor for tensor in tensors.values() if tensor.dim())]), None)


def metrics(
    loss: torch.Tensor, counts: StepCounts, seconds: float, manifest: Manifest, device: torch.device
) -> dict[str, float]:
    """counts: of all replicas. Seconds, rates and memory are this process'; the others the same on every rank."""
    metrics = {
        "loss": float(loss),
        "tokens": counts.tokens,
        "samples": counts.samples,
        "seconds": seconds,
        "tokens_per_second": counts.tokens / seconds,
        "samples_per_second": counts.samples / seconds,
        "peak_memory": float(devices.peak_memory(device)),
    }
    peak = manifest.plan.get("peak_flops")
    if isinstance(peak, (int, float)) and peak > 0 and counts.flops:
        metrics["mfu"] = counts.flops / (seconds * peak * manifest.mesh.size)
    return metrics


# --- The Trainer: a loaded program with its weights, ready for training steps ----------------------------------------
#
# Terms: *this process' ranks* are all of them with the in-process transport, and one under torchrun. Its parameters
# are those that these ranks hold; ranks of one process share one nn.Parameter for a parameter that several of them
# hold.
#
# Any torch optimizer over `.parameters()` makes the step; the same one on every rank.


log = logging.getLogger("csc")

Weights = Mapping[str, torch.Tensor]


class Trainer:
    """Runs a program's ranks that belong to this process.

    weights: tensors or nn.Parameters by name (more names than needed are fine; Parameters are shared with the
    caller, not copied; meta tensors make parameters without values, see `load`); a path to safetensors; or None for
    DIR/weights.safetensors. transport: None takes the default process group if there is one of the program's size, else
    all ranks run in this process. trace: keep when each action ran, in `timeline`. timeout: seconds without an answer
    until another process counts as lost. meeting: where this model's ranks agree on steps; None: one of its own.
    fused: compile the templates' functions with Inductor; see csc.runtime.fusing. artifacts: where it keeps what it
    makes. is_profiled: asked in each step whether a profiler is on, which ranges are for (csc.runtime.rank). within:
    makes a context for what computes. kept: shards of a trainer before (`shards`). data: what this process steps of
    parameters that data-parallel ranks divide, of a trainer before (`data`). graphs: see csc.runtime.graphed_stage.

    InputError or ProgramError, before any step, for whatever does not fit; RankLost if a peer goes away.
    """

    def __init__(
        self,
        program: LoadedProgram,
        weights: Weights | str | Path | None = None,
        transport: Transport | None = None,
        device: torch.device | str | None = None,
        trace: bool = False,
        timeout: float = 600.0,
        meeting: Meeting | None = None,
        fused: bool = False,
        artifacts: FunctionFolder | None = None,
        is_profiled: Callable[[], bool] = bool,
        within: Within = nullcontext,
        kept: Mapping[str, Kept] = MappingProxyType({}),
        data: DataShards | None = None,
        graphs: bool = False,
    ) -> None:
        self.program = program
        self.device = _device(program, device)
        self.transport = transport or _transport(program, self.device, timeout, meeting)
        self.own = OwnParameters(program, self.transport, self.device, weights, kept, data)
        self._manifests = [program.manifest]
        self._is_profiled, self._within = is_profiled, within
        self.fused = _members(program, artifacts, self.device, self.transport.ranks) if fused else None
        self.graphs = GraphedPrograms(self.device, graphs)
        self._members: list[list[Rank]] = []
        self._members = [self._loaded(program)]
        self.trace = trace
        self.ahead: Ahead | None = None  # see csc.runtime.executor
        self.timeline: dict[int, list[Timed]] = {}
        self.metrics: dict[str, float] = {}  # of the last step: see csc.runtime.trainer
        self._losses: Losses | None = None  # of the last step
        if self._survival is not None:
            self._survival.trains(self)

    @property
    def _survival(self) -> Survival | None:
        """If ranks may die."""
        return cast("Survival | None", self.transport.meeting.survival)

    @property
    def ranks(self) -> list[Rank]:
        """Of this process, for what is the same in every program."""
        return self._members[0]

    def member(self, program: int) -> Rank:
        """The first of them in one of the programs."""
        return self._members[program][0]

    @property
    def manifests(self) -> Sequence[Manifest]:
        """Of the programs, as batches are divided for them."""
        return self._manifests

    @property
    def is_profiled(self) -> Callable[[], bool]:
        """Whether a profiler is on."""
        return self._is_profiled

    @property
    def within(self) -> Within:
        """Makes a context for what computes."""
        return self._within

    def regroup(self, mesh: Mesh, rank: int, replicas: Sequence[int]) -> None:
        """Train on as this rank of fewer replicas, which were these at the start. All that are left call it; batches
        stay as they are.
        """

        def manifest(program: LoadedProgram) -> Manifest:
            return replace(program.manifest, mesh=mesh)

        def moved(member: Rank) -> Rank:
            met = met_of(mesh, rank, member.endpoint, self.fused is not None)
            program = replace(member.program, manifest=manifest(member.program))
            return replace(member, program=program, rank=rank, met=met, _groups={})

        assert isinstance(self.transport, Distributed)
        self.program = replace(self.program, manifest=manifest(self.program))
        self.transport.regroup(self.program.manifest, rank)
        self.own.regroup(self.program.manifest, replicas)
        self._members = [[moved(member) for member in ranks] for ranks in self._members]

    def add(self, program: LoadedProgram) -> None:
        """Take microbatches of this program's sizes too. ProgramError unless it is the same model, cut and scheduled
        the same way. All ranks call it.
        """
        check_member(self.program, program)
        self.transport.compare_programs(program)
        self._members.append(self._loaded(program))
        self._manifests.append(program.manifest)

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return self.program.manifest.microbatches

    @property
    def needs(self) -> frozenset[str]:
        """The inputs whose values this process' ranks read in any of the programs, and those that all samples share."""
        read = {name for ranks in self._members for rank in ranks for name in _read(rank)}
        return frozenset(read.union(*(batches.shared(manifest) for manifest in self._manifests)))

    @property
    def replicas(self) -> frozenset[int]:
        """Of this process' ranks."""
        return frozenset(replica for rank in self.ranks for replica in rank.replicas)

    @property
    def idle(self) -> bool:
        """Whether a microbatch of the last step added nothing to its loss."""
        return self._losses is not None and self._losses.idle

    @property
    def reads_features(self) -> bool:
        """Whether this process' ranks read features that come with the batch, in any of the programs."""
        specs = [manifest.features for manifest in self._manifests if manifest.features is not None]
        return any(entry in self.needs for spec in specs for entry in spec.entries)

    def reads(self, microbatch: Mapping[str, Any]) -> dict[str, Any]:
        """The entries of a completed microbatch that its program reads: the one that reads most of it."""
        return batches.read(self._manifests, microbatch)

    def _loaded(self, program: LoadedProgram) -> list[Rank]:
        """This process' ranks in a program."""
        mesh = program.manifest.mesh
        held = {mesh.coordinates(rank).pp for rank in self.transport.ranks}
        constants = {position: program.constants(position, self.device) for position in sorted(held)}
        stages = program.manifest.stages
        shared = [
            Shared("constant", constant.name, tuple(dict.fromkeys(stages[stage].rank for stage in constant.stages)))
            for constant in program.manifest.constants
        ]
        values = {name: tensor for position in sorted(held) for name, tensor in constants[position].items()}
        self.transport.compare_values(shared, values)
        of_rank = {rank: functions(program, rank) for rank in self.transport.ranks}
        if self.fused is not None:
            self.fused.add(program)
        ranks = [
            Rank(
                program, rank, of_rank[rank], self.transport.endpoint(rank), constants[mesh.coordinates(rank).pp],
                self.device, visibility(program),
                met_of(mesh, rank, self.transport.endpoint(rank), self.fused is not None),
            )
            for rank in self.transport.ranks
        ]  # fmt: skip
        return self.graphs.add(ranks, self.fused)

    def train_step(
        self, batch: batches.GlobalBatch, microbatches: int | None = None, drawn: int | None = None, local: bool = False
    ) -> torch.Tensor:
        """Forward and backward of the global batch (the same one on every rank): sets or adds to `p.grad`, as
        autograd does. local: the batch has the samples of this process' replicas alone.

        Returns the loss of the whole batch, a 0-d CPU tensor, the same bits on every rank. `microbatches` may
        only repeat the number that the program was compiled for. `drawn`: the seed of a step that is compared with
        another program's (csc.runtime.executor); None: it is drawn. InputError before any data moves; CscError, with
        the
        microbatches whose loss is not finite; StepFailed if another rank could not do the step. With all of these every
        `p.grad` is left as it was, on every rank, and the next step is in order. RankLost.
        """
        meeting = self.transport.meeting
        with meeting.turn("train_step"):
            dealt, votes = meeting.votes("train_step", lambda: self.ready(batch, microbatches, local))
            return StepLoss.of(self.run(dealt, StepVote.of_any(vote.step for vote in votes), drawn))

    def check_batch(self, batch: batches.GlobalBatch) -> None:
        """InputError for a batch that does not fit; whether there are weights is not asked."""
        batches.split(self._manifests, batch)

    def ready(
        self, batch: batches.GlobalBatch, microbatches: int | None = None, local: bool = False
    ) -> tuple[Vote, batches.Microbatches]:
        """The microbatches of every replica, or of this one's alone, for `run`; and this rank's vote on the step.
        InputError for a batch that does not fit. Nothing moves.
        """
        manifest = self.program.manifest
        if microbatches not in (None, manifest.microbatches):
            raise InputError(
                f"asked for {microbatches} microbatches, the schedule has {manifest.microbatches}",
                "train_step",
                f"Compile with microbatches={microbatches}",
            )
        if self._survival is not None and manifest.loss.over_batch is not None:
            raise InputError(
                "the loss is over the whole batch, so that a replica whose rank dies takes its part of everyone's loss "
                "with it", "train_step", "compile without survive=",
            )  # fmt: skip
        self.own.check_step("train_step")
        alone = isinstance(self.transport, InProcess)
        first = self.ranks[0]
        dealt = batches.split(self._manifests, batch, None if alone else batches.whose(first, local))
        for index, rank in enumerate(self.ranks):
            for microbatch in dealt.of_rank(rank):
                member = self._members[microbatch.program][index]
                names = [*_read(member), *(() if dealt.whole else batches.shared(member.program.manifest))]
                batches.check_present(member.program.manifest, microbatch.tensors, names, rank.rank)
        part = any(is_part(manifest, self._manifests[microbatch.program]) for microbatch in dealt.all)
        vote = NOTHING if alone else batches.vote(manifest, dealt, first.replicas[0])
        fused = StepVote() if self.fused is None else self.fused.vote({microbatch.program for microbatch in dealt.all})
        return replace(vote, step=replace(fused, uneven=part, stale=self.own.stale)), dealt

    @torch.no_grad()
    def run(
        self, dealt: batches.Microbatches, vote: StepVote, drawn: int | None = None, encoding: Encoding | None = None
    ) -> torch.Tensor:
        """A step that all ranks have agreed on in a meeting; see `train_step`. vote: what any rank has said of it.
        encoding: what ranks do for the next step, unless any does nothing ahead.
        """
        state = torch.get_rng_state() if self.program.manifest.random else None
        start = time.perf_counter()
        devices.watch_memory(self.device)
        try:
            self.transport.meeting.began()
            if self._survival is None:
                if vote.stale:
                    self.own.gather()
                results = self.results(dealt, vote, drawn, None if vote.nothing_ahead else encoding)
            else:
                self.transport.begin_step()
                results = self._survival.results(self, dealt, vote, self._drawn(drawn))
        except BaseException as error:
            if state is not None:  # the step after it draws what it would have drawn
                torch.set_rng_state(state)
            if isinstance(error, FewerRanks):
                raise
            failure = self.transport.failed(error)
            if failure is error:
                raise
            raise failure from None
        if self.trace:
            self.timeline = {rank: result.trace for rank, result in results.items()}
        losses, parameters = results[self.ranks[0].rank].losses, self.own
        self._losses = losses
        sums = [(rank, results[rank.rank].gradients) for rank in self.ranks]
        gradients = taken(sums, parameters.values, parameters.parts, self._read_again(dealt))
        loss = losses.total(self.program.manifest.microbatches)
        try:
            receive(gradients, sums, parameters.specs, parameters.values, parameters.parts, parameters.data)
            if parameters.mirror is not None:
                parameters.mirror.take()
        except BaseException as error:
            self.transport.meeting.give_up(f"gradients were set in part ({type(error).__name__})")
            raise
        seconds = time.perf_counter() - start
        self.metrics = metrics(loss, losses.counts, seconds, self.program.manifest, self.device)
        return loss

    def results(
        self, dealt: batches.Microbatches, vote: StepVote, drawn: int | None, encoding: Encoding | None = None
    ) -> dict[int, StepResult]:
        """Of a step that all have agreed on, whose gradients nobody has been given yet."""
        self.transport.begin_step()
        working = self._working()
        drawn = self._drawn(drawn)
        runs, profiled, calls = {}, self._is_profiled(), []
        for index, rank in enumerate(self.ranks):
            microbatches = dealt.of_rank(rank)
            ranks = [self._members[microbatch.program][index] for microbatch in microbatches]
            data = [
                self.on_device(microbatch.tensors, member)
                for member, microbatch in zip(ranks, microbatches, strict=True)
            ]
            held = self._held(rank, working)
            calls += [
                (mb.program, (member, tensors, held))
                for member, mb, tensors in zip(ranks, microbatches, data, strict=True)
            ]
            counts = counted(self._manifests, microbatches)
            coming = encoding.of(rank) if encoding is not None else None
            runs[rank.rank] = step(
                rank, ranks, data, held, self.trace, drawn, vote.uneven, counts, profiled, self._within, coming,
                self.ahead,
            )  # fmt: skip
        meeting = self.transport.meeting
        with nullcontext() if self.fused is None else self.fused.step(calls, vote, meeting):
            return self.transport.run(runs)

    def _drawn(self, drawn: int | None) -> int:
        """The seed of a step."""
        if drawn is None:
            return executor.draw() if self.program.manifest.random else 0
        return drawn

    def _working(self) -> dict[str, torch.Tensor]:
        """All parameters as they are computed with."""
        used = [spec for spec in self.program.manifest.parameters if spec.name in self.own.values]
        return {spec.name: _as(self.own.values[spec.name].detach(), spec.compute or spec.dtype) for spec in used}

    def _held(self, rank: Rank, working: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        specs = [p for p in self.program.manifest.parameters if p.name in working and rank.position in p.ranks]
        return {spec.name: self.own.parts.of_rank(spec, working[spec.name], rank) for spec in specs}

    def working(self, rank: Rank) -> dict[str, torch.Tensor]:
        """What a rank of this process computes with."""
        return self._held(rank, self._working())

    @torch.no_grad()
    def prepare(self, batch: batches.GlobalBatch, steps: int = 1, local: bool = False) -> None:
        """Plan where the tokens of a coming batch will be, so that its `train_step` finds that done. Nothing to do
        without cp. Any one thread may call it while another trains; `steps`: how many batches it is ahead at most.
        """
        most = max(len(context.contexts(rank)) for rank in self.ranks)
        if not most:
            return
        alone = isinstance(self.transport, InProcess)
        dealt = batches.split(self._manifests, batch, None if alone else batches.whose(self.ranks[0], local))
        with devices.at(self.device):
            for index, first in enumerate(self.ranks):
                first.endpoint.recent.keep(2 * (steps + 1) * most * len(dealt.all))
                for microbatch in dealt.of_rank(first):
                    rank = self._members[microbatch.program][index]
                    names = [name for spec in context.contexts(rank) for name in spec.inputs]
                    context.prepare(rank, self._on_device(microbatch.tensors, names))

    def on_device(self, microbatch: Mapping[str, torch.Tensor], rank: Rank) -> dict[str, torch.Tensor]:
        """What a rank reads of a microbatch."""
        return self._on_device(microbatch, _read(rank))

    def _on_device(self, microbatch: Mapping[str, torch.Tensor], names: list[str]) -> dict[str, torch.Tensor]:
        return {name: microbatch[name].to(self.device) for name in dict.fromkeys(names)}

    def _read_again(self, dealt: batches.Microbatches) -> Iterator[torch.Tensor]:
        """What outlives a step and is no parameter: a model's own backward may give such a tensor as a gradient."""
        for program in {microbatch.program for microbatch in dealt.all}:
            yield from chain.from_iterable(rank.constants.held() for rank in self._members[program])
        for microbatch in dealt.all:
            yield from microbatch.tensors.values()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The trainable parameters of this process under the model's names, each once, in the program's order."""
        return self.own.named()

    def parameters(self) -> Iterator[nn.Parameter]:
        """What an optimizer takes. May be empty on a rank whose stages are frozen."""
        return (parameter for _, parameter in self.named_parameters())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As nn.Module.zero_grad."""
        self.own.zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their common 2-norm is at most `max_norm`; returns the norm before, on the CPU.
        The norm is over all ranks, each parameter once. All ranks call it.
        """
        return self.own.clip_grad_norm_(max_norm)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This process' parameters, frozen ones too, detached, under the model's names; of those that data-parallel
        ranks step in shards its own shard.
        """
        return self.own.state_dict()

    def load(self, path: str | Path, format: weights.WeightLayout = weights.OWN) -> None:
        """Read this process' parameters from a safetensors file or a directory of them. All ranks call it."""
        self.own.load(path, format)

    def save(self, directory: str | Path, format: weights.WeightLayout = weights.OWN) -> None:
        """Write the weights as HF does: a shard per pipeline rank, or one file from one process. All ranks call it."""
        self.own.save(directory, format)

    def collect(self, into: Mapping[str, torch.Tensor]) -> None:
        """Copy what was trained (after `load`: all that was read) into these tensors. All ranks call it."""
        self.own.collect(into)

    @property
    def speaks(self) -> bool:
        """Whether this process is the first of its replica; where replicas share ranks, of all."""
        first = self.ranks[0]
        if self.program.manifest.mesh.replicas_share_ranks:
            return first.rank == 0
        return first.position == 0 and first.cp_rank == 0 and first.rank == first.group(Group.TENSOR)[0]


def _members(
    program: LoadedProgram, folder: FunctionFolder | None, device: torch.device, ranks: Sequence[int]
) -> FusedMembers:
    from csc.runtime.fusing import FusedMembers  # which imports what only compiled functions need

    return FusedMembers(folder, device, [program.manifest.mesh.coordinates(rank).pp for rank in ranks])


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _read(rank: Rank) -> list[str]:
    """The inputs that a rank's stages read, and that whose rows its loss is a mean over."""
    names, loss = [name for stage in rank.stages for name in stage.inputs], rank.program.manifest.loss
    counts = loss.rows and any(stage.stage == loss.stage for stage in rank.stages)
    return [*names, loss.rows] if counts and loss.rows not in names else names


def _device(program: LoadedProgram, device: torch.device | str | None) -> torch.device:
    wanted = device if device is not None else program.manifest.device
    return devices.present(torch.device(wanted), program.manifest.name)


def _transport(program: LoadedProgram, device: torch.device, timeout: float, meeting: Meeting | None) -> Transport:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Distributed(program, device, timeout, meeting)
    return InProcess(program)
