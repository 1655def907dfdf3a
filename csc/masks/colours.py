"""Colours and words of mask pictures.

Terms: a *type* is what a token is (csc.masks.gallery): -1 padding, 0 text, 1 image, 2 audio, 3 noised, others.

    rank_colour(rank, ranks) -> "#rrggbb"          type_colour(type), type_name(type)
    headline(picture) -> str                       the line under the title

Ranks: the eight hues that Okabe and Ito (2008) chose to be told apart with any kind of colour vision, brightened where
they are dark, then hues evenly around the circle. Types are dark or grey, which no rank is.
"""

from __future__ import annotations

import colorsys

from csc.masks.picture import Picture

ONE = "#2f6db5"  # without ranks
ANY = "#6b7580"  # of no rank, in a legend
RANKS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7fb8", "#b8a800")
HIDDEN = 0.30  # opacity of what is computed and hidden
TYPE_COLOURS = {-1: "#ffffff", 0: "#c3cbd4", 1: "#3a4a63", 2: "#94705f", 3: "#b3265e"}
TYPE_NAMES = {-1: "padding", 0: "text", 1: "image", 2: "audio", 3: "noised image"}
OTHERS = ("#2f8f83", "#6b7a1f", "#7c5cbf", "#a3602a")


def rank_colour(rank: int, ranks: int) -> str:
    """The colour of a rank's tiles; `ranks` 0 or 1: there is one colour."""
    if ranks <= 1:
        return ONE
    if ranks <= len(RANKS):
        return RANKS[rank]
    shade = (0.42, 0.58)[rank % 2]  # neighbours differ in brightness too
    red, green, blue = colorsys.hls_to_rgb(rank / ranks, shade, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def type_colour(kind: int) -> str:
    return TYPE_COLOURS.get(kind) or OTHERS[kind % len(OTHERS)]


def type_name(kind: int) -> str:
    return TYPE_NAMES.get(kind, f"type {kind}")


def headline(picture: Picture) -> str:
    """Size, visible share and tiles in one line."""
    size = f"{picture.queries:,} tokens"
    if picture.queries != picture.keys:
        size = f"{picture.queries:,} queries, {picture.keys:,} keys"
    return f"{size}; {picture.share:.1%} of all pairs visible; tiles of {picture.block} x {picture.block}"
