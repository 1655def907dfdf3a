"""What users of an nn.Module look for on a compiled model, and what there is instead: sentences.

instead(name, there, model) -> AttributeError    for `compiled.generate`, `compiled.half`, ..., and for what nothing has
COPIES                                           for copy.deepcopy and pickle
"""

from __future__ import annotations

import difflib

from torch import nn

from csc import devices

WHOLE = "`compiled.gather()` gives the eager model with what all ranks have trained: "
INSTEAD = {
    "generate": f"{WHOLE}compiled.gather().generate(...)",
    "forward": f"compiled.train_step(batch) runs forward and backward; {WHOLE}compiled.gather()(**batch)",
    "to": "put the model on its device, in its dtype, before csc.compile; precision='bf16' computes in bfloat16",
    "modules": f"{WHOLE}its modules are those of compiled.model",
    "named_modules": f"{WHOLE}its modules are those of compiled.model",
    "requires_grad_": "freeze=[...] says what is frozen: compiled.with_options(freeze=[...]) compiles without a trace",
    "save_pretrained": f"compiled.save(directory) writes the weights; {WHOLE}compiled.gather().save_pretrained(...)",
    "compile": "it is compiled already; compiled.with_options(...) changes how",
    "load_state_dict": "compiled.load(directory) reads what compiled.save or save_pretrained wrote; a dict of tensors "
    "goes to compiled.model.load_state_dict(...), on every rank",
    "backward": "compiled.train_step(batch) runs forward and backward",
    "step": "compiled.train_step(batch) makes the gradients, the optimizer steps",
    "no_sync": "compiled.train_step(batch) adds to the gradients that are there, summed once for all its microbatches",
    "gradient_checkpointing_enable": "recompute='selective' or 'full', of csc.compile or compiled.with_options(...)",
}
MOVES = ("half", "float", "double", "bfloat16", "type", "to_empty", "xpu", "ipu", "mtia")
INSTEAD |= dict.fromkeys((*devices.TYPES, *MOVES), INSTEAD["to"])
COPIES = (
    "a compiled model is not copied or pickled: copy.deepcopy(compiled.gather()) copies the eager model (for averaged "
    "weights), compiled.save(directory) writes it, compiled.with_options(...) makes another program of the same weights"
)


def instead(name: str, there: list[str], model: nn.Module | None) -> AttributeError:
    """The error for an attribute that a compiled model has not. there: those that it has; model: what it compiles."""
    if name in INSTEAD:
        return AttributeError(f"a compiled model has no {name!r}: {INSTEAD[name]}")
    if name in dir(model):  # without running the model's code
        return AttributeError(f"a compiled model has no {name!r}; its eager model has: compiled.model.{name}")
    close = difflib.get_close_matches(name, [one for one in there if not one.startswith("_")], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return AttributeError(f"a compiled model has no {name!r}{hint}")
