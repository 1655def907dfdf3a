"""Hardware profiles: what a device computes, moves and holds, as a small TOML file.

Terms
  peak         FLOP/s of dense matmuls by dtype, as the vendor states them; `matmul_efficiency` is the share of it, and
               `bandwidth_efficiency` the share of the memory bandwidth, that kernels reach
  wire         latency and bandwidth of a message between two devices, in one direction
  measured     seconds of F, B and W of template variants, by the variant's key (csc.analysis.costs.variant_key)
  clocks       what forwards and backwards take at each clock (csc.analysis.clocks), for the energy of a step
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from csc.analysis.clocks import ClockProfile, relative
from csc.errors import InputError

PROFILES = Path(__file__).parent / "profiles"
DTYPES = ("float64", "float32", "float16", "bfloat16")
PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
LARGEST_BANDWIDTH = 1e15  # bytes per second: a thousand times the fastest memory there is
LARGEST_RATE = 1e18
LARGEST_MEMORY = 1e15
LONGEST = 1.0  # second, for a latency, a launch or a change of clock
MOST_WATTS = 1e5  # of one device

Seconds = tuple[float, float, float]


class Wire(NamedTuple):
    """latency: seconds until the first byte arrives; bandwidth: bytes per second after that."""

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Hardware:
    """One device and its network. peak: FLOP/s by dtype name; memory: bytes; bandwidth: bytes/s; launch: seconds that
    every kernel takes besides its work; ranks_per_node: devices that the `within` wires join; reserved: bytes of
    `memory` that the process takes before it holds anything of a model; answered: see csc.simulation.pipeline.Network.
    attention: shares of the peak that attention reaches, forward and backward; None: that of matmuls. collective: the
    wire of collectives within a node; None: that of messages. matmul: (FLOPs, share) of products by size, rising: what
    they reach of `matmul_efficiency`, by the logarithm between two and as the nearest outside; none: all of it.
    compiled: peaks of products in compiled functions, where another library computes these; none: `peak`. action:
    seconds that the runtime takes for an F, B or W besides its kernels, handling: for a message at each of its ends; 0
    where it runs ahead of the device.
    """

    name: str
    description: str
    peak: Mapping[str, float]
    memory: float
    bandwidth: float
    matmul_efficiency: float
    bandwidth_efficiency: float
    launch: float
    within: Wire
    between: Wire
    ranks_per_node: int
    reserved: float = 0.0
    answered: bool = False
    attention: tuple[float, float] | None = None
    collective: Wire | None = None
    matmul: tuple[tuple[float, float], ...] = ()
    compiled: Mapping[str, float] = field(default_factory=dict)
    action: float = 0.0
    handling: float = 0.0
    measured_on: str = ""
    measured: Mapping[str, Seconds] = field(default_factory=dict)
    clocks: ClockProfile | None = None

    def rate(self, dtype: str, op: str = "", flops: float = math.inf, compiled: bool = False) -> float:
        """FLOP/s that matmuls of a dtype reach, of so many FLOPs, in a compiled function or not, or an operator that is
        none. InputError if the profile does not have the dtype. One product of complex numbers is four of their parts.
        """
        if dtype in PARTS:
            return self.rate(PARTS[dtype], flops=flops) / 4
        if dtype not in self.peak:
            raise InputError(
                f"the profile has no peak rate for {dtype}", f"hardware {self.name}", f"add peak.{dtype}, in FLOP/s"
            )
        if self.attention is not None and "attention" in op:
            return self.peak[dtype] * self.attention["backward" in op]
        return self.peak_of(dtype, compiled) * self.matmul_efficiency * self.share(flops)

    def peak_of(self, dtype: str, compiled: bool) -> float:
        """FLOP/s of products, in a compiled function or not."""
        return self.compiled.get(dtype, self.peak[dtype]) if compiled else self.peak[dtype]

    def share(self, flops: float) -> float:
        """What a product of so many FLOPs reaches of `matmul_efficiency`."""
        if not self.matmul or flops >= self.matmul[-1][0]:
            return self.matmul[-1][1] if self.matmul else 1.0
        before = self.matmul[0]
        for size, share in self.matmul:
            if flops < size:
                fraction = math.log(flops / before[0]) / math.log(size / before[0]) if flops > before[0] else 0.0
                return before[1] + fraction * (share - before[1])
            before = (size, share)
        return before[1]

    @property
    def reached_bandwidth(self) -> float:
        """Bytes per second that kernels reach."""
        return self.bandwidth * self.bandwidth_efficiency


def names() -> list[str]:
    """The profiles that come with csc."""
    return sorted(path.stem for path in PROFILES.glob("*.toml"))


def hardware(name: str | Path) -> Hardware:
    """The profile of that name, or of a TOML file by its path.

    Raises InputError for an unknown name, a file that is no TOML, and, naming the file and the field, for figures that
    are missing, unknown or absurd.
    """
    path = Path(name)
    if path.suffix != ".toml":
        if str(name) not in names():
            close = difflib.get_close_matches(str(name), names(), n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise InputError(
                f"there is no hardware profile {str(name)!r}",
                "hardware",
                f"{hint}choose one of {', '.join(names())}, or give the path of a .toml file",
            )
        return _built_in(str(name))
    return _of_file(path)


@cache
def _built_in(name: str) -> Hardware:
    """Asked for thousands of times in a search for a mesh."""
    return _of_file(PROFILES / f"{name}.toml")


def _of_file(path: Path) -> Hardware:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the hardware profile: {error}", str(path), "give the path of a file") from error
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"this is no TOML: {error}", str(path), "mend that line") from error
    return _hardware(_Table(content, str(path), ""), path.stem)


def _hardware(top: _Table, stem: str) -> Hardware:
    peak, network, measured = top.table("peak"), top.table("network"), top.table("measured", optional=True)
    attention = top.table("attention", optional=True)
    wires = {name: network.table(name, optional=name == "collective") for name in ("within", "between", "collective")}
    matmul, compiled = top.table("matmul", optional=True), top.table("compiled", optional=True)
    clocks = top.table("clocks", optional=True)
    hardware = Hardware(
        name=top.text("name", stem),
        description=top.text("description", ""),
        peak={dtype: peak.number(dtype, 0.0, LARGEST_RATE) for dtype in DTYPES},
        memory=top.number("memory", 0.0, LARGEST_MEMORY),
        bandwidth=top.number("bandwidth", 0.0, LARGEST_BANDWIDTH),
        matmul_efficiency=top.number("matmul_efficiency", 0.0, 1.0),
        bandwidth_efficiency=top.number("bandwidth_efficiency", 0.0, 1.0),
        launch=top.number("launch", 0.0, LONGEST, zero=True),
        within=_wire(wires["within"]),
        between=_wire(wires["between"]),
        ranks_per_node=network.whole("ranks_per_node"),
        reserved=top.number("reserved", 0.0, LARGEST_MEMORY, zero=True, default=0.0),
        answered=network.switch("answered"),
        attention=(attention.number("forward", 0.0, 1.0), attention.number("backward", 0.0, 1.0))
        if attention.content
        else None,
        collective=_wire(wires["collective"]) if wires["collective"].content else None,
        matmul=matmul.sizes("flops", "share") if matmul.content else (),
        compiled={dtype: compiled.number(dtype, 0.0, LARGEST_RATE) for dtype in DTYPES if dtype in compiled.content},
        action=top.number("action", 0.0, LONGEST, zero=True, default=0.0),
        handling=top.number("handling", 0.0, LONGEST, zero=True, default=0.0),
        measured_on=measured.text("on", ""),
        measured={key: measured.seconds(key) for key in sorted(measured.content) if key != "on"},
        clocks=_clocks(clocks) if clocks.content else None,
    )
    for table in (top, peak, network, measured, attention, matmul, compiled, clocks, *wires.values()):
        table.done()
    return hardware


def _wire(table: _Table) -> Wire:
    latency = table.number("latency", 0.0, LONGEST, zero=True)
    return Wire(latency, table.number("bandwidth", 0.0, LARGEST_BANDWIDTH))


def _clocks(table: _Table) -> ClockProfile:
    mhz = [round(clock) for clock in table.figures("mhz")]
    curves = {
        name: relative(mhz, table.figures(f"{name}_seconds"), table.figures(f"{name}_watts"), f"{table.file}, {name}")
        for name in ("forward", "backward")
    }
    return ClockProfile(
        source=table.text("source", "") or f"{table.file}",
        waiting=table.number("waiting", 0.0, MOST_WATTS, zero=True),
        forward=curves["forward"],
        backward=curves["backward"],
        change_seconds=table.number("clock_change_seconds", 0.0, LONGEST, zero=True),
    )


class _Table:
    """A table of the file. Every field is asked for once; what nobody asked for is an error (a misspelt field)."""

    def __init__(self, content: Mapping[str, Any], file: str, prefix: str) -> None:
        self.content = content
        self.file = file
        self.prefix = prefix
        self.known: set[str] = set()

    def table(self, name: str, optional: bool = False) -> _Table:
        value = self._get(name, {} if optional else None, "a table")
        if not isinstance(value, dict):
            raise self._wrong(name, "is no table", f"write [{self.prefix}{name}] and its fields below it")
        return _Table(value, self.file, f"{self.prefix}{name}.")

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default, "text")
        if not isinstance(value, str):
            raise self._wrong(name, f"is {value!r}", "write text in quotes")
        return value

    def switch(self, name: str) -> bool:
        value = self._get(name, False, "true or false")
        if not isinstance(value, bool):
            raise self._wrong(name, f"is {value!r}", "write true or false")
        return value

    def number(
        self, name: str, low: float, high: float, zero: bool = False, default: float | None = None
    ) -> float:  # fmt: skip
        """A finite number in (low, high], or in [low, high] if `zero`."""
        value = self._get(name, default, "a number")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._wrong(name, f"is {value!r}", "write a number")
        if not (low < value <= high or (zero and value == low)):
            least = f"{low:g} or more" if zero else f"more than {low:g}"
            raise self._wrong(name, f"is {value:g}", f"it must be {least} and at most {high:g}")
        return float(value)

    def whole(self, name: str) -> int:
        value = self._get(name, None, "a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
            raise self._wrong(name, f"is {value!r}", "write a whole number of at least 1")
        return value

    def seconds(self, name: str) -> Seconds:
        value = self._get(name, None, "three numbers")
        good = isinstance(value, list) and len(value) == 3
        if not good or not all(isinstance(v, (int, float)) and math.isfinite(v) and v >= 0 for v in value):
            raise self._wrong(name, f"is {value!r}", "write the seconds of F, B and W: [0.1, 0.1, 0.0]")
        return (float(value[0]), float(value[1]), float(value[2]))

    def figures(self, name: str) -> list[float]:
        """Numbers above 0."""
        value = self._get(name, None, "a list of numbers")
        good = isinstance(value, list) and all(type(v) in (int, float) and 0 < v < math.inf for v in value)
        if not good:
            raise self._wrong(name, f"is {value!r}", "write numbers above 0, one for each clock: [1410, 1395]")
        return [float(v) for v in value]

    def sizes(self, sizes: str, shares: str) -> tuple[tuple[float, float], ...]:
        """Rising sizes, and for each a share in (0, 1]."""
        rows = []
        for name, most in ((sizes, math.inf), (shares, 1.0)):
            value = self._get(name, None, "a list of numbers")
            good = isinstance(value, list) and value and all(isinstance(v, (int, float)) for v in value)
            if not good or not all(0 < v <= most and math.isfinite(v) for v in value):
                raise self._wrong(name, f"is {value!r}", "write numbers above 0, shares at most 1: [1e9, 1e10]")
            rows.append([float(v) for v in value])
        if len(rows[0]) != len(rows[1]) or any(a >= b for a, b in pairwise(rows[0])):
            raise self._wrong(sizes, "does not rise, or has another length", f"write one size for each of {shares}")
        return tuple(zip(*rows))

    def done(self) -> None:
        """Raise InputError if the file has a field here that nothing reads."""
        for name in self.content:
            if name not in self.known:
                close = difflib.get_close_matches(name, self.known, n=1)
                raise self._wrong(name, "is unknown", f"did you mean {close[0]}?" if close else "remove it")

    def _get(self, name: str, default: Any, what: str) -> Any:
        self.known.add(name)
        value = self.content.get(name, default)
        if value is None:
            raise self._wrong(name, "is missing", f"add it: {what}")
        return value

    def _wrong(self, name: str, what: str, remedy: str) -> InputError:
        return InputError(f"the field {self.prefix}{name} {what}", self.file, remedy)


def toml_text(hardware: Hardware) -> str:
    """The profile as the text of a file that `hardware` reads back unchanged."""
    lines = [
        f"name = {_quoted(hardware.name)}",
        f"description = {_quoted(hardware.description)}",
        f"memory = {hardware.memory!r}",
        f"bandwidth = {hardware.bandwidth!r}",
        f"matmul_efficiency = {hardware.matmul_efficiency!r}",
        f"bandwidth_efficiency = {hardware.bandwidth_efficiency!r}",
        f"launch = {hardware.launch!r}",
        *([f"reserved = {hardware.reserved!r}"] if hardware.reserved else []),
        *([f"action = {hardware.action!r}"] if hardware.action else []),
        *([f"handling = {hardware.handling!r}"] if hardware.handling else []),
        "",
        "[peak]",
        *(f"{dtype} = {rate!r}" for dtype, rate in hardware.peak.items()),
        "",
        "[network]",
        f"ranks_per_node = {hardware.ranks_per_node}",
        *(["answered = true"] if hardware.answered else []),
    ]
    named = {"within": hardware.within, "between": hardware.between, "collective": hardware.collective}
    for name, wire in ((name, wire) for name, wire in named.items() if wire is not None):
        lines += ["", f"[network.{name}]", f"latency = {wire.latency!r}", f"bandwidth = {wire.bandwidth!r}"]
    if hardware.attention:
        forward, backward = hardware.attention
        lines += ["", "[attention]", f"forward = {forward!r}", f"backward = {backward!r}"]
    if hardware.matmul:
        sizes, shares = zip(*hardware.matmul)
        lines += ["", "[matmul]", f"flops = {list(sizes)!r}", f"share = {list(shares)!r}"]
    if hardware.compiled:
        lines += ["", "[compiled]", *(f"{dtype} = {rate!r}" for dtype, rate in hardware.compiled.items())]
    if hardware.clocks is not None:
        lines += _clocks_text(hardware.clocks)
    if hardware.measured:
        lines += ["", "[measured]  # seconds of F, B and W, by the key of the template variant"]
        lines.append(f"on = {_quoted(hardware.measured_on)}")
        lines += [f"{_quoted(key)} = [{f!r}, {b!r}, {w!r}]" for key, (f, b, w) in hardware.measured.items()]
    return "\n".join(lines) + "\n"


def _clocks_text(clocks: ClockProfile) -> list[str]:
    lines = ["", "[clocks]", f"source = {_quoted(clocks.source)}", f"waiting = {clocks.waiting!r}"]
    lines += [
        f"clock_change_seconds = {clocks.change_seconds!r}",
        f"mhz = {[s.clock for s in clocks.forward.settings]}",
    ]
    for name, curve in (("forward", clocks.forward), ("backward", clocks.backward)):
        lines.append(f"{name}_seconds = {[setting.seconds for setting in curve.settings]}")
        lines.append(f"{name}_watts = {[setting.watts for setting in curve.settings]}")
    return lines


def _quoted(text: str) -> str:
    """A TOML basic string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
