"""Attention over packed sequences in Hugging Face models, as one attention with a mask.

Encoders for images of any size (Qwen-VL, GLM-V) pack all patches in one row and tell attention where each image or
window begins: `cu_seqlens`. Without FlashAttention they then split the row and attend image by image, so a trace holds
for these images. Attention functions of the flash kind get the whole row and `cu_seqlens`; the library lets others
register theirs. The one here says in tensor operations who sees whom, which pass `attention` reads as a mask.

    one_attention(model)      context: attention modules that take `cu_seqlens` attend to the whole row at once
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional as F

from csc.errors import InputError

NAME = "csc_flash_of_packed_rows"  # with "flash" in it, modules hand over the whole row
LIBRARY = "transformers.modeling_utils"
LIBRARY_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
FURTHER = ("sliding_window", "softcap", "s_aux")  # what the library's attention functions may be given beside
BEGINNINGS, LONGEST = "cu_seqlens", "max_seqlen"


@contextmanager
def one_attention(model: nn.Module) -> Iterator[None]:
    """While it lasts, attention modules of the model that take `cu_seqlens` and ask the library for their attention
    function get the one of this file.
    """
    library = sys.modules.get(LIBRARY)
    with ExitStack() as stack:
        if library is not None:
            library.ALL_ATTENTION_FUNCTIONS[NAME] = _attention
            stack.callback(library.ALL_ATTENTION_FUNCTIONS.pop, NAME)
            for kind in {type(module): None for module in model.modules() if _takes_packed_rows(module)}:
                stack.enter_context(patch.object(kind, "forward", _asking_for_it(kind.forward)))
        yield


def _takes_packed_rows(module: nn.Module) -> bool:
    return (
        BEGINNINGS in inspect.signature(type(module).forward).parameters
        and LIBRARY_FUNCTIONS in vars(sys.modules[type(module).__module__])
        and hasattr(getattr(module, "config", None), "_attn_implementation")
    )


def _asking_for_it(real: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an attention module. The longest sequence, which flash kernels need and which takes a look at
    values, is not asked for where it can be given.
    """
    signature = inspect.signature(real)

    @functools.wraps(real)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        called = signature.bind(self, *args, **kwargs)
        if LONGEST in signature.parameters and called.arguments.get(LONGEST) is None:
            called.arguments[LONGEST] = 0
        before = self.config._attn_implementation
        self.config._attn_implementation = NAME
        try:
            return real(*called.args, **called.kwargs)
        finally:
            self.config._attn_implementation = before

    return forward


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, G, T, D], cu_seq_lens_q [N + 1] from 0 to T; gives [1, T, H, D].

    Called as the library calls attention functions. Without cu_seq_lens_q all of the row is one sequence. InputError
    for what would be dropped: another mask, a sliding window, a soft cap, sinks.
    """
    further = {"attention_mask": attention_mask, **{name: kwargs.get(name) for name in FURTHER}}
    for name, given in further.items():
        if given is not None:
            raise InputError(
                f"attention over packed rows with {name} is not known to csc", type(module).__name__,
                "keep the module out of the trace with csc.opaque(module)",
            )  # fmt: skip
    causal = bool(is_causal)
    seen = None
    if cu_seq_lens_q is not None:
        places = torch.arange(query.shape[2], device=query.device)
        sequence = torch.bucketize(places, cu_seq_lens_q[1:], right=True)
        seen = sequence[:, None] == sequence[None, :]
        seen = (seen & (places[None, :] <= places[:, None]) if causal else seen)[None, None]
    out = F.scaled_dot_product_attention(
        query, key, value, seen, dropout, seen is None and causal, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None
