"""A certificate of gradients: what another layout, machine or framework needs to check that it trains the same.

Terms: a *digest* says which weights and which batch: sha256 of each tensor's dtype, shape and bytes. A *fingerprint* of
a gradient is its norm and SIGNS sums of its entries, each entry times +1 or -1. Signs are made of the parameter's name
and the entry's place alone, so anybody can make them. The sums of two gradients differ by the sums of their difference,
whose mean square is the square of that difference's norm (Alon, Matias, Szegedy 1996): fingerprints tell how far two
gradients are apart, not only that they are. docs/certificates.md says it with all constants; examples/certificate.py
does it without csc.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from csc.capture.quantised_weights import stand_ins
from csc.check.judge import NOISE
from csc.errors import InputError
from csc.runtime.weights import bytes_of, published

KIND, VERSION = "csc gradients", 1
SIGNS = 8
CHUNK = 1 << 14  # entries whose signs are made at once: with more they leave the cache
NAMED = 4  # tensors that a sentence names
AGAIN = "write it again with csc verify --certificate"


# --- digests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digest:
    """Of a tensor, or of a plain value, whose dtype is that of Python."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str


def digest(value: Any, where: str) -> Digest:
    """sha256 of the line "DTYPE SIZE,SIZE,...\\n" and the bytes of a tensor, row by row; of a plain value those of its
    `repr`. InputError for anything else. where: what it is, for the error.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, torch.Tensor):
        if value.is_meta or value.layout is not torch.strided or value.is_quantized:
            kind = "has no data" if value.is_meta else "is no dense tensor"
            raise InputError(f"{where} {kind}, and so no digest", "certificate", "give it as a dense tensor")
        dense = value.detach().resolve_conj().resolve_neg().cpu()
        dtype, shape = str(dense.dtype).removeprefix("torch."), tuple(dense.shape)
        data = bytes_of(torch.view_as_real(dense) if dense.is_complex() else dense)
    elif isinstance(value, (bool, int, float, str)):
        dtype, shape, data = type(value).__name__, (), repr(value).encode()
    else:
        raise InputError(
            f"{where} is a {type(value).__name__}, which has no digest", "certificate",
            "give tensors, numbers and texts, in dicts, lists and tuples",
        )  # fmt: skip
    hashed = hashlib.sha256(f"{dtype} {','.join(map(str, shape))}\n".encode())
    hashed.update(data)
    return Digest(dtype, shape, hashed.hexdigest())


def total(content: Mapping[str, Any]) -> str:
    """sha256 of JSON with sorted keys and no spaces."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def model_digests(model: nn.Module) -> dict[str, Digest]:
    """Of parameters and of the buffers that a state dict has, a tied one under each of its names."""
    with stand_ins(model):
        tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    stored = model.state_dict().keys()
    tensors |= {name: b for name, b in model.named_buffers(remove_duplicate=False) if name in stored}
    return {name: digest(tensor, f"the weight {name!r}") for name, tensor in sorted(tensors.items())}


def batch_digests(batch: Any) -> dict[str, Digest]:
    """Of what a batch holds, by its path: `input_ids`, `images[0]`, `extra['sizes']`, in a list of microbatches
    `0['input_ids']`; nothing of None. InputError if two have one path.
    """
    digests: dict[str, Digest] = {}
    for path, value in _leaves(batch, ""):
        if path in digests:
            raise InputError(f"the batch has two entries {path!r}", "certificate", "name them otherwise")
        digests[path] = digest(value, f"the batch entry {path!r}")
    return digests


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if hasattr(value, "items") and not isinstance(value, torch.Tensor):
        for key, member in value.items():
            yield from _leaves(member, f"{path}[{key!r}]" if path else str(key))
    elif value is not None:
        yield path, value


def unlike(there: Mapping[str, Digest], here: Mapping[str, Digest]) -> str:
    """Which differ and how, as a clause; "" if all are the same."""
    common = there.keys() & here.keys()
    clauses = [
        _clause(there.keys() - here.keys(), "only the certificate has"),
        _clause(here.keys() - there.keys(), "it does not have"),
    ]
    for attribute, label in (("shape", "shapes"), ("dtype", "dtypes"), ("sha256", "values")):
        names = {name for name in common if getattr(there[name], attribute) != getattr(here[name], attribute)}
        clauses.append(_clause(names, f"other {label} have"))
        common -= names
    return "; ".join(filter(None, clauses))


def _clause(names: Any, label: str) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return f"{label} {', '.join(map(repr, listed[:NAMED]))}{more}" if listed else ""


# --- fingerprints ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fingerprint:
    """norm: in float64. sums: of the entries under each pattern of signs, in float64."""

    shape: tuple[int, ...]
    norm: float
    sums: tuple[float, ...]


def fingerprint(name: str, gradient: torch.Tensor) -> Fingerprint:
    """Of a gradient as the whole parameter has it, of any dtype and layout."""
    dense = gradient.detach().to_dense() if gradient.layout is not torch.strided else gradient.detach()
    wide = torch.view_as_real(dense.to(torch.complex128)) if dense.is_complex() else dense.to(torch.float64)
    flat = wide.cpu().reshape(-1).numpy()
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    sums, squares = np.zeros(SIGNS), 0.0
    largest = float(np.abs(flat).max(initial=0.0))
    scale = largest if 0.0 < largest < math.inf else 1.0  # squares neither vanish nor overflow
    for first in range(0, flat.size, CHUNK):
        part = flat[first : first + CHUNK]
        squares += float(np.square(part / scale).sum())
        low = _hashes(seed, first, part.size).astype(np.uint8)
        negative = np.unpackbits(low, bitorder="little").reshape(-1, SIGNS)
        with np.errstate(invalid="ignore"):  # infinite entries
            sums += part.sum() - 2 * (part @ negative.astype(np.float64))
    return Fingerprint(tuple(gradient.shape), scale * math.sqrt(squares), tuple(map(float, sums)))


def _hashes(seed: int, first: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """SplitMix64 (Steele, Lea, Flood 2014) of the places from `first` on; bit k of each says which sign sum k gives."""
    with np.errstate(over="ignore"):
        state = np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state += np.uint64(seed)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))


# --- certificates ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradient:
    """A parameter's. allowed: the relative difference that its maker puts down to rounding. error: how far csc's is
    from eager PyTorch's, relative; None: they were not compared.
    """

    shape: tuple[int, ...]
    norm: float
    sums: tuple[float, ...]
    allowed: float
    error: float | None = None


@dataclass(frozen=True)
class Certificate:
    """made_by, layout, precision: who made it and how, for people. random_operations: calls that drew constants in
    place of random numbers. loss_allowed: the relative difference of the loss that its maker puts down to rounding.
    without_gradient: parameters that have none.
    """

    made_by: Mapping[str, Any]
    weights: Mapping[str, Digest]
    batch: Mapping[str, Digest]
    random_operations: int
    loss: float
    loss_allowed: float
    gradients: Mapping[str, Gradient]
    layout: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, Any] = field(default_factory=dict)
    without_gradient: tuple[str, ...] = ()

    def write(self, path: str | Path) -> None:
        """As JSON; the file is there whole or not at all.

        Args:
            path: The file to write; one that is there is replaced.

        Raises:
            InputError: A number in it is none, or the file cannot be written.
        """
        path = Path(path)
        text = self._text(str(path))
        published(path, lambda file: file.write_text(text, encoding="utf-8"))

    def _text(self, where: str) -> str:
        broken = [n for n, g in self.gradients.items() if not all(map(math.isfinite, (g.norm, *g.sums)))]
        if not math.isfinite(self.loss) or broken:
            lost = _clause(broken, "no numbers are the gradients of") if broken else f"the loss is {self.loss:g}"
            raise InputError(
                f"there is nothing to certify: {lost}", where, "verify on a batch whose loss and gradients are numbers"
            )
        content = {"certificate": KIND, "version": VERSION, **asdict(self)}
        for part in ("weights", "batch"):
            content[part] = {"sha256": total(content[part]), "tensors": content[part]}
        return json.dumps(content | {"sha256": total(content)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def read(cls, path: str | Path) -> Certificate:
        """A certificate from a file.

        Args:
            path: As `write` or the plain script has written it.

        Returns:
            What it says.

        Raises:
            InputError: There is no such file, or it is no certificate, of another version, or damaged.
        """
        where = str(path)
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_no_number)
        except OSError as error:
            raise InputError(f"the certificate cannot be read: {error.strerror}", where, AGAIN) from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"it is no JSON: {error}", where, AGAIN) from error
        if not isinstance(content, dict) or content.get("certificate") != KIND:
            raise InputError("it is JSON, and no certificate of gradients", where, AGAIN)
        if content.get("version") != VERSION:
            raise InputError(
                f"it is a certificate of version {content.get('version')}, and this csc reads version {VERSION}", where,
                "make it again with this csc, or check it with the csc that made it",
            )  # fmt: skip
        if content.pop("sha256", None) != total(content):
            raise InputError("it is not as it was written: its sha256 is another one", where, AGAIN)
        try:
            return cls._of(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"it lacks what a certificate has: {type(error).__name__}: {error}", where, AGAIN
            ) from error

    @classmethod
    def _of(cls, content: Mapping[str, Any]) -> Certificate:
        parts = {}
        for part in ("weights", "batch"):
            parts[part] = {
                str(name): Digest(str(entry["dtype"]), tuple(map(int, entry["shape"])), str(entry["sha256"]))
                for name, entry in content[part]["tensors"].items()
            }
        gradients = {str(name): _gradient(entry) for name, entry in content["gradients"].items()}
        return cls(
            dict(content["made_by"]), parts["weights"], parts["batch"], int(content["random_operations"]),
            float(content["loss"]), float(content["loss_allowed"]), gradients, dict(content.get("layout", {})),
            dict(content.get("precision", {})), tuple(map(str, content.get("without_gradient", ()))),
        )  # fmt: skip


def _gradient(content: Mapping[str, Any]) -> Gradient:
    sums = tuple(map(float, content["sums"]))
    if len(sums) != SIGNS:
        raise ValueError(f"a gradient has {len(sums)} sums, and not {SIGNS}")
    error = content.get("error")
    shape = tuple(map(int, content["shape"]))
    return Gradient(
        shape, float(content["norm"]), sums, float(content["allowed"]), None if error is None else float(error)
    )


def _no_number(word: str) -> float:
    raise ValueError(f"it holds {word}, which is no number")


# --- comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CertificateComparison:
    """Of a run here with a certificate. differences: by parameter, how far the gradients are apart, relative; the
    larger of what norms and sums say. allowed: what passes of each. missing: gradients that the certificate alone has.
    """

    loss: float
    loss_there: float
    loss_rel: float
    loss_allowed: float
    differences: Mapping[str, float]
    allowed: Mapping[str, float]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    @property
    def differing(self) -> tuple[str, ...]:
        """Parameters whose gradients differ, the worst first; one that is no number differs."""
        names = [name for name, value in self.differences.items() if not value <= self.allowed[name]]
        return tuple(sorted(names, key=lambda name: -self.differences[name]))

    @property
    def good(self) -> bool:
        """Whether it is the same step, within rounding."""
        return not (self.missing or self.unexpected or self.differing) and self.loss_rel <= self.loss_allowed


def compare(there: Certificate, here: Certificate, tolerance: float | None = None) -> CertificateComparison:
    """A certificate, and what was made here of the same weights and batch.

    Args:
        there: The certificate.
        here: Made here, as if to write it.
        tolerance: The relative difference that passes, of the loss and of each gradient; None: what one of both allows.

    Returns:
        What differs. A gradient that is small beside its module's is measured against the module's
        (csc.check.judge).
    """
    modules: dict[str, float] = {}
    for name, gradient in there.gradients.items():
        module = name.rpartition(".")[0]
        modules[module] = math.hypot(modules.get(module, 0.0), gradient.norm)
    differences, allowed = {}, {}
    for name in sorted(there.gradients.keys() & here.gradients.keys()):
        mine, right = here.gradients[name], there.gradients[name]
        scale = modules[name.rpartition(".")[0]]
        differences[name] = _apart(right, mine, right.norm if right.norm >= NOISE * scale else scale)
        allowed[name] = max(right.allowed, mine.allowed) if tolerance is None else tolerance
    least = torch.finfo(torch.float32).tiny
    return CertificateComparison(
        loss=here.loss,
        loss_there=there.loss,
        loss_rel=abs(here.loss - there.loss) / max(abs(there.loss), least),
        loss_allowed=max(there.loss_allowed, here.loss_allowed) if tolerance is None else tolerance,
        differences=differences,
        allowed=allowed,
        missing=tuple(sorted(there.gradients.keys() - here.gradients.keys())),
        unexpected=tuple(sorted(here.gradients.keys() - there.gradients.keys())),
    )


def _apart(right: Gradient, mine: Gradient, scale: float) -> float:
    if right.shape != mine.shape:
        return math.inf
    root_mean_square = math.hypot(*(a - b for a, b in zip(right.sums, mine.sums))) / math.sqrt(SIGNS)
    difference = max(abs(right.norm - mine.norm), root_mean_square)
    if difference == 0.0:
        return 0.0
    return difference / scale if scale else math.inf
