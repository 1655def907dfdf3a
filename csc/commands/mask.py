"""`csc mask SPEC`: what a mask costs in tiles, which rank computes each, and its picture.

Terms: see csc.masks.spec for SPEC. A *dispatch* gives blocks of queries to context-parallel ranks.

    mask(spec, block, ranks, dispatch, link, svg_file, png_file, json_output, debug)         the command
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Dispatcher(StrEnum):
    """How blocks are dispatched to ranks."""

    balanced = "balanced"
    contiguous = "contiguous"
    zigzag = "zigzag"


@dataclass(frozen=True)
class _Model:
    """What the balanced dispatch plans for: a layer of a usual size on one GPU of each rank."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    flops: float = 400e12  # a second, in attention


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
    """What an attention mask hides: visible pairs and tiles, the tiles of each rank, and a picture."""
    from csc.kernels.tiles import counts
    from csc.masks.spec import parse

    example = parse(spec)
    pairs = counts(example.mask, block, block)[0]
    owner = None if ranks is None else _owners(example.mask, pairs, block, ranks, dispatch, link * 1e9)
    found = _facts(spec, example.mask, pairs, block)
    if ranks is not None and owner is not None:
        found["dispatch"] = dispatch.value
        found |= _shared(pairs, owner, ranks)
    if svg_file is not None or png_file is not None:
        _draw(spec, example, block, owner, ranks, svg_file, png_file)
    if json_output:
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
        return
    _print(found)
    for file in (svg_file, png_file):
        if file is not None:
            _console().print(f"wrote {escape(str(file))}", soft_wrap=True, highlight=False)


def _owners(mask: Any, pairs: Any, block: int, ranks: int, way: Dispatcher, bandwidth: float) -> Any:
    """int64 [nQ]: the rank of every block of queries."""
    import torch

    from csc.errors import InputError

    blocks = len(pairs)
    if blocks < ranks:
        raise InputError(
            f"{blocks} blocks of {block} queries cannot be shared by {ranks} ranks", "--ranks",
            "Use smaller blocks or fewer ranks",
        )  # fmt: skip
    at = torch.arange(blocks)
    if way is Dispatcher.contiguous:
        return at * ranks // blocks
    if way is Dispatcher.zigzag:  # 2 ranks chunks; a rank has one from the front and its mirror image from the back
        chunk = at * 2 * ranks // blocks
        return torch.minimum(chunk, 2 * ranks - 1 - chunk)
    return _balanced(mask, pairs, block, ranks, bandwidth)


def _balanced(mask: Any, pairs: Any, block: int, ranks: int, bandwidth: float) -> Any:
    """The plan of csc.planning.dispatch. InputError for cross-attention, whose keys no dispatch of queries places."""
    import numpy as np
    import torch

    from csc.errors import InputError
    from csc.planning.dispatch import EMPTY, FULL, PARTIAL, LayerMask, Rates, Workload, plan

    if mask.queries != mask.keys:
        raise InputError("the queries are not the keys", "--dispatch balanced", "Use contiguous or zigzag")
    model = _Model()
    heights = (mask.queries - torch.arange(len(pairs)) * block).clamp(max=block)
    full = (pairs == heights[:, None] * heights).numpy()
    tiles = np.where(full, FULL, np.where((pairs > 0).numpy(), PARTIAL, EMPTY)).astype(np.int8)
    rates = Rates(
        tile_seconds=4 * block * block * model.head_dim * model.heads / model.flops,
        block_seconds=2 * 2 * block * model.kv_heads * model.head_dim / bandwidth,
    )
    found = plan(Workload((LayerMask(tiles),), mask.queries, block, ranks, rates))
    return torch.as_tensor(found.ranks_of_blocks)


def _facts(spec: str, mask: Any, pairs: Any, block: int) -> dict[str, Any]:
    import torch

    heights = (mask.queries - torch.arange(pairs.shape[0]) * block).clamp(max=block)
    widths = (mask.keys - torch.arange(pairs.shape[1]) * block).clamp(max=block)
    full, there = int((pairs == heights[:, None] * widths).sum()), int((pairs > 0).sum())
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
        "tiles": {"full": full, "partial": there - full, "empty": pairs.numel() - there},
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
    found: dict[str, Any] = {"ranks": rows}
    for name in ("tiles", "visible_pairs"):
        loads = [row[name] for row in rows]
        found[f"{name}_over_mean"] = max(loads) * ranks / max(sum(loads), 1)
    if len(owner) == pairs.shape[1] and ranks > 1:
        found["remote_over_all_gather"] = sum(r["remote_key_blocks"] for r in rows) / (pairs.shape[1] * (ranks - 1))
    return found


def _draw(
    spec: str, example: Any, block: int, owner: Any, ranks: int | None, svg_file: Path | None, png_file: Path | None
) -> None:
    from csc.masks.picture import picture
    from csc.masks.plot import plot

    drawn = picture(Path(spec).name, example.mask, block, owner, ranks, example.types[0], example.documents[0])
    if svg_file is not None:
        plot(drawn, svg_file, "svg")
    if png_file is not None:
        plot(drawn, png_file, "png")


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160)


def _print(found: dict[str, Any]) -> None:
    console, tiles = _console(), found["tiles"]
    total = max(sum(tiles.values()), 1)
    console.print(
        f"{escape(found['mask'])}: {found['queries']:,} queries, {found['keys']:,} keys, "
        f"{found['visible_pairs']:,} pairs visible ({found['visible_share']:.2%})",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    parts = ", ".join(f"{name} {number:,} ({number / total:.1%})" for name, number in tiles.items())
    console.print(f"tiles of {found['block']} x {found['block']}: {parts}", highlight=False, soft_wrap=True)
    if "ranks" not in found:
        return
    table = Table("rank", "blocks", "tiles", "visible pairs", "key blocks needed", "of other ranks")
    for row in found["ranks"]:
        table.add_row(*(f"{value:,}" for value in row.values()))
    console.print(table)
    remote = found.get("remote_over_all_gather")
    console.print(
        f"{found['dispatch']}: heaviest rank over the mean {found['tiles_over_mean']:.3f} in tiles, "
        f"{found['visible_pairs_over_mean']:.3f} in pairs"
        + ("" if remote is None else f"; remote keys {remote:.1%} of an all-gather"),
        highlight=False, soft_wrap=True,
    )  # fmt: skip
