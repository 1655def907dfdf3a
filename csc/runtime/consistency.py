"""Consistency: before anything moves, all ranks show that they run the same program.

Terms: a *digest* is the SHA-256 of something that must be the same everywhere. gloo accepts a message of a
wrong dtype in silence and aborts the process on one of a wrong size, so a disagreement must be found first.

Digests travel as uint8 tensors: nothing is unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from csc.errors import InputError, ProgramError
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.runtime.loaded_program import LoadedProgram, own_files


@dataclass(frozen=True)
class Shared:
    """A tensor that is equal over groups of ranks at some positions of the pp axis. what: the word for it in errors."""

    what: str
    name: str
    positions: tuple[int, ...]
    equal: Group = Group.POSITION


OF_POSITION = "files of pipeline positions"


def digests(program: LoadedProgram) -> dict[str, bytes]:
    """What ranks must agree on, by the words that an error uses for it."""
    manifest = program.manifest
    holders = [
        (p.name, p.shape, p.dtype, p.trainable, p.stages, p.weight, p.gradient, p.boxes) for p in manifest.parameters
    ]
    parts = {
        "fingerprints": manifest.fingerprint,
        "shapes, strides and dtypes of messages": repr(sorted(manifest.messages, key=lambda m: m.channel)),
        "mesh, placement, microbatches, inputs and loss": repr(
            (
                manifest.mesh,
                [stage.rank for stage in manifest.stages],
                manifest.microbatches,
                manifest.inputs,
                manifest.loss,
            )
        ),
        "parameters and the stages that use them": repr(holders),
        "schedules": str(program.schedule),
        "files of layers": _files(program, [name for name in sorted(manifest.files) if name.startswith("layers/")]),
    }
    return {part: hashlib.sha256(text.encode()).digest() for part, text in parts.items()}


def of_position(program: LoadedProgram, rank: int) -> bytes:
    """Digest of the file that a rank shares with the others of its position."""
    name = own_files(program.manifest.mesh, rank)[1]
    return hashlib.sha256(_files(program, [name] if name in program.manifest.files else []).encode()).digest()


def _files(program: LoadedProgram, names: Iterable[str]) -> str:
    """What these files hold now: they may have been edited, on every node the same way."""
    return repr([(name, hashlib.sha256((program.directory / name).read_bytes()).hexdigest()) for name in names])


def agree(program: LoadedProgram, device: torch.device) -> None:
    """Compare digests over the default process group. Rank 0's are what the others are held against, and for the file
    of a position those of its first rank.
    """
    mesh, rank = program.manifest.mesh, dist.get_rank()
    mine = digests(program) | {OF_POSITION: of_position(program, rank)}
    digest = torch.frombuffer(bytearray(b"".join(mine.values())), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, digest)
    rows = torch.stack(gathered).cpu().view(len(gathered), len(mine), 32)
    differing: dict[str, tuple[int, list[int]]] = {}
    for i, part in enumerate(mine):
        alike = mesh.groups(Group.POSITION if part == OF_POSITION else Group.WORLD)
        for first, *rest in alike:
            differing_ranks = [rank for rank in rest if not torch.equal(rows[rank, i], rows[first, i])]
            if differing_ranks:
                differing.setdefault(part, (first, differing_ranks))
    if differing:
        first, differing_ranks = next(iter(differing.values()))
        raise ProgramError(
            f"the ranks do not run the same program: {' and '.join(differing)} differ between rank {first} and "
            f"rank{'s' * (len(differing_ranks) > 1)} {', '.join(map(str, differing_ranks))}",
            program.manifest.name,
            "Give every node the same program directory",
        )


def agree_on_values(
    mesh: Mesh, shared: Sequence[Shared], values: Mapping[str, torch.Tensor], rank: int, device: torch.device
) -> None:
    """Compare checksums of tensors that several ranks hold. InputError, on every rank, that names one that differs.
    `values` may lack those that have no values yet.

    Every rank starts from its own copy: without this, an initialization without a seed would go unnoticed, and so
    would a node whose program directory has other constants.
    """
    several = [(value, holders) for value in shared for holders in mesh.groups(value.equal, value.positions)]
    several = [(value, holders) for value, holders in several if len(holders) > 1]
    if not several:
        return
    none = torch.zeros((), dtype=torch.int64)
    sums = [checksum(values[s.name]) if rank in holders and s.name in values else none for s, holders in several]
    row = torch.stack([s.cpu() for s in sums]).to(device)
    gathered = [torch.empty_like(row) for _ in range(mesh.size)]
    dist.all_gather(gathered, row)
    rows = torch.stack(gathered).cpu()
    for i, (item, holders) in enumerate(several):
        held = rows[list(holders), i].tolist()
        differing = sorted(rank for rank, value in zip(holders, held, strict=True) if value != held[0])
        if differing:
            raise InputError(
                f"{item.what} {item.name!r} starts with other values on rank {differing[0]} than on rank {holders[0]}",
                "weights and constants",
                "Give all ranks the same weights and the same program: a file, or the same seed before the model is "
                "built",
            )


CHUNK = 2**20  # elements


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of the bit patterns, modulo 2**64: exact, whatever the order of addition.

    In chunks, since a sum in int64 first makes a copy in int64.
    """
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    chunks = tensor.detach().contiguous().view(words).flatten().split(CHUNK)
    return torch.stack([chunk.sum(dtype=torch.int64) for chunk in chunks]).sum()


SAMPLED = 256  # entries of a tensor: each costs a miss of the cache in every step
_APART = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)  # odd, without a period that sizes have


class Sample:
    """Entries of a tensor as it is now, whatever memory it has. Writes to `tensor.data`, as averages of models and
    loaders make them, are counted by no version. Half of the entries are spread over all dimensions at once, so that
    of as many rows and columns each is met; the others are scattered. Of a larger tensor a few rows may go unseen.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._places: tuple[torch.Tensor, ...] = ()
        if tensor.numel() > SAMPLED:
            number, half = torch.arange(SAMPLED // 2, device=tensor.device), SAMPLED // 2
            self._places = tuple(
                torch.cat([number * max(1, size // half) % size, (number * _APART[dim % 4] >> 8 + dim) % size])
                for dim, size in enumerate(tensor.shape)
            )

    def entries(self) -> torch.Tensor:
        """Their bytes."""
        tensor = self.tensor.detach()
        if tensor.dtype.itemsize == 1:  # float8 has no indexing of its own
            tensor = tensor.view(torch.uint8)
        part = tensor[self._places] if self._places else tensor
        return part.reshape(-1).contiguous().view(torch.uint8)


def read(samples: Iterable[Sample]) -> bytes:
    """Returns the bytes of all samples, one after the other. Tensors on the meta device have none."""
    entries = [sample.entries() for sample in samples if not sample.tensor.is_meta]
    return torch.cat(entries).cpu().numpy().tobytes() if entries else b""
