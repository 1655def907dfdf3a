"""Agreement: before anything moves, all ranks show that they run the same program.

Terms: a *digest* is the SHA-256 of something that must be the same everywhere. gloo accepts a message of a
wrong dtype in silence and aborts the process on one of a wrong size, so a disagreement must be found first.

    digests(program) -> {what: 32 bytes}
    agree(program, device)                              ProgramError, on every rank, naming those that differ
    agree_on_weights(manifest, weights, rank, device)   the same for the values of shared parameters

Digests travel as uint8 tensors: nothing is unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist

from csc.errors import InputError, ProgramError
from csc.runtime.program import LoadedProgram
from csc.runtime.specs import Manifest


def digests(program: LoadedProgram) -> dict[str, bytes]:
    """What ranks must agree on, by the words that an error uses for it."""
    manifest = program.manifest
    loss = manifest.loss
    holders = [(p.name, p.shape, p.dtype, p.trainable, p.stages) for p in manifest.parameters]
    parts = {
        "fingerprints": manifest.fingerprint,
        "shapes, strides and dtypes of messages": repr(sorted(manifest.messages, key=lambda m: m.channel)),
        "mesh, placement, microbatches, inputs and loss": repr(
            (
                manifest.mesh,
                [stage.rank for stage in manifest.stages],
                manifest.microbatches,
                manifest.inputs,
                loss.stage,
                loss.weight,
            )
        ),
        "parameters and the stages that use them": repr(holders),
        "schedules": str(program.schedule),
    }
    return {what: hashlib.sha256(text.encode()).digest() for what, text in parts.items()}


def agree(program: LoadedProgram, device: torch.device) -> None:
    """Compare digests over the default process group. Rank 0's are what the others are held against."""
    mine = digests(program)
    own = torch.frombuffer(bytearray(b"".join(mine.values())), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    rows = torch.stack(gathered).cpu().view(len(gathered), len(mine), 32)
    differing = {}
    for i, what in enumerate(mine):
        ranks = [rank for rank in range(len(rows)) if not torch.equal(rows[rank, i], rows[0, i])]
        if ranks:
            differing[what] = ranks
    if differing:
        ranks = next(iter(differing.values()))
        raise ProgramError(
            f"the ranks do not run the same program: {' and '.join(differing)} differ between rank 0 and "
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}",
            program.manifest.name,
            "Give every node the same program directory",
        )


def agree_on_weights(manifest: Manifest, weights: Mapping[str, torch.Tensor], rank: int, device: torch.device) -> None:
    """Compare checksums of the parameters that several ranks hold. InputError, on every rank, that names one
    that differs. `weights` may lack those that have no values yet.

    Every rank starts from its own copy: without this, an initialization without a seed would go unnoticed.
    """
    mesh = manifest.mesh
    shared = [p for p in manifest.parameters if len(p.ranks) * mesh.dp > 1]
    position = mesh.coordinates(rank).pp
    none = torch.zeros((), dtype=torch.int64)
    sums = [_checksum(weights[p.name]) if position in p.ranks and p.name in weights else none for p in shared]
    if not sums:
        return
    own = torch.stack([s.cpu() for s in sums]).to(device)
    gathered = [torch.empty_like(own) for _ in range(mesh.size)]
    dist.all_gather(gathered, own)
    rows = torch.stack(gathered).cpu()
    for i, spec in enumerate(shared):
        holders = [mesh.rank_of(dp=d, pp=r) for r in spec.ranks for d in range(mesh.dp)]
        held = rows[holders, i].tolist()
        differing = sorted(rank for rank, value in zip(holders, held, strict=True) if value != held[0])
        if differing:
            raise InputError(
                f"parameter {spec.name!r} starts with other values on rank {differing[0]} than on rank {holders[0]}",
                manifest.name,
                "Give all ranks the same weights: a file, or the same seed before the model is built",
            )


CHUNK = 2**20  # elements


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the bit patterns, modulo 2**64: exact, whatever the order of addition.

    In chunks, since a sum in int64 first makes a copy in int64.
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    chunks = tensor.detach().contiguous().view(words).flatten().split(CHUNK)
    return torch.stack([chunk.sum(dtype=torch.int64) for chunk in chunks]).sum()
