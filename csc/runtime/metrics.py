"""What a step was: its loss, its size and its speed, as numbers for a log.

Terms
  counts    of one replica's microbatches: tokens, samples, and the FLOPs that its ranks spend on them
  peak      FLOP/s of a device, as the plan's hardware profile has them for the dtype that is computed in
  MFU       model FLOPs of the step over what all devices could do in that time (PaLM, Chowdhery et al. 2022); what is
            computed again for lack of memory is not counted

    counted(manifests, microbatches) -> StepCounts
    metrics(loss, counts, seconds, manifest, device) -> {name: number}

Tokens are those that count in attention_mask, where the program reads one; else all places of the token ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from csc import devices
from csc.runtime.batches import Microbatch
from csc.runtime.specs import Manifest
from csc.runtime.step_counts import StepCounts

TOKENS = ("input_ids", "decoder_input_ids", "labels")


def counted(manifests: Sequence[Manifest], microbatches: Sequence[Microbatch]) -> StepCounts:
    """What one replica's microbatches are."""
    tokens, samples, flops = 0, 0, 0.0
    for one in microbatches:
        manifest = manifests[one.program]
        text = _text(one.tensors)
        if text is not None:
            mask = one.tensors.get("attention_mask")
            places = mask is not None and mask.shape == text.shape and not mask.is_meta and mask.device.type == "cpu"
            tokens += int(mask.count_nonzero()) if places and mask is not None else text.numel()
            samples += len(text)
        flops += manifest.flops
    return StepCounts(float(tokens), float(samples), float(flops))


def _text(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """The token ids, or what is most like them."""
    known = [tensors[name] for name in TOKENS if name in tensors]
    whole = [one for one in tensors.values() if one.dim() and not one.is_floating_point()]
    return next(iter([*known, *whole, *(one for one in tensors.values() if one.dim())]), None)


def metrics(
    loss: torch.Tensor, counts: StepCounts, seconds: float, manifest: Manifest, device: torch.device
) -> dict[str, float]:
    """counts: of all replicas. Seconds, rates and memory are this process'; the others the same on every rank."""
    found = {
        "loss": float(loss),
        "tokens": counts.tokens,
        "samples": counts.samples,
        "seconds": seconds,
        "tokens_per_second": counts.tokens / seconds,
        "samples_per_second": counts.samples / seconds,
        "peak_memory": float(devices.peak_memory(device)),
    }
    peak = manifest.plan.get("peak_flops")
    if isinstance(peak, (int, float)) and peak > 0 and counts.flops:
        found["mfu"] = counts.flops / (seconds * peak * manifest.mesh.size)
    return found
