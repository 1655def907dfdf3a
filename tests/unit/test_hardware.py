"""Hardware profiles: those that come with csc, those of users, and what is wrong with them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csc.analysis.hardware import PROFILES, Hardware, Wire, hardware, names, toml_text
from csc.errors import InputError
from csc.simulation.pipeline import Link, Network

A100 = (PROFILES / "a100.toml").read_text()


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_the_profiles_of_the_house() -> None:
    assert names() == ["a100", "a40", "cpu", "h100", "h200"]
    profiles = [hardware(name) for name in names()]
    assert [p.name for p in profiles] == names()
    for profile in profiles:
        assert set(profile.peak) == {"float64", "float32", "float16", "bfloat16"}
        assert profile.within.bandwidth >= profile.between.bandwidth
        assert profile.rate("bfloat16") < profile.peak["bfloat16"]
        assert profile.reached_bandwidth < profile.bandwidth


def test_products_by_size() -> None:
    """As the table at its sizes, by the logarithm between them, as the nearest outside; attention has its own rate."""
    h100 = hardware("h100")
    full = h100.peak["bfloat16"] * h100.matmul_efficiency
    known = [(1.0, 0.25), (2.7e8, 0.25), (2.1e9, 0.58), (math.sqrt(2.1e9 * 8.6e9), 0.685), (3.4e10, 1.0), (1e15, 1.0)]
    for flops, share in known:
        assert h100.rate("bfloat16", "aten::mm", flops) == pytest.approx(full * share)
    assert h100.rate("bfloat16") == full
    assert h100.rate("bfloat16", "csc::attention", 1e6) == h100.rate("bfloat16", "csc::attention")
    assert hardware("a100").rate("bfloat16", "aten::mm", 1e6) == hardware("a100").rate("bfloat16")


def test_products_in_compiled_functions() -> None:
    """Of the dtypes that have another peak there; attention has its own kernel either way."""
    cpu = hardware("cpu")
    assert cpu.compiled["float32"] > cpu.peak["float32"] and set(cpu.compiled) == {"float32"}
    ratio = cpu.rate("float32", "aten::mm", compiled=True) / cpu.rate("float32", "aten::mm")
    assert ratio == pytest.approx(cpu.compiled["float32"] / cpu.peak["float32"])
    assert cpu.rate("bfloat16", "aten::mm", compiled=True) == cpu.rate("bfloat16", "aten::mm")
    assert hardware("h100").rate("float32", compiled=True) == hardware("h100").rate("float32")


def test_what_data_sheets_say() -> None:
    """Ratios that do not depend on how a figure is rounded."""
    a100, h100, h200, a40 = (hardware(name) for name in ("a100", "h100", "h200", "a40"))
    assert h200.peak == h100.peak and h200.memory > h100.memory and h200.bandwidth > h100.bandwidth
    assert h100.peak["bfloat16"] / a100.peak["bfloat16"] == pytest.approx(3.17, rel=0.01)
    assert a100.peak["bfloat16"] == 16 * a100.peak["float32"]
    assert a40.peak["float32"] / a40.peak["float64"] == pytest.approx(64, rel=0.01)


def test_the_network_of_the_simulator() -> None:
    profile = hardware("h100")
    network = Network(Link(*profile.within), Link(*profile.between), profile.ranks_per_node)
    inside, outside = network.link(0, 7), network.link(7, 8)
    assert inside.seconds(1e9) == pytest.approx(profile.within.latency + 1e9 / profile.within.bandwidth)
    assert outside.seconds(1e9) == pytest.approx(profile.between.latency + 1e9 / profile.between.bandwidth)


def test_a_file_of_the_user(tmp_path: Path) -> None:
    path = written(tmp_path, A100.replace('name = "a100"', "").replace("80e9", "40e9"))
    found = hardware(path)
    assert found == replace(hardware("a100"), name="mine", memory=40e9)
    assert hardware(str(path)) == found


positive = st.floats(min_value=1e-3, max_value=1e14)
share = st.floats(min_value=1e-6, max_value=1.0)
third = st.floats(min_value=0, max_value=1e6)


@given(
    text=st.text(), memory=positive, bandwidth=positive, efficiency=share, launch=st.floats(0, 1),
    measured=st.dictionaries(st.text("0123456789abcdef", min_size=16, max_size=16), st.tuples(third, third, third)),
    collective=st.none() | st.builds(Wire, st.floats(0, 1), positive), action=st.floats(0, 1),
    handling=st.floats(0, 1), compiled=st.dictionaries(st.sampled_from(["float32", "bfloat16"]), positive),
)  # fmt: skip
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, memory: float, bandwidth: float, efficiency: float,
    launch: float, measured: dict, collective: Wire | None, action: float, handling: float, compiled: dict,
) -> None:  # fmt: skip
    profile = replace(
        hardware("h100"), description=text, memory=memory, bandwidth=bandwidth, matmul_efficiency=efficiency,
        launch=launch, measured=measured, measured_on="here" if measured else "", collective=collective, action=action,
        handling=handling, compiled=compiled,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("profile") / "h100.toml"
    path.write_text(toml_text(profile), encoding="utf-8")
    assert hardware(path) == profile


WRONG = [
    ("bandwidth = 2039e9", "bandwidth = -1.0", "bandwidth", "more than 0"),
    ("bandwidth = 2039e9", "bandwidth = 0", "bandwidth", "more than 0"),
    ("bandwidth = 2039e9", "bandwidth = 2e15", "bandwidth", "at most 1e+15"),
    ("bandwidth = 2039e9", "bandwidth = nan", "bandwidth", "write a number"),
    ("bandwidth = 2039e9", "bandwidth = inf", "bandwidth", "write a number"),
    ("bandwidth = 2039e9", 'bandwidth = "fast"', "bandwidth", "write a number"),
    ("bandwidth = 2039e9", "bandwith = 2039e9", "bandwidth", "is missing"),
    ("memory = 80e9", "memory = true", "memory", "write a number"),
    ("memory = 80e9", "memory = 80e9\nmemoryy = 1", "memoryy", "did you mean memory?"),
    ("matmul_efficiency = 0.7", "matmul_efficiency = 1.2", "matmul_efficiency", "at most 1"),
    ("launch = 5e-6", "launch = -5e-6", "launch", "0 or more"),
    ("launch = 5e-6", "launch = 5", "launch", "at most 1"),
    ("bfloat16 = 312e12", "", "peak.bfloat16", "is missing"),
    ("bfloat16 = 312e12", "bfloat16 = 0.0", "peak.bfloat16", "more than 0"),
    ("bfloat16 = 312e12", "bfloat16 = 312e12\nint4 = 1e12", "peak.int4", "remove it"),
    ("ranks_per_node = 8", "ranks_per_node = 0", "network.ranks_per_node", "whole number"),
    ("ranks_per_node = 8", "ranks_per_node = 8.0", "network.ranks_per_node", "whole number"),
    ("latency = 10e-6", "latency = -1.0", "network.within.latency", "0 or more"),
    ("bandwidth = 25e9", "bandwidth = 1e16", "network.between.bandwidth", "at most 1e+15"),
    ("[peak]", "[peak_]", "peak", "is missing"),
    ("[peak]", "[network.collective]\nlatency = 1e-5\n[peak]", "network.collective.bandwidth", "is missing"),
    ("[peak]", "[network.colective]\nlatency = 1e-5\n[peak]", "network.colective", "did you mean collective?"),
    ("launch = 5e-6", "launch = 5e-6\naction = -1e-6", "action", "0 or more"),
    ("[peak]", "[matmul]\nflops = [1e9, 1e10]\nshare = [0.5, 1.5]\n[peak]", "matmul.share", "shares at most 1"),
    ("[peak]", "[matmul]\nflops = [1e10, 1e9]\nshare = [0.5, 1.0]\n[peak]", "matmul.flops", "one size for each"),
    ("[peak]", "[matmul]\nflops = [1e9]\nshare = [0.5, 1.0]\n[peak]", "matmul.flops", "one size for each"),
    ("[peak]", "[matmul]\nflops = []\nshare = []\n[peak]", "matmul.flops", "write numbers above 0"),
    ("[peak]", "[matmul]\nflops = [1e9]\n[peak]", "matmul.share", "is missing"),
    ("[peak]", "[measured]\nabc = [1.0, 2.0]\n[peak]", "measured.abc", "seconds of F, B and W"),
    ("[peak]", "[measured]\nabc = [1.0, -2.0, 0.0]\n[peak]", "measured.abc", "seconds of F, B and W"),
    ("[peak]", "[compiled]\nfloat32 = 0.0\n[peak]", "compiled.float32", "more than 0"),
    ("[peak]", "[compiled]\nfloat31 = 1e12\n[peak]", "compiled.float31", "remove it"),
    ("[peak]", 'peak = 3\n[peak_]', "peak", "is no table"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "field", "remedy"), WRONG)
def test_wrong_figures(tmp_path: Path, before: str, after: str, field: str, remedy: str) -> None:
    assert before in A100
    path = written(tmp_path, A100.replace(before, after, 1))
    with pytest.raises(InputError) as error:
        hardware(path)
    assert str(path) in str(error.value)
    assert f"the field {field} " in str(error.value)
    assert remedy in str(error.value)


def test_no_profile_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean h100"):
        hardware("h1000")
    with pytest.raises(InputError, match="cannot read"):
        hardware(tmp_path / "none.toml")
    with pytest.raises(InputError, match="no TOML"):
        hardware(written(tmp_path, "name = a100"))


def test_a_dtype_that_the_profile_lacks() -> None:
    profile: Hardware = hardware("cpu")
    assert math.isfinite(profile.rate("float32"))
    with pytest.raises(InputError, match=r"hardware cpu: .*float8_e4m3fn.*peak\.float8_e4m3fn"):
        profile.rate("float8_e4m3fn")
