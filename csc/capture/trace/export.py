"""torch.export of the whole model, returning only the loss; the modes in which it runs, what it assumes of sizes."""

from __future__ import annotations

import builtins
import functools
import inspect
import io
import keyword
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import fx, nn
from torch.nn import functional as F

from csc.capture.batch import NOTHING_TOLD, dynamic_dimensions, sample_axis, symbolic_dimensions
from csc.capture.dedup.layers import CannotRepeat, Layers, NotHidden
from csc.capture.diagnostics import untraceable
from csc.capture.trace.mutations import Changes, Slot, attributes_kept
from csc.capture.trace.traced_model import HoistedCalls, HostFunctionFound, LossOnly
from csc.capture.watches import FileState
from csc.errors import CscError, InputError
from csc.ir import graph as g
from csc.ir.capture_guards import Call, Decision, SizeGuards
from csc.ir.program import BEGINNINGS
from csc.torch_private.hooks import no_new_registration_hooks
from csc.torch_private.real_layouts import real_layouts
from csc.torch_private.symbolic_sizes import assumed_of_sizes, conditions_of_models, one_is_no_special_size
from csc.torch_private.traces import (
    each_computed,
    plain_checkpoints,
    tensors_of_data,
    unchanged_modules,
    varlen_attention,
    without_messages,
)

# --- `len(x)` of a tensor in the model's code, as `x.shape[0]` is in a trace: a number that may vary -----------------
#
# Python's `len` gives a plain number, so a trace would be for that number of samples. While a model is traced its code
# finds a `len` of this file instead, among the globals of the files that its classes are from, and of those whose
# functions these have. torch's own code does not, nor csc's.


LENGTH = "len"
APART = ("torch", "csc")  # their code needs plain numbers


@contextmanager
def symbolic_lengths(model: nn.Module) -> Iterator[Callable[[], bool]]:
    """A context in which `len` of a tensor with a symbolic first size gives that size, in the files of the model's
    code. It yields a function that returns whether any length was symbolic. A file with a `len` of its own keeps it.
    """
    made_symbolic = [False]

    def length(of: Any) -> Any:
        if isinstance(of, torch.Tensor) and of.dim() and isinstance(of.shape[0], torch.SymInt):
            made_symbolic[0] = True
            return of.shape[0]
        return builtins.len(of)

    with ExitStack() as stack:
        for names in _globals_of(model):
            if LENGTH not in names:
                names[LENGTH] = length
                stack.callback(names.pop, LENGTH)
        yield lambda: made_symbolic[0]


def _globals_of(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Of the code of the model, each once."""
    seen: set[int] = set()
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    written = [
        inspect.unwrap(member) for kind in kinds for member in vars(kind).values() if isinstance(member, FunctionType)
    ]
    for function in filter(_is_own, written):
        for other in (function, *filter(_is_own, function.__globals__.values())):
            if id(other.__globals__) not in seen:
                seen.add(id(other.__globals__))
                yield other.__globals__


def _is_own(function: Any) -> bool:
    """Whether it is a function of Python code that is neither torch's nor csc's."""
    if not isinstance(function, FunctionType):
        return False
    return str(function.__globals__.get("__name__", "")).partition(".")[0] not in APART


# --- Attention over packed sequences, as one attention with a mask ---------------------------------------------------
#
# `torch.nn.attention.varlen.varlen_attn` is an operator of its own, of GPUs alone, and what it sees is in its numbers.
# A trace has the mask in tensor operations in its place, on every device. In Hugging Face models encoders
# for images of any size (Qwen-VL, GLM-V) pack all patches in one row and tell attention where each image or window
# begins: `cu_seqlens`. Without FlashAttention they then split the row and attend image by image, so a trace holds for
# these images. Attention functions of the flash kind get the whole row and `cu_seqlens`; the library lets others
# register theirs. Those here say in tensor operations who sees whom, which pass `attention` reads as a mask.


VARLEN = "csc_flash_of_packed_rows"  # with "flash" in it, modules hand over the whole row
LIBRARY = "transformers.modeling_utils"
LIBRARY_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
FURTHER = ("sliding_window", "softcap", "s_aux")  # what the library's attention functions may be given beside
LONGEST = "max_seqlen"
CACHES = ("seqused_k", "block_table")  # what varlen_attn is given of a cache of keys and values


@contextmanager
def one_attention(model: nn.Module) -> Iterator[None]:
    """While it lasts, attention modules of the model that take `cu_seqlens` and ask the library for their attention
    function get the one of this file, as `varlen_attn` does.
    """
    library = sys.modules.get(LIBRARY)
    with ExitStack() as stack:
        stack.enter_context(varlen_attention(_varlen))
        if library is not None:
            library.ALL_ATTENTION_FUNCTIONS[VARLEN] = _attention
            stack.callback(library.ALL_ATTENTION_FUNCTIONS.pop, VARLEN)
            for kind in {type(module): None for module in model.modules() if _takes_packed_rows(module)}:
                stack.enter_context(patch.object(kind, "forward", _asking_for_it(kind.forward)))
        yield


def _takes_packed_rows(module: nn.Module) -> bool:
    return (
        not inspect.signature(type(module).forward).parameters.keys().isdisjoint(BEGINNINGS)
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
        self.config._attn_implementation = VARLEN
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
        seen = _seen(query.shape[2], cu_seq_lens_q, before=None, behind=0 if causal else None)[None, None]
    out = F.scaled_dot_product_attention(
        query, key, value, seen, dropout, seen is None and causal, scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _seen(number: int, begins: torch.Tensor, before: int | None, behind: int | None) -> torch.Tensor:
    """bool [number, number]: the keys that each query sees, those of its sequence. before, behind: at most so many of
    them on either side; None: all.
    """
    places = torch.arange(number, device=begins.device)
    sequence = torch.bucketize(places, begins[1:], right=True)
    seen = sequence[:, None] == sequence[None, :]
    if behind is not None:
        seen = seen & (places[None, :] <= (places[:, None] + behind if behind else places[:, None]))
    return seen if before is None else seen & (places[:, None] - places[None, :] <= before)


def _seen_across(
    numbers: tuple[int, int], begins: tuple[torch.Tensor, torch.Tensor], before: int | None, behind: int | None
) -> torch.Tensor:
    """bool [queries, keys]: the same where queries begin elsewhere than keys. The last of both stand at one place."""
    places = [torch.arange(number, device=of.device) for number, of in zip(numbers, begins)]
    sequences = [torch.bucketize(place, of[1:], right=True) for place, of in zip(places, begins)]
    left = [of[1:][sequence.clamp(max=len(of) - 2)] - place for of, sequence, place in zip(begins, sequences, places)]
    seen = sequences[0][:, None] == sequences[1][None, :]
    distance = left[1][None, :] - left[0][:, None]  # how far a key stands before a query
    if behind is not None:
        seen = seen & (distance >= -behind)
    return seen if before is None else seen & (distance <= before)


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    **further: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`varlen_attn`: query [T, H, D], key and value [S, G, D]; gives [T, H, D] and the logarithms of sums [H, T].
    InputError for a cache of keys.
    """
    cache = [name for name in CACHES if further.get(name) is not None]
    if cache or cu_seq_k is None:
        raise InputError(
            f"varlen_attn reads keys from a cache ({', '.join(cache) or 'cu_seq_k=None'}), which has no gradient",
            "varlen_attn", "give it the keys and values of the step itself while training",
        )  # fmt: skip
    before, behind = (None if size < 0 else size for size in window_size or (-1, -1))
    behind = 0 if is_causal else behind
    seen = (
        _seen(query.shape[0], cu_seq_q, before, behind)
        if cu_seq_q is cu_seq_k
        else _seen_across((query.shape[0], key.shape[0]), (cu_seq_q, cu_seq_k), before, behind)
    )
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, seen[None, None], scale=scale, enable_gqa=grouped)
    keys = k.repeat_interleave(query.shape[1] // key.shape[1], 1) if grouped else k
    scores = (q @ keys.mT).float() * (query.shape[-1] ** -0.5 if scale is None else scale)
    return out[0].transpose(0, 1).contiguous(), scores.masked_fill(~seen, -torch.inf).logsumexp(-1)[0]


# --- A model as a trace runs it, and as it was before afterwards: contexts -------------------------------------------


def caching(modules: Iterable[nn.Module]) -> list[Any]:
    """The configurations of HF models that say whether a key/value cache is filled."""
    have = (module for module in modules if "config" in vars(module) or hasattr(type(module), "config"))
    configs = {id(module.config): module.config for module in have if module.config is not None}
    return [config for config in configs.values() if hasattr(config, "use_cache")]


@contextmanager
def uncached(configurations: Sequence[Any]) -> Iterator[None]:
    """HF models fill a key/value cache while training unless told not to; it would be dead weight in the graph. With it
    they also take packed documents (positions that start again) for one sequence. configurations: see `caching`.
    """
    before = [config.use_cache for config in configurations]
    try:
        for config in configurations:
            config.use_cache = False
        yield
    finally:
        for config, was in zip(configurations, before):
            config.use_cache = was


def without_kv_cache(model: nn.Module) -> AbstractContextManager[None]:
    """A model whose configurations are so."""
    return uncached(caching(model.modules()))


@contextmanager
def as_traced(model: nn.Module, layers: Layers) -> Iterator[None]:
    """The model as a trace runs it, and as it was before afterwards."""
    with (
        training(model),
        without_kv_cache(model),
        one_attention(model),
        attributes_kept(model),
        layers.kept_out(),
        without_messages(),
        each_computed(),
        real_layouts(),
        plain_checkpoints(),
        tensors_of_data(),
        unchanged_modules(),
    ):
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """In training mode, as the user left it: a model in eval mode is switched as a whole, and back afterwards; in one
    that trains, modules that were put in eval mode (frozen batch norms) stay so.
    """
    before = {module: module.training for module in model.modules()}
    try:
        if not model.training:
            model.train()
        yield
    finally:
        for module, mode in before.items():
            if module.training is not mode:
                module.training = mode


# --- What a captured graph assumes of the sizes of its inputs --------------------------------------------------------
#
# A model that is traced with several samples is traced for one too, unless its code asks whether there is one. That
# torch takes a size for another one than 1 within an operation is no condition: it decides there what is a view and
# how results lie in memory, and the operations of the graph give for one sample what they give for several. `squeeze`
# alone does not.


def sizes_of(graph: fx.Graph, asked: Collection[Any] | None) -> SizeGuards:
    """The sizes of a flat graph's inputs, and the conditions under which it is the model."""
    sizes = {n.meta["role"][1]: n.meta["val"] for n in g.placeholders(graph) if n.meta["role"][0] == "input"}
    entries = {
        name: (str(val.dtype), tuple(size if isinstance(size, int) else size.node.expr for size in val.shape))
        for name, val in sizes.items()
    }
    ranges, relations = assumed_of_sizes(g.outputs(graph)[0].meta["val"].fake_mode)
    if asked is None:
        return SizeGuards(entries, ranges, tuple(relations))
    kept = [relation for relation in relations if relation in asked or not _is_not_one(relation)]
    several = {str(relation.lhs) for relation in asked if isinstance(relation, sympy.Ge) and relation.rhs == 2}
    ranges = {name: (1 if low == 2 and name not in several else low, high) for name, (low, high) in ranges.items()}
    return SizeGuards(entries, ranges, (*kept, *_squeezed(graph)))


def _is_not_one(relation: Any) -> bool:
    return isinstance(relation, sympy.Ne) and sympy.S.One in relation.args


def _squeezed(graph: fx.Graph) -> Iterator[Any]:
    """That dimensions which are asked to go if their size is 1 have another one."""
    for node in g.calls(graph):
        if g.op_name(node) == "aten::squeeze":
            val = node.all_input_nodes[0].meta["val"]
            named = node.args[1] if len(node.args) > 1 else range(val.dim())
            for dimension in named if isinstance(named, (list, tuple, range)) else [named]:
                if isinstance(val.shape[dimension], torch.SymInt):
                    yield sympy.Ne(val.shape[dimension].node.expr, 1)


# --- torch.export of the whole model, returning only the loss --------------------------------------------------------
#
# The step traced is `loss = model(**batch).loss` in training mode, with the sequence dimensions symbolic.


@dataclass(frozen=True)
class Exported:
    """deciding: the batch entries whose values the program was traced for, and the first lines that asked; host: what
    is known to run there now; calls: what the model called; asked: conditions on sizes that its code made, as sympy
    relations, None: not known;
    gradients: the line that asked autograd for some; asked_flags: the first that asked whether a tensor needs any;
    transformed: the first within a function that torch.func transforms;
    changes: what the model wrote to itself; written_beside: and beside it; files: that it read; undecided: whether it
    asked of the batch alone what was not answered; decisions: what was.
    """

    program: torch.export.ExportedProgram
    deciding: Mapping[str, str]
    host: HoistedCalls
    calls: tuple[Call, ...]
    asked: tuple[Any, ...] | None
    gradients: str
    asked_flags: str
    transformed: str
    changes: Changes
    written_beside: frozenset[Slot]
    files: Mapping[str, FileState]
    undecided: bool
    decisions: tuple[Decision, ...]


class Undecided(Exception):
    """Ends a trace that asked of its batch alone what was not answered: with answers it may go on."""


def _check_names(model: nn.Module, entries: Iterable[str]) -> None:
    """Refuse names that would not stay names: torch.export writes them, as they are, into code that it executes."""
    named = (model.named_modules, model.named_parameters, model.named_buffers)
    parts = (part for names in named for path, _ in names(remove_duplicate=False) for part in path.split("."))
    named_parts = ((part, "a module, parameter or buffer") for part in parts)
    for name, kind in chain(named_parts, ((entry, "a batch entry") for entry in entries)):
        if re.search(r"[\"'\\]", name) or not name.isprintable() or keyword.iskeyword(name):
            raise InputError(
                f"{kind} is called {name!r}, which torch.export would take for code",
                type(model).__name__,
                "rename it: no quotes, backslashes, line breaks or Python keywords",
            )


def export(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    extra: Mapping[str, Any],
    host: HoistedCalls,
    layers: Layers | None = None,
    rows: bool = False,
    decides: bool = False,
    axes: Mapping[str, int] = NOTHING_TOLD,
) -> Exported:
    """Export the training step of the model on an example microbatch, with these functions run on the host, and equal
    ones of these layers traced once (see csc.capture.dedup.layers). rows: the microbatch has numbers of rows (see
    csc.capture.values.row_index). decides: what is asked of the batch alone is answered, and the program is for these
    answers. axes: along which dimension samples lie, where it is told.

    Raises CscError with the user's source line; HostFunctionFound, NotHidden, CannotRepeat or Undecided if it
    has to be done again.
    """
    layers = Layers.of(model, ()) if layers is None else layers
    _check_names(model, tensors)
    # Export takes one tensor under two names (labels=input_ids) for one input, also in later batches where they differ.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def wrap() -> LossOnly:
        return LossOnly(model, extra, host, tensors, layers, rows, decides=decides)

    with symbolic_lengths(model) as is_symbolic:
        try:
            return _attempts(tensors, wrap, layers, axes)
        except CscError:
            if not is_symbolic():
                raise
    return _attempts(tensors, wrap, layers, axes)  # the model's code may need a plain number


def _attempts(
    tensors: Mapping[str, torch.Tensor], wrap: Callable[[], LossOnly], layers: Layers, axes: Mapping[str, int]
) -> Exported:
    """With numbers of samples symbolic; else with those at hand."""
    for symbolic, ones in ((symbolic_dimensions, True), (symbolic_dimensions, False), (dynamic_dimensions, True)):
        wrapped = wrap()
        try:
            exported = _exported(wrapped, tensors, partial(_along, symbolic, tensors, axes), layers, ones)
            wrapped.refuse_changing()
            return exported
        except (HostFunctionFound, NotHidden, CannotRepeat):
            raise
        except CscError as error:
            if wrapped.watching.undecided:
                raise Undecided from error
            raise
        except Exception as error:  # some code cannot do with a symbolic number of samples; then with the one at hand
            if layers.hidden:  # perhaps it fails for something that was hidden from it
                raise NotHidden(layers.hidden) from error
            autograd = wrapped.autograd
            last_asked = wrapped.watching.asked_last
            failed = untraceable(error, wrapped.model, last_asked, autograd.gradients, autograd.transformed)
            failed.__cause__ = error
            if wrapped.watching.undecided:
                raise Undecided from failed
    raise failed


def _along(
    symbolic: Callable[[torch.Tensor, int], tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    axes: Mapping[str, int],
    name: str,
) -> tuple[int, ...]:
    return symbolic(tensors[name], sample_axis(name, tensors, axes))


def _exported(
    wrapped: LossOnly,
    tensors: Mapping[str, torch.Tensor],
    symbolic: Callable[[str], tuple[int, ...]],
    layers: Layers,
    ones: bool,
) -> Exported:
    """ones: whether sizes may turn out to be 1, which not every operation takes without values."""
    automatic = torch.export.Dim.AUTO
    shapes = {name: dict.fromkeys(symbolic(name), automatic) or None for name in tensors}
    model = wrapped.model
    output = io.StringIO()  # when torch gives up it prints the half-traced graph, which helps nobody
    conditions: list[Any] = []
    with (
        as_traced(model, layers),
        no_new_registration_hooks(),
        one_is_no_special_size(ones),
        conditions_of_models(lambda condition, sizes: conditions.append(condition)),
        warnings.catch_warnings(),
        redirect_stderr(output),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its own pytree classes
        warnings.filterwarnings("ignore", "The tensor attribute", UserWarning)  # see attributes_kept
        exported = torch.export.export(
            wrapped,
            (dict(tensors),),
            dynamic_shapes=(shapes,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    sys.stderr.write(output.getvalue())
    calls = wrapped.recording.needed(wrapped.loss)
    deciding = dict(wrapped.watching.deciding)
    return Exported(
        exported,
        deciding,
        wrapped.host,
        calls,
        tuple(conditions) if ones else None,
        wrapped.autograd.gradients,
        wrapped.autograd.flags,
        wrapped.autograd.transformed,
        wrapped.changes,
        wrapped.written_beside,
        wrapped.files,
        wrapped.watching.undecided,
        tuple(wrapped.watching.alone.decisions),
    )
