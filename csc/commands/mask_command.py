"""`csc mask SPEC`: what a mask costs in tiles, which rank computes each, and its picture.

Terms: see csc.masks.gallery for SPEC. A *dispatch* gives blocks of queries to context-parallel ranks.

    mask(spec, block, ranks, dispatch, link, svg_file, png_file, json_output, debug)         the command
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from csc.commands.dispatching import Dispatcher, compared, owners, why
from csc.commands.printing import console, print_json, table
from csc.simulation.page import seconds_text


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
    from csc.kernels.mask import counts
    from csc.masks.gallery import parse

    example = parse(spec)
    pairs = counts(example.mask, block, block)[0]
    owner = None if ranks is None else owners(example.mask, pairs, block, ranks, dispatch, link * 1e9)
    found = _facts(spec, example.mask, pairs, block)
    if ranks is not None and owner is not None:
        found["dispatch"] = dispatch.value
        found |= _shared(pairs, owner, ranks)
        ways = compared(example.mask, pairs, block, ranks, link * 1e9)
        found["ways"] = [way.as_dict() for way in ways]
        found["why"] = why(ways) if ways else ""
    if svg_file is not None or png_file is not None:
        _draw(spec, example, block, owner, ranks, svg_file, png_file)
    if json_output:
        print_json(found)
        return
    _print(found)
    for file in (svg_file, png_file):
        if file is not None:
            console.print(f"wrote {escape(str(file))}", soft_wrap=True, highlight=False)


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
    from csc.masks.picture import picture, plot

    drawn = picture(Path(spec).name, example.mask, block, owner, ranks, example.types[0], example.documents[0])
    if svg_file is not None:
        plot(drawn, svg_file, "svg")
    if png_file is not None:
        plot(drawn, png_file, "png")


def _print(found: dict[str, Any]) -> None:
    tiles = found["tiles"]
    total = max(sum(tiles.values()), 1)
    console.print(
        f"{escape(found['mask'])}: {found['queries']:,} queries, {found['keys']:,} keys, "
        f"{found['visible_pairs']:,} pairs visible ({found['visible_share']:.2%})",
        highlight=False,
    )  # fmt: skip
    parts = ", ".join(f"{name} {number:,} ({number / total:.1%})" for name, number in tiles.items())
    console.print(f"tiles of {found['block']} x {found['block']}: {parts}", highlight=False)
    if "ranks" not in found:
        return
    loads = table("rank", "blocks", "tiles", "visible pairs", "key blocks needed", "of other ranks")
    for row in found["ranks"]:
        loads.add_row(*(f"{value:,}" for value in row.values()))
    console.print(loads)
    remote = found.get("remote_over_all_gather")
    console.print(
        f"{found['dispatch']}: the heaviest rank has {found['tiles_over_mean']:.2f} times the mean of tiles, "
        f"{found['visible_pairs_over_mean']:.2f} times that of pairs"
        + ("" if remote is None else f"; ranks fetch {remote:.1%} of what an all-gather of keys would"),
        highlight=False,
    )  # fmt: skip
    for way in found["ways"]:
        console.print(
            f"{way['way']}: {seconds_text(way['seconds'])} a layer, heaviest rank {way['tiles_over_mean']:.2f}; "
            f"forward: attention {seconds_text(way['attention'])}, keys {seconds_text(way['keys'])}",
            highlight=False,
        )  # fmt: skip
    if found["why"]:
        console.print(found["why"], highlight=False)
