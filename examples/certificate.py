# fmt: off
"""A certificate of gradients from plain PyTorch, without csc, and the comparison of two: docs/certificates.md.

    here = certificate(model, batch, lambda: model(**batch).loss)
    write(here, "step.json")                                            # on one side
    print(differences(read("step.json"), here) or "the same step")      # on the other
"""
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import torch


def total(content):
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

def digests(value, path=""):
    """Of all tensors and plain values in dicts and lists, by their paths."""
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if hasattr(value, "items"):
        return {n: d for k, v in value.items() for n, d in digests(v, f"{path}[{k!r}]" if path else str(k)).items()}
    kind, shape, data = type(value).__name__, [], repr(value).encode()
    if isinstance(value, torch.Tensor):
        kind, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    sha256 = hashlib.sha256(f"{kind} {','.join(map(str, shape))}\n".encode() + data).hexdigest()
    return {} if value is None else {path: {"dtype": kind, "shape": shape, "sha256": sha256}}

def fingerprint(name, gradient):
    flat = gradient.detach().double().cpu().reshape(-1).numpy()
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    hashes = np.arange(1, flat.size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        hashes = (hashes ^ (hashes >> np.uint64(shift))) * np.uint64(factor)
    sums = [float(np.where(hashes >> np.uint64(bit) & np.uint64(1), -flat, flat).sum()) for bit in range(8)]
    return {"shape": list(gradient.shape), "norm": float(np.linalg.norm(flat)), "sums": sums}

def certificate(model, batch, run, gradients=None, allowed=1e-5):
    """run() makes the loss; gradients() gives {name: whole gradient} where the parameters are shards."""
    weights, entries, generator = digests(model.state_dict()), digests(batch), torch.get_rng_state()
    model.zero_grad()
    (loss := run()).backward()
    if not torch.equal(generator, torch.get_rng_state()):
        raise ValueError("the step draws random numbers: set dropout to 0")
    own = gradients() if gradients else {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    prints = {name: fingerprint(name, gradient) | {"allowed": allowed} for name, gradient in own.items()}
    return {"certificate": "csc gradients", "version": 1, "made_by": {"program": "pytorch", "torch": torch.__version__},
            "random_operations": 0, "loss": loss.item(), "loss_allowed": allowed, "gradients": prints,
            **{part: {"sha256": total(t), "tensors": t} for part, t in (("weights", weights), ("batch", entries))}}

def write(content, path):
    Path(path).write_text(json.dumps(content | {"sha256": total(content)}, indent=1, allow_nan=False))

def read(path):
    content = json.loads(Path(path).read_text())
    if content.pop("sha256") != total(content) or content["version"] != 1 or content["random_operations"]:
        raise ValueError(f"{path} is damaged, of another version, or of a step with dropout, which csc alone repeats")
    return content

def differences(there, here):
    """A line for each weight, batch entry, gradient or loss that differs."""
    lines = [f"{p}: {n!r}" for p in ("weights", "batch") for n in {**here[p]["tensors"], **there[p]["tensors"]}
             if here[p]["tensors"].get(n) != there[p]["tensors"].get(n)]
    ours, theirs = here["gradients"], there["gradients"]
    for name in ours.keys() & theirs.keys():
        a, b, module = ours[name], theirs[name], name.rpartition(".")[0]
        whole = math.hypot(*(g["norm"] for n, g in theirs.items() if n.rpartition(".")[0] == module))
        apart = max(abs(a["norm"] - b["norm"]), math.dist(a["sums"], b["sums"]) / math.sqrt(8))
        scale = b["norm"] if b["norm"] >= 1e-4 * whole else whole
        if a["shape"] != b["shape"] or not apart <= max(a["allowed"], b["allowed"]) * scale:
            lines.append(f"{name!r} differs by {apart:.3g}, its norm is {b['norm']:.3g}")
    lines += [f"{name!r} has a gradient on one side alone" for name in ours.keys() ^ theirs.keys()]
    if not abs(here["loss"] - there["loss"]) <= max(here["loss_allowed"], there["loss_allowed"]) * abs(there["loss"]):
        lines.append(f"the loss is {here['loss']}, there {there['loss']}")
    return lines
