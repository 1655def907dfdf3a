"""`csc verify`: the loss and every gradient beside eager PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from csc.commands.model_options import Opening, on_target
from csc.commands.printing import JsonOption, console, print_json, table

if TYPE_CHECKING:
    from csc.check.certificate import Certificate, CertificateComparison
    from csc.driver.compiled import CompiledModel
    from csc.reports.verification import Verification

WORST = 8  # rows of a table


@on_target
def verify(
    opening: Opening,
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            help="largest relative difference that passes; default 1e-6, with cp > 1 1e-5, in bf16 0.1, or where it is "
            "more, 16 times what a changed last bit of every weight makes of eager's own gradient",
        ),
    ] = None,
    float64: Annotated[
        bool,
        typer.Option(
            "--float64",
            help="compare both with eager PyTorch in float64 too: a gradient that is as near to it as eager's passes",
        ),
    ] = False,
    steps: Annotated[
        int, typer.Option("--steps", min=0, help="also compare parameters after so many optimizer steps")
    ] = 0,
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--certificate",
            help="if all is equal, write a JSON file by which another layout, machine or framework can check itself: "
            "versions, digests of weights and batch, norm and fingerprint of every gradient",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            help="also compare with the certificate that another layout, machine or framework wrote, for the same "
            "weights and batch; --tolerance then holds for both comparisons, default 1e-5 for this one, in bf16 0.1",
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Compare with eager PyTorch on the example batch: loss and every gradient. Exit code 1 if they differ."""
    from csc.check.certificate import Certificate

    stored = None if against is None else Certificate.read(against)
    with opening as compiled:
        outcome = _outcome(compiled, stored, against, certificate, float64, steps, tolerance)
    result, good, comparison = outcome.result, outcome.good, outcome.comparison
    same = comparison is None or comparison.good
    if json_output:
        content = _as_json(result, good, outcome.place, float64, steps)
        print_json(content | ({} if comparison is None else {"against": _compared_as_json(comparison)}))
    else:
        _print(result, outcome.tolerance, outcome.place, float64, steps)
        console.print("[green]equal[/]" if good else f"[red]different[/] (tolerance {outcome.tolerance:g})")
        _print_certificate(certificate, good and same)
        if comparison is not None and stored is not None:
            _print_comparison(comparison, stored, against)
    if not good or not same:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Outcome:
    """place: where csc and eager PyTorch part, if they do; comparison: with another certificate, if one was given."""

    result: Verification
    good: bool
    place: str | None
    tolerance: float
    comparison: CertificateComparison | None


def _outcome(
    compiled: CompiledModel, stored: Certificate | None, against: Path | None, certificate: Path | None, float64: bool,
    steps: int, tolerance: float | None,
) -> _Outcome:  # fmt: skip
    """All comparisons; a certificate is written if nothing differs."""
    from csc.reports import certifying
    from csc.reports.verification import default_tolerance, parting
    from csc.reports.verification import verify as compare

    if stored is not None:
        certifying.same_step(stored, compiled, where=str(against))
    certify = certificate is not None or stored is not None
    result = compare(compiled, float64=float64, steps=steps, rounding=tolerance is None, certify=certify)
    here = certifying.certificate(compiled, result) if certify else None
    comparison = None if stored is None or here is None else certifying.against(stored, here, tolerance)
    if tolerance is None:
        tolerance = default_tolerance(compiled.options)
    else:
        result = replace(result, rounding={})  # what the certificate has asked for lets nothing pass
    good = result.good(tolerance)
    place = None if good else parting(compiled, tolerance)
    if certificate is not None and here is not None and good and (comparison is None or comparison.good):
        here.write(certificate)
    return _Outcome(result, good, place, tolerance, comparison)


def _print_certificate(path: Path | None, written: bool) -> None:
    if path is not None:
        outcome_text = "wrote" if written else "something differs, so there is no certificate in"
        console.print(f"{outcome_text} {escape(str(path))}", soft_wrap=True)


def _compared_as_json(comparison: CertificateComparison) -> dict[str, Any]:
    return {
        "ok": comparison.good, "loss": comparison.loss, "loss_there": comparison.loss_there,
        "loss_rel": comparison.loss_rel, "differences": dict(comparison.differences),
        "differing": list(comparison.differing), "missing": list(comparison.missing),
        "unexpected": list(comparison.unexpected),
    }  # fmt: skip


def _print_comparison(comparison: CertificateComparison, stored: Certificate, path: Path | None) -> None:
    made_by = stored.made_by
    maker = " ".join(str(made_by[key]) for key in ("program", "csc") if made_by.get(key))
    layout = f", {stored.layout['mesh']}" if stored.layout.get("mesh") else ""
    rows = table("parameter", "difference", "passes", title=f"largest differences to {path}")
    for name, value in sorted(comparison.differences.items(), key=lambda item: -item[1])[:WORST]:
        rows.add_row(escape(name), f"{value:.3g}", f"{comparison.allowed[name]:.3g}")
    if comparison.differences:
        console.print(rows)
    console.print(
        f"certificate of {maker}{layout}, torch {made_by.get('torch')}: loss {comparison.loss_there:.7g}, here "
        f"{comparison.loss:.7g}, relative difference {comparison.loss_rel:.3g}", highlight=False,
    )  # fmt: skip
    for title, names in (("no gradient here", comparison.missing), ("no gradient there", comparison.unexpected)):
        for name in names:
            console.print(f"[red]{title}[/] {escape(name)}")
    differing = len(comparison.differing)
    if comparison.good:
        console.print(f"[green]the same step[/]: {len(comparison.differences)} gradients as certified")
    else:
        console.print(f"[red]another step[/]: {differing} of {len(comparison.differences)} gradients differ")


def _as_json(result: Verification, good: bool, place: str | None, float64: bool, steps: int) -> dict[str, Any]:
    return {
        "ok": good, "loss": result.loss, "loss_eager": result.loss_eager, "loss_rel": result.loss_rel,
        "grad_rel_max": result.grad_rel_max if result.grad_rel_max < float("inf") else None,
        "params_checked": result.params_checked, "params_bit_equal": result.bit_equal,
        "params_missing": list(result.params_missing), "params_unexpected": list(result.params_unexpected),
        "random_ops": result.random_ops, "unknown_random_ops": list(result.unknown),
        "bf16_rounding": dict(result.in_half) or None,
        "trained_rel_max": max(result.trained_rel.values(), default=0.0) if steps else None, "parting": place,
        "from_float64": {name: list(both) for name, both in result.from_float64.items()} if float64 else None,
    }  # fmt: skip


def _print(result: Verification, tolerance: float, place: str | None, float64: bool, steps: int) -> None:
    further = ["bf16 rounding alone"] if result.in_half else []
    further += ["eager from float64", "compiled from float64"] if float64 else []
    differences = table("parameter", "relative difference", *further, title="largest differences to eager PyTorch")
    for name, value in sorted(result.grad_rel.items(), key=lambda item: -item[1])[:WORST]:
        rounded = [result.in_half[name]] if name in result.in_half else []
        figures = (value, *rounded, *result.from_float64.get(name, ()))
        differences.add_row(escape(name), *(f"{figure:.3g}" for figure in figures))
    if result.grad_rel:
        console.print(differences)
    console.print(f"loss {result.loss:.7g}, eager {result.loss_eager:.7g}, relative difference {result.loss_rel:.3g}")
    if result.grad_rel or result.params_missing:
        console.print(
            f"{result.params_checked} gradients, {result.bit_equal} of them bit-equal, "
            f"largest difference {result.grad_rel_max:.3g}"
        )
    else:
        console.print("loss only: nothing trains, so there are no gradients to compare")
    if result.in_half:
        most = max(result.in_half.values())
        console.print(
            f"in bf16, rounding alone (the last bit of each weight and sum) moves eager's own gradients by up to "
            f"{most:.2g}; differences up to {tolerance:g} pass"
        )
    for title, names in (("missing", result.params_missing), ("unexpected", result.params_unexpected)):
        for name in names:
            console.print(f"[red]{title}[/] {escape(name)}")
    if result.random_ops:
        console.print(f"{result.random_ops} random operations (dropout): both had the same constants for numbers")
    for name in result.unknown:
        console.print(f"[red]drawn[/] {name}: eager and compiled have different random numbers")
    if steps:
        most = max(result.trained_rel.values(), default=0.0)
        console.print(f"after {steps} optimizer steps parameters have moved as eager's, to {most:.3g} of the way")
    if place:
        console.print(escape(place))
