"""Certificates of a compiled model: written here, checked elsewhere (csc.check.certificate has the format).

    here = certificate(compiled, verify(compiled, certify=True))
    here.write("step.json")                                        # on one side
    there = Certificate.read("step.json")                          # on the other
    same_step(there, compiled)
    comparison = against(there, here)

`csc verify --certificate` and `--against` are these.
"""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import fields
from typing import Any

from csc import __version__, devices
from csc.cache.keys import switches
from csc.capture.batch import device_of
from csc.capture.trace.meta_init import with_weights
from csc.check.certificate import (
    Certificate,
    CertificateComparison,
    Gradient,
    batch_digests,
    compare,
    model_digests,
    unlike,
)
from csc.check.judge import LOSS, ROUNDING
from csc.driver.compiled import CompiledModel
from csc.errors import InputError
from csc.ir.program import Options
from csc.reports.verification import Verification, default_tolerance

# Another machine adds up in another order, in products too; 16-bit numbers have 8 bits.
ELSEWHERE, IN_HALF = 1e-5, 0.1
HALF = {"bfloat16", "float16"}
PACKAGES = ("torch", "triton", "transformers", "numpy")


def certificate(compiled: CompiledModel, result: Verification, batch: Any = None) -> Certificate:
    """What a verification found, for others to check.

    Args:
        compiled: The model that was verified.
        result: Of `verify(compiled, batch, certify=True)`, which was good.
        batch: The batch that it was verified on; None: the example.

    Returns:
        A certificate; `.write(path)` stores it.

    Raises:
        InputError: Eager PyTorch and csc drew different random numbers, or the batch holds what has no digest.
    """
    if result.unknown:
        raise InputError(
            f"there is nothing to certify: {', '.join(result.unknown)} draws other random numbers each time", "verify",
            "turn that off in the model, and verify again",
        )  # fmt: skip
    options, model = compiled.options, compiled.model
    dtypes = {name: str(parameter.dtype).removeprefix("torch.") for name, parameter in model.named_parameters()}
    least = max(default_tolerance(options), IN_HALF if HALF & set(dtypes.values()) else ELSEWHERE)
    allowed = {name: max(least, ROUNDING * rounding) for name, rounding in result.rounding.items()}
    return Certificate(
        made_by=_made_by(compiled),
        weights=model_digests(model),
        batch=batch_digests(compiled.example if batch is None else batch),
        random_operations=result.random_ops,
        loss=result.loss,
        loss_allowed=allowed.get(LOSS, least),
        gradients={
            name: Gradient(digest.shape, digest.norm, digest.sums, allowed.get(name, least), result.grad_rel.get(name))
            for name, digest in sorted(result.fingerprints.items())
        },
        layout=_layout(compiled),
        precision={
            "computes": options.precision, "parameters": sorted(set(dtypes.values())), "switches": dict(switches())
        },
        without_gradient=tuple(sorted(dtypes.keys() - result.fingerprints.keys())),
    )  # fmt: skip


def same_step(there: Certificate, compiled: CompiledModel, batch: Any = None, where: str = "certificate") -> None:
    """See, before anything runs, whether a certificate is for these weights and this batch.

    Args:
        there: The certificate.
        compiled: The model to be compared with it.
        batch: The batch; None: the example.
        where: The certificate's file, for the error.

    Raises:
        InputError: Weights or batch are not those of the certificate; it says which tensors differ.
    """
    weights = unlike(there.weights, model_digests(with_weights(compiled.model, "verify")))
    if weights:
        raise InputError(
            f"the weights are not those of the certificate: {weights}", where,
            "load the weights that it was made with, or seed the model alike",
        )  # fmt: skip
    entries = unlike(there.batch, batch_digests(compiled.example if batch is None else batch))
    if entries:
        raise InputError(
            f"the batch is not that of the certificate: {entries}", where, "give the batch that it was made with"
        )


def against(there: Certificate, here: Certificate, tolerance: float | None = None) -> CertificateComparison:
    """A certificate beside what this layout, machine and version make of the same step.

    Args:
        there: The certificate, for which `same_step` has passed.
        here: Of `certificate`.
        tolerance: The relative difference that passes; None: 1e-5, 0.1 where 16-bit numbers are computed with, or 16
            times what a changed last bit of every weight makes there or here, if that is more.

    Returns:
        What differs.

    Raises:
        InputError: One of both draws random numbers, and the other does not.
    """
    if bool(there.random_operations) != bool(here.random_operations):
        left_out, other = (
            ("the certificate", "this run") if there.random_operations else ("this run", "the certificate")
        )
        raise InputError(
            f"{left_out} is of a step with random numbers (dropout), and {other} of one without", "certificate",
            "set dropout to 0 in the model's configuration, for both",
        )  # fmt: skip
    return compare(there, here, tolerance)


def _made_by(compiled: CompiledModel) -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    device = device_of(compiled.model)
    name = devices.title(device) if device.type != "cpu" else platform.machine()
    versions |= {"python": platform.python_version(), "device": f"{device.type}: {name}"}
    return {"program": "csc", "csc": __version__, **versions}


def _layout(compiled: CompiledModel) -> dict[str, Any]:
    options, schedule = compiled.options, compiled.program.schedule
    standard = Options()
    changed = {
        f.name: str(getattr(options, f.name)) for f in fields(Options)
        if f.name not in ("mesh", "microbatches", "schedule") and getattr(options, f.name) != getattr(standard, f.name)
    }  # fmt: skip
    return {
        "model": type(compiled.model).__name__,
        "mesh": str(options.mesh),
        "ranks": options.mesh.size,
        "microbatches": options.microbatches,
        "schedule": schedule.name if schedule is not None else str(options.schedule),
        "stages": len(compiled.program.stages),
        "options": changed,
    }
