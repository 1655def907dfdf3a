"""`csc mask SPEC`: what a mask costs in tiles, which rank computes each, and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from csc.commands.printing import console, print_json, table
from csc.errors import InputError
from csc.simulation.page import seconds_text

# --- The ways to give a mask's blocks of queries to ranks, and what each takes: for `csc mask` -----------------------
#
# Terms: a *way* is balanced (csc's planner), contiguous, or zigzag (a rank has one chunk from the front and its mirror
# image from the back). A way's seconds are those of attention forward and backward in one layer of `LAYER`: in each
# direction ranks wait for the heaviest of them, or for the busiest link, whichever takes longer.


class Dispatcher(StrEnum):
    """How blocks are dispatched to ranks."""

    balanced = "balanced"
    contiguous = "contiguous"
    zigzag = "zigzag"


@dataclass(frozen=True)
class TypicalLayer:
    """What is planned for: a layer of a usual size on one GPU of each rank."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    flops: float = 400e12  # a second, in attention


LAYER = TypicalLayer()
UNEVEN = 1.05  # tiles of the heaviest rank over the mean that call for a reason


@dataclass(frozen=True)
class DispatchTimes:
    """seconds: forward and backward. attention, keys: of the forward alone, on the heaviest rank and the busiest link.
    tiles_over_mean: load of the heaviest rank over the mean.
    """

    way: str
    seconds: float
    attention: float
    keys: float
    tiles_over_mean: float


def owners(mask: Any, pairs: Any, block: int, ranks: int, way: Dispatcher, bandwidth: float) -> Any:
    """int64 [nQ]. InputError for fewer blocks than ranks, and for a balanced dispatch of cross-attention."""
    import torch

    blocks = len(pairs)
    if blocks < ranks:
        raise InputError(
            f"{blocks} blocks of {block} queries cannot be shared by {ranks} ranks", "--ranks",
            "Use smaller blocks or fewer ranks",
        )  # fmt: skip
    at = torch.arange(blocks)
    if way is Dispatcher.contiguous:
        return at * ranks // blocks
    if way is Dispatcher.zigzag:
        chunk = at * 2 * ranks // blocks
        return torch.minimum(chunk, 2 * ranks - 1 - chunk)
    from csc.planning.dispatch import plan

    return torch.as_tensor(plan(_workload(mask, pairs, block, ranks, bandwidth)).ranks_of_blocks)


def compared(mask: Any, pairs: Any, block: int, ranks: int, bandwidth: float) -> list[DispatchTimes]:
    """All ways, fastest first; none for cross-attention, whose keys no dispatch of queries places."""
    from csc.planning.dispatch import evaluate

    if mask.queries != mask.keys:
        return []
    workload = _workload(mask, pairs, block, ranks, bandwidth)
    times = []
    for dispatcher in Dispatcher:
        report = evaluate(workload, owners(mask, pairs, block, ranks, dispatcher, bandwidth).numpy())
        (measured,) = report.measured
        rates = workload.rates
        attention, keys = measured.load * rates.tile_seconds, measured.volume * rates.block_seconds
        times.append(DispatchTimes(dispatcher.value, report.seconds, attention, keys, report.imbalance))
    return sorted(times, key=lambda row: row.seconds)


def why(ways: Sequence[DispatchTimes]) -> str:
    """What the fastest way has more even tiles for, or why there are none; empty where its tiles are even."""
    best = ways[0]
    even = min(ways, key=lambda row: row.tiles_over_mean)
    if best.tiles_over_mean < UNEVEN:
        return ""
    heaviest = f"the heaviest rank of {best.way} has {best.tiles_over_mean:.2f} times the mean of tiles"
    if best.keys > best.attention:
        return (
            f"{heaviest}, yet what limits the step is the link: sending keys takes {seconds_text(best.keys)}, "
            f"attention on that rank {seconds_text(best.attention)}. Even tiles would send more keys; they pay "
            "on a faster link (--link)"
        )
    if even.way != best.way:
        return (
            f"{heaviest}; {even.way} has {even.tiles_over_mean:.2f}, but takes "
            f"{even.seconds / best.seconds:.2f} times as long for the keys that it sends"
        )
    return f"{heaviest}; no way has less: every rank has as many blocks, and some blocks see more"


def _workload(mask: Any, pairs: Any, block: int, ranks: int, bandwidth: float) -> Any:
    import numpy as np
    import torch

    from csc.planning.dispatch import EMPTY, FULL, PARTIAL, LayerMask, Rates, Workload

    if mask.queries != mask.keys:
        raise InputError("the queries are not the keys", "--dispatch balanced", "Use contiguous or zigzag")
    heights = (mask.queries - torch.arange(len(pairs)) * block).clamp(max=block)
    full = (pairs == heights[:, None] * heights).numpy()
    tiles = np.where(full, FULL, np.where((pairs > 0).numpy(), PARTIAL, EMPTY)).astype(np.int8)
    rates = Rates(
        tile_seconds=4 * block * block * LAYER.head_dim * LAYER.heads / LAYER.flops,
        block_seconds=2 * 2 * block * LAYER.kv_heads * LAYER.head_dim / bandwidth,
    )
    return Workload((LayerMask(tiles),), mask.queries, block, ranks, rates)


# --- `csc mask SPEC`: what a mask costs in tiles, which rank computes each, and its picture --------------------------
#
# Terms: see csc.masks.gallery for SPEC. A *dispatch* gives blocks of queries to context-parallel ranks.


def mask(
    spec: Annotated[str, typer.Argument(help="NAME:TOKENS,key=value, for example causal:4096, or a .json file")],
    block: Annotated[int, typer.Option("--block", min=1, help="tokens of a tile's side")] = 128,
    ranks: Annotated[int | None, typer.Option("--ranks", min=1, help="context-parallel ranks that share it")] = None,
    dispatch: Annotated[Dispatcher, typer.Option("--dispatch", help="how ranks share it")] = Dispatcher.balanced,
    link: Annotated[float, typer.Option("--link", min=1e-3, help="GB/s between ranks, for balanced")] = 50.0,
    svg_file: Annotated[Path | None, typer.Option("--svg", help="write a picture (needs matplotlib)")] = None,
    png_file: Annotated[Path | None, typer.Option("--png", help="the same as PNG")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="show the traceback of an error")] = False,
) -> None:
    """Show an attention mask: visible pairs and tiles, the tiles of each rank, and a picture."""
    from csc.kernels.mask import counts
    from csc.masks.gallery import parse

    example = parse(spec)
    pairs = counts(example.mask, block, block)[0]
    owner = None if ranks is None else owners(example.mask, pairs, block, ranks, dispatch, link * 1e9)
    facts = _facts(spec, example.mask, pairs, block)
    if ranks is not None and owner is not None:
        facts["dispatch"] = dispatch.value
        facts |= _shared(pairs, owner, ranks)
        rows = compared(example.mask, pairs, block, ranks, link * 1e9)
        facts["ways"] = [vars(row) for row in rows]
        facts["why"] = why(rows) if rows else ""
    if svg_file is not None or png_file is not None:
        _draw(spec, example, block, owner, ranks, svg_file, png_file)
    if json_output:
        print_json(facts)
        return
    _print(facts)
    for file in (svg_file, png_file):
        if file is not None:
            console.print(f"wrote {escape(str(file))}", soft_wrap=True, highlight=False)


def _facts(spec: str, mask: Any, pairs: Any, block: int) -> dict[str, Any]:
    import torch

    heights = (mask.queries - torch.arange(pairs.shape[0]) * block).clamp(max=block)
    widths = (mask.keys - torch.arange(pairs.shape[1]) * block).clamp(max=block)
    full, nonempty = int((pairs == heights[:, None] * widths).sum()), int((pairs > 0).sum())
    visible = int(pairs.sum())
    return {
        "mask": spec,
        "queries": mask.queries,
        "keys": mask.keys,
        "visible_pairs": visible,
        "visible_share": visible / (mask.queries * mask.keys),
        "rules": mask.rules,
        "kinds": mask.kinds is not None,
        "block": block,
        "tiles": {"full": full, "partial": nonempty - full, "empty": pairs.numel() - nonempty},
    }


def _shared(pairs: Any, owner: Any, ranks: int) -> dict[str, Any]:
    """Blocks, tiles, pairs and keys of each rank. Remote: blocks of keys that it needs and other ranks own."""
    import torch

    from csc.masks import needed_blocks

    needed = needed_blocks(pairs[None], owner, ranks)[0]
    rows = []
    for rank in range(ranks):
        mine = owner == rank
        remote = needed[rank] & ~mine if len(mine) == needed.shape[1] else torch.zeros(0)
        rows.append(
            {
                "rank": rank,
                "blocks": int(mine.sum()),
                "tiles": int((pairs[mine] > 0).sum()),
                "visible_pairs": int(pairs[mine].sum()),
                "needed_key_blocks": int(needed[rank].sum()),
                "remote_key_blocks": int(remote.sum()),
            }
        )
    facts: dict[str, Any] = {"ranks": rows}
    for name in ("tiles", "visible_pairs"):
        loads = [row[name] for row in rows]
        facts[f"{name}_over_mean"] = max(loads) * ranks / max(sum(loads), 1)
    if len(owner) == pairs.shape[1] and ranks > 1:
        facts["remote_over_all_gather"] = sum(r["remote_key_blocks"] for r in rows) / (pairs.shape[1] * (ranks - 1))
    return facts


def _draw(
    spec: str, example: Any, block: int, owner: Any, ranks: int | None, svg_file: Path | None, png_file: Path | None
) -> None:
    from csc.masks.picture import picture, plot

    drawn = picture(Path(spec).name, example.mask, block, owner, ranks, example.types[0], example.documents[0])
    if svg_file is not None:
        plot(drawn, svg_file, "svg")
    if png_file is not None:
        plot(drawn, png_file, "png")


def _print(facts: dict[str, Any]) -> None:
    tiles = facts["tiles"]
    total = max(sum(tiles.values()), 1)
    console.print(
        f"{escape(facts['mask'])}: {facts['queries']:,} queries, {facts['keys']:,} keys, "
        f"{facts['visible_pairs']:,} pairs visible ({facts['visible_share']:.2%})",
        highlight=False,
    )  # fmt: skip
    parts = ", ".join(f"{name} {number:,} ({number / total:.1%})" for name, number in tiles.items())
    console.print(f"tiles of {facts['block']} x {facts['block']}: {parts}", highlight=False)
    if "ranks" not in facts:
        return
    loads = table("rank", "blocks", "tiles", "visible pairs", "key blocks needed", "of other ranks")
    for row in facts["ranks"]:
        loads.add_row(*(f"{value:,}" for value in row.values()))
    console.print(loads)
    remote = facts.get("remote_over_all_gather")
    console.print(
        f"{facts['dispatch']}: the heaviest rank has {facts['tiles_over_mean']:.2f} times the mean of tiles, "
        f"{facts['visible_pairs_over_mean']:.2f} times that of pairs"
        + ("" if remote is None else f"; ranks fetch {remote:.1%} of what an all-gather of keys would"),
        highlight=False,
    )  # fmt: skip
    for row in facts["ways"]:
        console.print(
            f"{row['way']}: {seconds_text(row['seconds'])} a layer, heaviest rank {row['tiles_over_mean']:.2f}; "
            f"forward: attention {seconds_text(row['attention'])}, keys {seconds_text(row['keys'])}",
            highlight=False,
        )  # fmt: skip
    if facts["why"]:
        console.print(facts["why"], highlight=False)
