"""Keys: everything that decides what is compiled changes them, nothing else does, and what cannot be told has none."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from csc.cache import keys
from csc.cache.keys import Opaque, function_key, model_key, program_key, trace_key
from csc.capture import sources
from csc.capture.guards import Guards
from csc.ir.capture_guards import capture_guards, exactly
from csc.ir.mesh import Mesh
from csc.ir.program import Options
from tests.launching import PATIENCE

ROOT = Path(__file__).parents[2]
NET = """
import torch
from torch import nn
import layers
SCALE = 2.0
UNUSED = 1
def twice(x): return SCALE * x
def thrice(x): return SCALE * x + x
class Config:
    def __init__(self): self.width, self.sizes, self.extra = 4, [4, 5], {"a": [1, 2.5, None]}
class Net(nn.Module):
    depth = 2
    def __init__(self):
        super().__init__()
        self.config, self.kinds = Config(), {"one", "two", "three"}
        self.first, self.second, self.drop = layers.Layer(), layers.Layer(), nn.Dropout(0.1)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
    def forward(self, x): return twice(self.second(self.drop(self.first(x) + self.table))).sum() * self.depth
    def other(self, x): return self.forward(x) + 1
"""
LAYERS = """
from torch import nn
from helper import act
class Layer(nn.Linear):
    def __init__(self): super().__init__(4, 4)
    def forward(self, x): return act(super().forward(x))
"""
HELPER = "import torch\nfunction = torch.tanh\ndef act(x): return function(x)\n"


def build(folder: Path, net: str = NET, layers: str = LAYERS, helper: str = HELPER) -> nn.Module:
    """A new Net out of these sources."""
    folder.mkdir(exist_ok=True)
    found = {}
    for name, text in (("helper", helper), ("layers", layers), ("net", net)):
        file = folder / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        found[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    torch.manual_seed(0)
    return found["net"].Net()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("net", "layers", "helper"):
        monkeypatch.setitem(sys.modules, name, None)
    return tmp_path


def _set(path: str, value: Any) -> Callable[[nn.Module], object]:
    owner, _, name = path.rpartition(".")

    def change(net: nn.Module) -> None:
        found: Any = net
        for part in owner.split(".") if owner else ():
            found = getattr(found, part)
        setattr(found, name, value)

    return change


def _wider(net: Any) -> None:
    net.second = type(net.first)()
    net.second.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))


def _replaced_in_torch(net: Any) -> None:
    net.drop.forward = lambda x: x


def _written_anew(net: Any) -> None:
    for one in (net, net.config, net.first, type(net.first)):
        for name, value in reversed([pair for pair in vars(one).items() if not pair[0].startswith("__")]):
            delattr(one, name)
            setattr(one, name, value)


MATTERS: dict[str, Callable[[Any], object]] = {
    "a number": _set("first.out_features", 5),
    "a module's mode": lambda net: net.drop.eval(),
    "dropout": _set("drop.p", 0.2),
    "the configuration": lambda net: net.config.extra["a"].append(3),
    "a set": lambda net: net.kinds.add("four"),
    "a buffer": lambda net: net.table.add_(1),
    "a parameter's dtype": _wider,
    "tying": lambda net: setattr(net.second, "weight", net.first.weight),
    "a hook": lambda net: net.first.register_forward_hook(lambda module, args, result: result * 2),
    "a method of an instance": _replaced_in_torch,
    "a method of a class": lambda net: setattr(type(net), "forward", lambda self, x: x.sum()),
    "its own method for another": lambda net: setattr(type(net), "forward", type(net).other),
    "a value of its class": lambda net: setattr(type(net), "depth", 3),
    "one function of its file for another": lambda net: setattr(sys.modules["net"], "twice", sys.modules["net"].thrice),
    "a function of torch for another": lambda net: setattr(sys.modules["helper"], "function", torch.relu),
    "a value of its file": lambda net: setattr(sys.modules["net"], "SCALE", 3.0),
    "an attribute of the class": lambda net: setattr(net, "slope", torch.nn.functional.gelu),
    "another module": lambda net: net.add_module("third", nn.Identity()),
}
NO_MATTER: dict[str, Callable[[Any], object]] = {
    "weights": lambda net: net.first.weight.data.mul_(2),
    "what is frozen": lambda net: net.requires_grad_(False),
    "all of it in eval mode": lambda net: net.eval(),
    "a value that no method reads": lambda net: setattr(sys.modules["net"], "UNUSED", 2),
    "gradients": lambda net: net(torch.ones(2, 4)).backward(),
    "an equal object": lambda net: setattr(net, "config", type(net.config)()),
    "the order of attributes": _written_anew,
}


@pytest.mark.parametrize("what", MATTERS)
def test_what_matters(what: str, folder: Path) -> None:
    net = build(folder)
    before = model_key(net, {})
    MATTERS[what](net)
    assert model_key(net, {}) != before


@pytest.mark.parametrize("what", NO_MATTER)
def test_what_does_not(what: str, folder: Path) -> None:
    net = build(folder)
    before = model_key(net, {})
    NO_MATTER[what](net)
    assert model_key(net, {}) == before


@pytest.mark.parametrize("part", ["net", "layers", "helper"])
def test_own_sources_count_wherever_they_lie(part: str, folder: Path) -> None:
    sources = {"net": NET, "layers": LAYERS, "helper": HELPER}
    before = model_key(build(folder / "a"), {})
    assert model_key(build(folder / "b"), {}) == before
    assert (
        model_key(build(folder / "c", **{**sources, part: sources[part].replace("return", "return -")}), {}) != before
    )


@pytest.mark.parametrize("what", ["csc", "torch", "default dtype", "plain entries"])
def test_what_is_around_it_matters(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = build(folder)
    before, extra = model_key(net, {"return_dict": True}), {"return_dict": True}
    if what == "csc":
        monkeypatch.setattr(keys, "own_sources", lambda: "another")
    elif what == "torch":
        versions = [[name, version + "1"] for name, version in keys._versions()]
        monkeypatch.setattr(keys, "_versions", lambda: versions)
    elif what == "default dtype":
        monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    else:
        extra = {"return_dict": False}
    assert model_key(net, extra) != before


class Doubling(TorchFunctionMode):
    factor = 2

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * self.factor if function is torch.tanh else result


@contextmanager
def switched(read: Callable[[], Any], write: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextmanager
def precise(value: str) -> Iterator[None]:
    """Torch keeps one more state for each kind of kernel, which the older function changes and does not set back."""
    kinds: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    before = [kind.fp32_precision for kind in kinds]
    with switched(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, value):
        yield
    for kind, was in zip(kinds, before, strict=True):
        kind.fp32_precision = was


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "precision of products": lambda: precise("high"),
    "TF32 of cuDNN": lambda: torch.backends.cudnn.flags(enabled=True, allow_tf32=not torch.backends.cudnn.allow_tf32),
    "determinism of cuDNN": lambda: torch.backends.cudnn.flags(enabled=True, deterministic=True),
    "oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "deterministic algorithms": lambda: switched(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "only one kernel of attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    "the fast path": lambda: switched(
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
    ),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to another dtype": lambda: torch.autocast("cpu", torch.float16),
    "a mode of functions": Doubling,
}


@pytest.mark.parametrize("what", SWITCHES)
def test_switches_of_torch_matter(what: str, folder: Path) -> None:
    net = build(folder)
    before = model_key(net, {})
    with SWITCHES[what]():
        during = model_key(net, {})
    assert during != before == model_key(net, {})


def test_options_and_batches(tmp_path: Path) -> None:
    options, batch = Options(), {"x": torch.ones(2, 3), "n": torch.tensor([1])}

    def trace(options: Options = options, deciding: tuple[str, ...] = (), **changes: Any) -> str:
        given = {**batch, **changes}
        values = {name: given[name] for name in deciding}
        captured = capture_guards(exactly(given), values, (), {}, None)
        return trace_key("model", Guards(captures=(captured,)).match(nn.Module(), given).key, options)

    def program(options: Options = options, frozen: bool = False) -> str:
        return program_key(trace(options), options, {"w": not frozen})

    profile = tmp_path / "mine.toml"
    profile.write_text("a = 1")
    own = replace(options, hardware=str(profile))
    for change in (
        {"mesh": Mesh(pp=2)}, {"mesh": Mesh(dp=2)}, {"freeze": ("w",)}, {"schedule": "1f1b"}, {"microbatches": 2},
        {"memory": 10}, {"recompute": (("*", "full"),)}, {"stages": (("a",), ("b",))}, {"placement": (0, 1)},
    ):  # fmt: skip
        assert trace(replace(options, **change)) == trace(), change
        assert program(replace(options, **change)) != program(), change
    for change in ({"mesh": Mesh(cp=2)}, {"precision": "bf16"}, {"keep_fp32": ("w",)}, {"loss_weight": "sum"}):
        assert trace(replace(options, **change)) != trace(), change
    assert program(frozen=True) != program()
    before = program(own)
    profile.write_text("a = 2")
    assert program(own) != before
    assert trace(x=torch.zeros(2, 3)) == trace() and trace(n=torch.tensor([2])) == trace()
    assert trace(x=torch.ones(2, 4)) != trace() and trace(x=torch.ones(2, 3).double()) != trace()
    assert trace(deciding=("n",), n=torch.tensor([2])) != trace(deciding=("n",))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (threading.Lock(), "first.odd"), (random.Random(), "first.odd"), ([sys.stdout], "first.odd"),
        (tokenizers.Tokenizer(tokenizers.models.BPE()), "first.odd is a tokenizers.Tokenizer"),  # says it is Python's
    ],
)  # fmt: skip
def test_what_cannot_be_told_has_no_key(value: Any, place: str, folder: Path) -> None:
    net = build(folder)
    net.first.odd = value  # type: ignore[union-attr, assignment]
    with pytest.raises(Opaque, match=place):
        model_key(net, {})


def test_a_function_out_of_no_file_has_no_key(folder: Path) -> None:
    net = build(folder)
    names: dict[str, Any] = {}
    exec("def act(x): return x", names)
    net.first.act = names["act"]  # type: ignore[union-attr, assignment]
    with pytest.raises(Opaque, match="in no file"):
        model_key(net, {})


def test_what_dynamo_has_compiled_before_does_not_count() -> None:
    before = model_key(nn.Linear(2, 2), {})
    torch.compile(torch.sin, backend="eager")(torch.ones(2))
    assert nn.Module.__init__.__module__ == "torch._dynamo.mutation_guard"
    assert model_key(nn.Linear(2, 2), {}) == before


@pytest.mark.slow
def test_a_model_that_dynamo_has_compiled_has_the_key_that_it_had() -> None:
    """It puts functions of its own into the modules whose code it compiles."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def model() -> nn.Module:
        return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=8))

    before = model_key(model(), {})
    ids = torch.ones(1, 4, dtype=torch.int64)
    torch.compile(model(), backend="eager")(input_ids=ids, labels=ids)
    assert model_key(model(), {}) == before


@pytest.mark.slow
@pytest.mark.long
def test_processes_have_the_same_keys() -> None:
    """Sets and addresses differ between processes; where weights come from, and whether there are any,
    does not count.
    """
    code = """
import contextlib, sys
import csc
from csc.cache.keys import model_key
from tests.models.hf import llava
with csc.meta_init() if sys.argv[1] else contextlib.nullcontext():
    model = llava()
model.config._name_or_path = model.name_or_path = sys.argv[1]
print(model_key(model, {}))
"""
    started = []
    for seed, path in (("7", "/a/path"), ("8", "")):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, path]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    (key, trouble), (other, more) = [one.communicate(timeout=PATIENCE) for one in started]
    assert key and key == other, trouble[-2000:] + more[-2000:]


def test_what_distributions_are_is_what_python_says() -> None:
    folder = Path(torch.__file__).parents[1]
    told = sources.installed_in(folder)
    tops = importlib.metadata.packages_distributions().keys() - {"__pycache__"}
    assert {top for top in tops if (folder / top).is_dir() or (folder / f"{top}.py").is_file()} <= told.keys()
    assert told["torch"].startswith(f"torch-{importlib.metadata.version('torch').partition('+')[0]}")


def wheel(folder: Path, name: str, version: str) -> Path:
    """A package as `pip install --target` leaves it; its file."""
    file = folder / name / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("VALUE = 1\n")
    told = folder / f"{name}-{version}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (told / "RECORD").write_text(f"{name}/__init__.py,,\n{told.name}/METADATA,,\n{told.name}/RECORD,,\n")
    return file


def test_what_is_installed_beside_site_packages_is_no_code_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target`: known by its version. What lies beside it and was not installed is the user's."""
    file, beside = wheel(tmp_path, "towers", "1.4"), tmp_path / "mine.py"
    beside.write_text("import towers\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert sources.distribution(str(file)) == "towers-1.4"
    assert not sources.distribution(str(beside))


def test_code_of_a_file_that_forward_never_reaches_does_not_count(folder: Path) -> None:
    """A training loop beside the model, say, in its file or in one that imports it."""
    before = model_key(build(folder / "a"), {})
    loop = "\ndef train(steps=10):\n    import time\n    return [Net() for _ in range(steps)], time.time()\n"
    assert model_key(build(folder / "b", net=NET + loop), {}) == before
    called = NET.replace("return twice(", "train(); return twice(") + loop
    with pytest.raises(Opaque, match=r"net\.py:\d+: train uses time"):
        model_key(build(folder / "c", net=called), {})


def test_functions_are_told_apart_by_what_they_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As csc.search compares `score` with that of the search that it goes on with."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # it is kept by the second and the size
    source = "LEAST = 0.5\ndef least(x): return max(x, LEAST)\ndef score(x): return least(x)\n"

    def key(text: str) -> str:
        file = folder / "scores.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location("scores", file)
        assert spec is not None and spec.loader is not None
        module = sys.modules["scores"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return function_key(module.score)

    try:
        assert key(source) == key(source + "# a line more\ndef other(): return 1\n") != ""
        assert len({key(source), key(source.replace("0.5", "0.6")), key(source.replace("max", "min"))}) == 3
        assert key("def score(x): return float(open(x).read())\n") == ""
    finally:
        sys.modules.pop("scores", None)
