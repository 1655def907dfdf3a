"""Attention masks as data: for every query a few ranges of keys, the kinds of keys it admits there, and its tiles."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import chain, combinations
from typing import Any

import numpy as np
import torch

from csc.errors import InputError

# --- Attention masks as data: for every query a few ranges of keys, and the kinds of keys it admits there ------------
#
# Terms
#   rule     query q sees key k if lo <= k < hi and some kind of k is admitted; a query has R rules and sees their union
#   kinds    a bitset per key: what the key is (text, image, ...); 0 is padding, which nobody sees
#   admits   a bitset per query and rule: the kinds of keys that it lets through
#
# All heads share a mask; B is the batch, or 1 for a mask that holds for the whole batch. 63 kinds can be told apart.


EVERYTHING = (1 << 63) - 1  # admits every kind; a key of kind 0 stays unseen
MOST_RULES = 8  # counting tiles looks at every subset of rules


@dataclass(frozen=True)
class Mask:
    """Which keys each query sees, as ranges and kinds. csc.masks makes masks.

    Rule r lets query q see the keys lo to hi - 1 of `ranges[b, r, q]`, of the kinds that `admits[b, r, q]` has as bits.
    A query sees what any of its rules lets through.

    Attributes:
        ranges: int32 [B, R, Tq, 2]: lo and hi, slots of K and V, with hi <= keys. A rule with lo >= hi lets nothing
            through.
        keys: Tk, the number of keys.
        admits: int64 [B, R, Tq], the kinds of keys that the rule admits, as bits; None, with `kinds`: ranges alone
            decide.
        kinds: int64 [B, Tk], the kinds of each key as bits; 0 is padding.

    Raises:
        ValueError: Shapes or dtypes do not fit together.
    """

    ranges: torch.Tensor
    admits: torch.Tensor | None
    kinds: torch.Tensor | None
    keys: int
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # what kernels have made of it

    def __post_init__(self) -> None:
        """ValueError for tensors that do not fit together (shapes and dtypes only; values are not looked at)."""
        if self.ranges.dim() != 4 or self.ranges.shape[-1] != 2 or self.ranges.dtype != torch.int32:
            raise ValueError(f"ranges is {self.ranges.dtype} {list(self.ranges.shape)}, not int32 [B, R, Tq, 2]")
        if not 1 <= self.rules <= MOST_RULES:
            raise ValueError(f"a mask has 1 to {MOST_RULES} rules a query, this one {self.rules}")
        if (self.admits is None) != (self.kinds is None):
            raise ValueError("admits and kinds come together or not at all")
        if self.admits is not None and self.kinds is not None:
            if self.admits.shape != self.ranges.shape[:-1] or self.admits.dtype != torch.int64:
                raise ValueError(f"admits is {self.admits.dtype} {list(self.admits.shape)}, not int64 [B, R, Tq]")
            if tuple(self.kinds.shape) != (self.batch, self.keys) or self.kinds.dtype != torch.int64:
                raise ValueError(f"kinds is {self.kinds.dtype} {list(self.kinds.shape)}, not int64 [B, Tk]")

    def copied(self) -> Mask:
        """With values of its own, and what kernels have made of it."""
        admits = None if self.admits is None else self.admits.clone()
        kinds = None if self.kinds is None else self.kinds.clone()
        return Mask(self.ranges.clone(), admits, kinds, self.keys, dict(self.known))

    @property
    def batch(self) -> int:
        return self.ranges.shape[0]

    @property
    def rules(self) -> int:
        return self.ranges.shape[1]

    @property
    def queries(self) -> int:
        return self.ranges.shape[2]

    def dense(self) -> torch.Tensor:
        """bool [B, Tq, Tk]: the mask written out, Tq x Tk of it."""
        slot = torch.arange(self.keys, device=self.ranges.device)
        seen = (self.ranges[..., :1] <= slot) & (slot < self.ranges[..., 1:])
        if self.admits is not None and self.kinds is not None:
            seen &= (self.admits[..., None] & self.kinds[:, None, None, :]) != 0
        return seen.any(1) if self.rules > 1 else seen[:, 0]

    def hidden(self) -> torch.Tensor:
        """bool [B, Tq]: queries that see no key. Counts keys of each kind, so nothing of size Tq x Tk is made."""
        low, high = self.ranges.long().clamp(0, self.keys).unbind(-1)
        if self.kinds is None or self.admits is None:
            return (low >= high).all(1)
        seen = torch.zeros_like(low, dtype=torch.bool)
        for bit in range(int(self.kinds.max()).bit_length()):
            before = torch.nn.functional.pad((self.kinds >> bit & 1).cumsum(-1), (1, 0))[:, None].expand(
                -1, self.rules, -1
            )
            seen |= (before.gather(2, high) > before.gather(2, low)) & (self.admits >> bit & 1).bool()
        return ~seen.any(1)

    def union(self, other: Mask) -> Mask:
        """What either lets through. Kinds must mean the same in both. ValueError if the sizes differ."""
        if (self.queries, self.keys) != (other.queries, other.keys):
            raise ValueError(f"masks of {self.queries} x {self.keys} and {other.queries} x {other.keys} have no union")
        batch = max(self.batch, other.batch)
        ranges = torch.cat([mask.ranges.expand(batch, -1, -1, -1) for mask in (self, other)], dim=1)
        if self.kinds is None and other.kinds is None:
            return Mask(ranges, None, None, self.keys)
        kinds = [mask.kinds for mask in (self, other) if mask.kinds is not None]
        if len(kinds) == 2 and not torch.equal(*torch.broadcast_tensors(*kinds)):
            raise ValueError("the kinds of keys differ between the two masks")
        admits = torch.cat([mask.all_admits().expand(batch, -1, -1) for mask in (self, other)], dim=1)
        if any(mask.kinds is None for mask in (self, other)) and bool((kinds[0] == 0).any()):
            raise ValueError("a mask without kinds sees keys that are padding in the other one")
        return Mask(ranges, admits, kinds[0].expand(batch, -1).contiguous(), self.keys)

    def all_admits(self) -> torch.Tensor:
        """int64 [B, R, Tq], written out where the mask has none."""
        if self.admits is not None:
            return self.admits
        return torch.full(self.ranges.shape[:-1], EVERYTHING, dtype=torch.int64, device=self.ranges.device)

    def all_kinds(self) -> torch.Tensor:
        """int64 [B, Tk], written out where the mask has none."""
        if self.kinds is not None:
            return self.kinds
        return torch.ones(self.batch, self.keys, dtype=torch.int64, device=self.ranges.device)

    def to(self, device: torch.device | str) -> Mask:
        """The mask on a device."""
        admits = None if self.admits is None else self.admits.to(device)
        kinds = None if self.kinds is None else self.kinds.to(device)
        return Mask(self.ranges.to(device), admits, kinds, self.keys)


# --- Exact facts of a mask in tiles: visible pairs, and which tiles a kernel has to visit ----------------------------
#
# Terms
#   tile     block_q queries x block_k keys; the last ones may be short
#   full     a tile of block_k whole keys that all of its queries see: no mask inside; partial: some pairs are visible
#   lists    for every query tile the key tiles to visit, the full ones first, each part ascending; and the transpose
#
# Nothing here is Tq x Tk: a rule of a query is a range of keys, so it adds to two tiles at its ends and to a run of
# tiles between them (a difference array). Rules overlap, so their union is counted by inclusion and exclusion. Work is
# O(R Tq + predicates nQ nK), on the device of the mask, exact, in integers. That takes a hundred calls, so a short
# mask on a CPU is written out instead, and few tiles are listed one by one.


SHORT = 2**16  # pairs of a mask on a CPU that takes less time written out
FEW = 32  # tiles on a CPU that take less time one by one
SEEN = "seen"  # in what kernels know of a mask: bool [B, Tq, Tk]


@dataclass(frozen=True)
class TileLists:
    """For every tile of one side the tiles of the other side to visit.

    index: int32 [B, n, m], the first `counts[..., 1]` of a row are set, of them the first `counts[..., 0]` full.
    counts: int32 [B, n, 2].
    """

    index: torch.Tensor
    counts: torch.Tensor

    @cached_property
    def order(self) -> torch.Tensor:
        """int64 [B, n]: rows in order of their work. Programs that start in it end with the short ones."""
        return self.counts[..., 1].argsort(dim=-1, descending=True, stable=True)


@dataclass(frozen=True)
class Tiles:
    """Both directions: `of_queries` for forward and dQ, `of_keys` for dK and dV."""

    block_q: int
    block_k: int
    of_queries: TileLists
    of_keys: TileLists


@dataclass(frozen=True)
class _Term:
    """Some rules at once: ranges cut, every predicate fulfilled. Its pairs are counted with `sign`.

    lo, hi: int64 [B, Tq]. seen_before: int32 [B, Tk + 1], fulfilling keys before a slot. Empty ranges have lo == hi.
    """

    sign: int
    lo: torch.Tensor
    hi: torch.Tensor
    seen_before: torch.Tensor


def _terms(mask: Mask) -> Iterator[_Term]:
    lo, hi = (mask.ranges[..., i].clamp(0, mask.keys).long().unbind(1) for i in (0, 1))
    kinds, admits = mask.kinds, mask.admits
    for size in range(1, mask.rules + 1):
        for rules in map(list, combinations(range(mask.rules), size)):
            first = reduce(torch.maximum, [lo[rule] for rule in rules])  # amax over so few is many times slower
            last = reduce(torch.minimum, [hi[rule] for rule in rules])
            nonempty = first < last
            if not bool(nonempty.any()):
                continue
            sign = 1 if size % 2 else -1
            if kinds is None or admits is None:
                before = torch.arange(mask.keys + 1, dtype=torch.int32, device=mask.ranges.device).expand(
                    mask.batch, -1
                )
                yield _Term(sign, first, torch.maximum(first, last), before)
                continue
            chosen = admits[:, rules]
            for value in _distinct(chosen.transpose(1, 2)[nonempty]):
                applies = reduce(torch.logical_and, [chosen[:, i] == kind for i, kind in enumerate(value)], nonempty)
                fits = reduce(torch.logical_and, [(kinds & value) != 0 for value in value])
                before = torch.nn.functional.pad(fits.cumsum(-1, dtype=torch.int32), (1, 0))
                yield _Term(sign, first, torch.where(applies, last, first), before)


def _distinct(rows: torch.Tensor) -> torch.Tensor:
    """The different rows of an int64 [n, m]. Neighbours are mostly equal, so few are left to sort."""
    differs = reduce(torch.logical_or, [column[1:] != column[:-1] for column in rows.unbind(1)])
    return rows[torch.cat([rows.new_ones(1, dtype=torch.bool), differs])].unique(dim=0)


def visible(mask: Mask) -> torch.Tensor:
    """int64 [B, Tq]: how many keys each query sees."""
    total = torch.zeros(mask.batch, mask.queries, dtype=torch.int64, device=mask.ranges.device)
    for term in _terms(mask):
        total += term.sign * (term.seen_before.gather(1, term.hi) - term.seen_before.gather(1, term.lo))
    return total


def counts(mask: Mask, block_q: int, block_k: int) -> torch.Tensor:
    """int32 [B, nQ, nK]: visible pairs of every tile."""
    device, batch = mask.ranges.device, mask.batch
    rows, columns = -(-mask.queries // block_q), -(-mask.keys // block_k)
    seen = written_out(mask).known.get(SEEN)
    if seen is not None:
        return _counted(seen, rows, columns, block_q, block_k)
    total = torch.zeros(batch, rows * columns, dtype=torch.int32, device=device)
    steps = torch.zeros(batch, rows * (columns + 1), dtype=torch.int32, device=device)
    row = torch.arange(mask.queries, device=device) // block_q
    edges = (torch.arange(columns + 1, device=device) * block_k).clamp(max=mask.keys)
    for term in _terms(mask):
        nonempty = term.lo < term.hi
        first = (term.lo // block_k).clamp(max=columns - 1)
        last = torch.where(nonempty, (term.hi - 1) // block_k, first)
        at_hi, at_lo = term.seen_before.gather(1, term.hi), term.seen_before.gather(1, term.lo)
        alone = first == last
        head = torch.where(alone, at_hi, term.seen_before.gather(1, edges[first + 1])) - at_lo
        tail = torch.where(alone, 0, at_hi - term.seen_before.gather(1, edges[last]))
        total.scatter_add_(1, row * columns + first, term.sign * head)
        total.scatter_add_(1, row * columns + last, term.sign * tail)
        # Runs of whole tiles: +1 where they begin, -1 behind them, on a row that is one longer.
        inside = (nonempty & ~alone).int() * term.sign
        steps.zero_()
        steps.scatter_add_(1, row * (columns + 1) + first + 1, inside)
        steps.scatter_add_(1, row * (columns + 1) + last, -inside)
        runs = steps.view(batch, rows, columns + 1).cumsum(-1, dtype=torch.int32)[..., :-1]
        whole_rows = term.seen_before[:, edges[1:]] - term.seen_before[:, edges[:-1]]
        total.view(batch, rows, columns).addcmul_(runs, whole_rows[:, None, :])
    return total.view(batch, rows, columns)


def written_out(mask: Mask) -> Mask:
    """Returns a mask that knows its visible pairs as `dense`, under SEEN, if it is short and on a CPU; any other mask
    as it is. A mask whose tensors are written to afterwards must not be asked again.
    """
    if mask.ranges.device.type != "cpu" or mask.batch * mask.queries * mask.keys > SHORT:
        return mask
    if SEEN in mask.known:
        return mask
    slot = np.arange(mask.keys, dtype=np.int32)  # numpy takes half of torch's time for so few
    ranges = mask.ranges.numpy()
    seen = ranges[..., :1] <= slot
    seen &= slot < ranges[..., 1:]
    if mask.admits is not None and mask.kinds is not None:
        seen &= (mask.admits.numpy()[..., None] & mask.kinds.numpy()[:, None, None, :]) != 0
    union = seen[:, 0] if mask.rules == 1 else seen.any(1)
    return Mask(mask.ranges, mask.admits, mask.kinds, mask.keys, {**mask.known, SEEN: torch.from_numpy(union)})


def _counted(seen: torch.Tensor, rows: int, columns: int, block_q: int, block_k: int) -> torch.Tensor:
    batch = seen.shape[0]
    if batch * rows * columns <= FEW:  # of so few numpy makes less ado
        known = seen.numpy()
        pair_counts = [
            [
                [
                    np.count_nonzero(sample[i * block_q : (i + 1) * block_q, j * block_k : (j + 1) * block_k])
                    for j in range(columns)
                ]
                for i in range(rows)
            ]
            for sample in known
        ]
        return torch.tensor(pair_counts, dtype=torch.int32).view(batch, rows, columns)
    rest = (0, columns * block_k - seen.shape[2], 0, rows * block_q - seen.shape[1])
    padded = torch.nn.functional.pad(seen, rest).view(batch, rows, block_q, columns, block_k)
    return padded.sum((2, 4), dtype=torch.int32)


def tiles(mask: Mask, block_q: int, block_k: int) -> Tiles:
    """The lists that the kernels walk through."""
    pairs = counts(mask, block_q, block_k)
    device, columns = pairs.device, pairs.shape[-1]
    if device.type == "cpu" and pairs.numel() <= FEW:
        return _few_tiles(mask, pairs, block_q, block_k)
    starts = torch.arange(pairs.shape[1], device=device) * block_q
    heights = (mask.queries - starts).clamp(max=block_q).to(torch.int32)
    full = pairs == heights[:, None] * block_k
    partial = (pairs > 0) & ~full
    assert columns == -(-mask.keys // block_k)
    return Tiles(block_q, block_k, _lists(full, partial), _lists(full.mT.contiguous(), partial.mT.contiguous()))


def _lists(full: torch.Tensor, partial: torch.Tensor) -> TileLists:
    """From bool [B, n, m] each. Work is one look at every tile, then as many steps as there are tiles to visit."""
    batch, rows, columns = full.shape
    device = full.device
    wholes, rest = full.sum(-1).flatten(), partial.sum(-1).flatten()
    begin = torch.arange(batch * rows, device=device) * columns
    index = torch.zeros(batch * rows * columns, dtype=torch.int32, device=device)
    for chosen, number, place in ((full, wholes, begin), (partial, rest, begin + wholes)):
        row, column = chosen.view(-1, columns).nonzero(as_tuple=True)  # row by row, ascending
        shift = place - (number.cumsum(0) - number)  # from the place among all to the place in the row
        index.scatter_(0, shift.index_select(0, row).add_(torch.arange(len(row), device=device)), column.int())
    total = torch.stack([wholes, wholes + rest], -1)
    return TileLists(index.view(batch, rows, columns), total.view(batch, rows, 2).int())


def _few_tiles(mask: Mask, pairs: torch.Tensor, block_q: int, block_k: int) -> Tiles:
    """As `tiles`, in Python."""
    batch, rows, columns = pairs.shape
    full = [min(block_q, mask.queries - row * block_q) * block_k for row in range(rows)]
    # Of each tile 2 if it is full, 1 if some of its pairs are visible.
    kinds = [[[(n > 0) + (n == most) for n in row] for row, most in zip(sample, full)] for sample in pairs.tolist()]
    of_queries = [row for sample in kinds for row in sample]
    of_keys = [[row[column] for row in sample] for sample in kinds for column in range(columns)]
    sides = (*_few_lists(of_queries), *_few_lists(of_keys))
    shapes = ((batch, rows, columns), (batch, rows, 2), (batch, columns, rows), (batch, columns, 2))
    flat = torch.tensor(list(chain(*sides)), dtype=torch.int32)  # one tensor: each takes a while to make
    parts = flat.split(list(map(len, sides)))
    q_index, q_counts, k_index, k_counts = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
    return Tiles(block_q, block_k, TileLists(q_index, q_counts), TileLists(k_index, k_counts))


def _few_lists(kinds: list[list[int]]) -> tuple[list[int], list[int]]:
    """What is listed, and how many, of the rows of a side. kinds: of each tile of a row."""
    index, counts = [], []
    for row in kinds:
        full, visited = [i for i, kind in enumerate(row) if kind == 2], [i for i, kind in enumerate(row) if kind == 1]
        index += [*full, *visited, *(0 for _ in range(len(row) - len(full) - len(visited)))]
        counts += [len(full), len(full) + len(visited)]
    return index, counts


# --- Groups of tokens (documents, images) as ranges of keys ----------------------------------------------------------
#
# They are what `group[q] == group[k]` means if groups are contiguous.
#
# With numpy, on the host, where the numbers are in almost every model: a step asks it of hundreds of tokens, which two
# dozen small calls of torch take ten times as long for.


def ranges(
    queries: torch.Tensor, keys: torch.Tensor, counting_queries: torch.Tensor, counting_keys: torch.Tensor
) -> torch.Tensor:
    """(first, last + 1) slot of the keys of each query's group; (0, 0) for a query that does not count or has no keys.

    queries: [B, Tq], keys: [B, Tk]: group numbers of any integer type. counting_*: bool of the same shapes; keys that
    do not count may lie anywhere (the mask hides them in another way). InputError if the keys that count of some group
    do not stand together, since then no range says who sees whom.
    """
    sides = (side.detach().cpu().numpy() for side in torch.broadcast_tensors(queries, counting_queries))
    of_keys = (side.detach().cpu().numpy() for side in torch.broadcast_tensors(keys, counting_keys))
    found_ranges = np.zeros((*queries.shape, 2), dtype=np.int64)
    for sample, (queries_of, asks, held, counts) in enumerate(zip(*sides, *of_keys, strict=True)):
        found_ranges[sample] = _of_sample(sample, queries_of, asks, held, counts)
    return torch.from_numpy(found_ranges).to(queries.device)


def _of_sample(sample: int, asked: np.ndarray, asks: np.ndarray, held: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64 [Tq, 2]. asked, held: the groups of queries and of keys; asks, counts: which of them count."""
    places = np.flatnonzero(counts)
    if not len(places):
        return np.zeros((len(asked), 2), dtype=np.int64)
    numbers = held[places]
    order = np.argsort(numbers, kind="stable")  # places of the keys that count, group after group, each ascending
    numbers = numbers[order]
    starts = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
    ends = np.concatenate([starts[1:], [len(numbers)]])
    groups, first, last = numbers[starts], order[starts], order[ends - 1]
    of_query = np.minimum(np.searchsorted(groups, asked), len(groups) - 1)
    sees = asks & (groups[of_query] == asked)
    torn = np.flatnonzero(last - first + 1 != ends - starts)
    met = torn[np.isin(torn, of_query[sees])] if len(torn) else torn
    if len(met):
        raise _torn(sample, int(groups[met[0]]), int(places[first[met[0]]]), int(places[last[met[0]]]) + 1)
    low, high = places[first][of_query], places[last][of_query] + 1
    return np.stack([low, high], -1) * sees[:, None]


def _torn(sample: int, group: int, start: int, stop: int) -> InputError:
    return InputError(
        f"group {group} of sample {sample} does not stand together: its keys lie between {start} and {stop} with "
        "others among them, so no range of keys describes what its tokens see",
        "attention mask",
        "order the tokens so that those of a group stand together, or number each stretch of them as a group of "
        "its own if it need not see the others",
    )
