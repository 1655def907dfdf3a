"""A pipeline in numbers: what its stages take, what moves between them, and over which links.

Terms: see csc.ir.schedule. Times are seconds and sizes bytes, all of one microbatch and one data-parallel
replica. A *rank* is a position on the pp axis.

    Stage      times of F, B and W; bytes that a microbatch leaves alive between them; bytes that are always there
    Network    latency and bandwidth between two ranks, within a node and between nodes
    Pipeline   stages, bytes by channel, network, and how much larger than 1 each microbatch is
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from csc.ir.schedule import PARTS, Message


@dataclass(frozen=True)
class StageWork:
    """One stage. `has_b` and `has_w`: it has a B and a W at all (a frozen stage has neither, and saves nothing).

    saved: bytes alive from F's end until B's end. kept: bytes alive from B's end until W's end. fused: bytes that BW
    takes while it runs, on top of saved; of the region that takes the most, as BW goes from one to the next. state:
    parameters, gradients and optimizer state, alive for the whole step.
    """

    forward: float
    backward_input: float = 0.0
    backward_weight: float = 0.0
    has_b: bool = True
    has_w: bool = True
    saved: float = 0.0
    kept: float = 0.0
    fused: float = 0.0
    state: float = 0.0

    def seconds(self, kind: str) -> float:
        """Time of "F", "B", "W" or "BW"."""
        return sum(
            {"F": self.forward, "B": self.backward_input, "W": self.backward_weight}[part] for part in PARTS[kind]
        )

    @property
    def work(self) -> float:
        """Seconds of one microbatch: F + B + W."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Link:
    """Seconds until the first byte arrives, and bytes per second after that."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, size: float) -> float:
        """How long a message of `size` bytes takes on an idle link."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Network:
    """Links between ranks: `within` a node of `ranks_per_node` consecutive ranks (None: one node), else `between`."""

    within: Link = Link()
    between: Link = Link()
    ranks_per_node: int | None = None

    def link(self, source: int, destination: int) -> Link:
        """The link from one rank to another."""
        size = self.ranks_per_node
        return self.within if size is None or source // size == destination // size else self.between


@dataclass(frozen=True)
class Pipeline:
    """Everything that a simulation needs besides a schedule.

    messages: bytes of one microbatch by channel (kind, source stage, destination stage). scale: for each microbatch
    what its times and bytes are multiplied by; None if all are equal.
    """

    stages: tuple[StageWork, ...]
    messages: Mapping[Message, float] = field(default_factory=dict)
    network: Network = Network()
    scale: tuple[float, ...] | None = None

    def factor(self, microbatch: int) -> float:
        """What the times and bytes of this microbatch are multiplied by."""
        return 1.0 if self.scale is None else self.scale[microbatch]

    @property
    def has_b(self) -> list[bool]:
        return [stage.has_b for stage in self.stages]

    @property
    def has_w(self) -> list[bool]:
        return [stage.has_w for stage in self.stages]
