"""The examples run as their docstrings say, and give the same losses on one process and on several."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests import launching
from tests.kept_traces import kept_traces


def output(path: str, *arguments: str) -> str:
    """What an example writes in one process of its own."""
    return launching.alone(launching.run_file, path, *arguments)


def losses(path: str, step: int = 9) -> list[float]:
    return losses_in(output(path), step)


def losses_in(said: str, step: int = 9) -> list[float]:
    return [float(number) for number in re.findall(rf"step {step}: loss ([\d.]+)", said)]


@pytest.mark.gloo
def test_llava_trains_alike_in_one_process_and_on_ranks() -> None:
    with kept_traces():
        alone = losses("examples/llava.py")
        ranks = losses_in("".join(launching.script(3, "examples/llava.py")))
    assert len(alone) == 1 and ranks == alone  # the first rank alone prints
    assert alone[0] < 4.6  # ten steps from log(100) = 4.605


@pytest.mark.long
@pytest.mark.gloo
def test_packed_documents_train_alike_in_one_process_and_on_ranks() -> None:
    """Four context-parallel ranks, other documents in every step."""
    alone = losses("examples/packed.py")
    ranks = losses_in("".join(launching.script(4, "examples/packed.py")))
    assert len(alone) == len(ranks) == 1
    assert ranks == pytest.approx(alone, abs=2e-3)  # gloo adds four gradients in an order of its own
    assert alone[0] < 3.5  # ten steps from log(100) = 4.605


@pytest.mark.long
@pytest.mark.gloo
def test_a_composed_model_learns_to_see_and_hear() -> None:
    said = output("examples/compose.py")
    shares = re.findall(r"held out, (\w+): digits (\d+)%, pitches (\d+)%", said)
    assert [moment for moment, _, _ in shares] == ["before", "after"]
    assert all(int(share) <= 45 for share in shares[0][1:])
    assert int(shares[1][1]) >= 70 and int(shares[1][2]) >= 95
    alone = re.findall(r"step 20: loss ([\d.]+)", said)
    ranks = launching.script(3, "examples/compose.py", "21")
    assert losses_in("".join(ranks), step=20) == [float(loss) for loss in alone]


@pytest.mark.long
@pytest.mark.slow
def test_lora_reads_digits_and_its_adapters_come_back() -> None:
    shown = output("examples/lora.py")
    assert "build/lora_adapter read into a new model: the same bits" in shown
    (accuracy,) = re.findall(r"accuracy on held-out scans: ([\d.]+)", shown)
    assert float(accuracy) > 0.6  # a guess is right one time in ten


@pytest.mark.long
@pytest.mark.gloo
def test_adapters_on_a_quantised_base_learn_and_come_back() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install 'csc-compiler[quantised]')")
    shown = output("examples/qlora.py")
    assert "build/qlora_adapter read into a new model: the same bits" in shown
    assert losses_in(shown, step=29)[0] < losses_in(shown)[0]
    assert losses_in("".join(launching.script(2, "examples/qlora.py"))) == losses_in(shown)


@pytest.mark.long
@pytest.mark.gloo
def test_the_demo_learns_to_read_and_says_what_to_open(tmp_path: Path) -> None:
    said = output("examples/digits/demo.py", "--output", str(tmp_path))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["accuracy_before"] < 0.05 and 0.4 < result["accuracy_phase1"] < 0.7
    assert result["accuracy_phase2"] >= 0.85 and result["params_missing"] == []
    assert result["parity_grad_rel_max"] < 1e-5
    assert said.index("against eager PyTorch") < said.index("encoder    step")  # csc before any training
    for name in ("answers.svg", "timeline.html", "program/phase2/rank_1.py", "program/phase2/schedule.txt"):
        assert (tmp_path / name).is_file() and str((tmp_path / name).resolve()) in said
    assert said.count("measured, median of 20 warm steps") == 1
    texts = [node.text or "" for node in ElementTree.parse(tmp_path / "answers.svg").iter() if node.text]
    assert sum(text.startswith("before: ") for text in texts) == 6


def test_the_picture_of_answers_marks_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(launching.ROOT / "examples" / "digits"))
    data, picture = importlib.import_module("data"), importlib.import_module("picture")
    _, scans = data.split_scans()
    images, digits = data.held_out_images(scans, rounds=1)
    rows = torch.tensor([0, 2])
    right = data.ask_about_images(digits[:2], rows)[0][:, data.PROMPT_LENGTH :]
    wrong = right.clone()
    wrong[1, 0] = data.VOCABULARY["<eos>"]
    drawn = ElementTree.fromstring(picture.answers_picture(images[:2], rows, digits[:2], {"then": wrong, "now": right}))
    lines = [(node.get("class"), node.text) for node in drawn.iter() if node.get("class") in ("right", "wrong")]
    truths = [" ".join(map(str, digits[place].view(3, 3)[row].tolist())) for place, row in enumerate(rows.tolist())]
    assert lines == [
        ("right", f"then: {truths[0]}"), ("right", f"now: {truths[0]}"),
        ("wrong", "then: nothing"), ("right", f"now: {truths[1]}"),
    ]  # fmt: skip


@pytest.mark.slow
def test_an_edited_rank_file_and_an_edited_order_run() -> None:
    with kept_traces():
        shown = output("examples/edit_rank_file.py")
    assert "edited files: rank_1.py, schedule.txt" in shown
    assert len(re.findall(r"rank 1: model\.language_model\.layers\.\d gives a norm of [\d.]+", shown)) == 4
    assert "gradients: the same bits" in shown
    assert re.search(r"refused: .*schedule\.txt", shown)


@pytest.mark.long
@pytest.mark.slow
def test_70_billion_parameters_for_1024_ranks_take_no_gigabyte(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from csc.commands.main import main; main()",
        "compile",
        "examples/scale.py:llava_70b",
        "--fake",
        "--json",
        "--rank",
        "617",
        "-o",
        str(tmp_path / "program"),
    ]
    done = subprocess.run(command, cwd=launching.ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert (said["ranks"], said["emitted"]) == (1024, [617])
    assert said["timings"]["peak_memory"] < 1e9
    lines = (tmp_path / "program" / "rank_617.py").read_text().splitlines()
    assert lines[0].startswith('"""Rank 617 of 1024') and len(lines) < 40


@pytest.mark.long
@pytest.mark.gloo
def test_a_script_for_hf_trainer_is_its_eager_self_on_four_ranks(tmp_path: Path) -> None:
    """Images of different size, adapters, two replicas of two stages; saved halfway, and resumed to the bit."""

    def logged(folder: str) -> list[float]:
        state = json.loads((tmp_path / folder / "checkpoint-6" / "trainer_state.json").read_text())
        return [row["loss"] for row in state["log_history"]]

    def adapters() -> bytes:
        return (tmp_path / "ranks" / "checkpoint-6" / "adapter_model.safetensors").read_bytes()

    output("examples/trainer.py", "--eager", "--output", str(tmp_path / "eager"))
    launching.script(4, "examples/trainer.py", "--output", str(tmp_path / "ranks"))
    assert len(logged("ranks")) == 6
    assert logged("ranks") == pytest.approx(logged("eager"), rel=1e-5)
    whole = adapters()
    (tmp_path / "ranks" / "checkpoint-6").rename(tmp_path / "before")
    launching.script(4, "examples/trainer.py", "--output", str(tmp_path / "ranks"), "--resume")
    assert adapters() == whole


@pytest.mark.long
def test_a_search_finds_a_pair_that_spells_digits(tmp_path: Path) -> None:
    """Both sides of the best pair have learnt something: an untrained ViT or a Llama without text spells worse."""
    example = Path(__file__).parents[2] / "examples" / "search" / "digits.py"
    command = [sys.executable, "-c", "from csc.commands.main import main; main()", "search", str(example)]
    done = subprocess.run(
        [*command, "--directory", "run", "--samples", "512", "--json", "--page", "page.html"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    best = found["rows"][0]
    assert len(found["rows"]) == 24 and best["score"] > 0.7 and best["llm"].endswith("-text")
    assert best["encoder"] != "vit-untrained" and found["counts"]["samples"] <= found["budget"]
    assert "<svg" in (tmp_path / "page.html").read_text()


def logged_losses(said: str) -> list[float]:
    """Of transformers' Trainer, of training and evaluation in order."""
    return [float(number) for number in re.findall(r"'(?:eval_)?loss': '?([\d.]+)", said)]


@pytest.mark.long
@pytest.mark.gloo
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_trainers_of_trl_have_their_own_losses_compiled(name: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="TRL is not installed (pip install trl==1.16.0)")
    eager = output(f"examples/{name}.py", "--eager", "--output", str(tmp_path / "eager"))
    alone = output(f"examples/{name}.py", "--output", str(tmp_path / "csc"))
    ranks = "".join(launching.script(2, f"examples/{name}.py", "--output", str(tmp_path / "ranks")))
    expected = logged_losses(eager)
    assert len(expected) >= 6 and logged_losses(alone) == pytest.approx(expected, abs=2e-3)
    assert logged_losses(ranks) == logged_losses(alone)


@pytest.mark.long
def test_generators_behind_language_models_train_as_in_eager_pytorch() -> None:
    """A flow head on kept latents, with draws in forward, and a language model of image tokens."""
    pytest.importorskip("diffusers", reason="diffusers is not installed (pip install diffusers==0.42.1)")
    said = output("examples/generator.py")
    assert len(re.findall(r"(?:flow|tokens) step \d: loss", said)) == 12
    assert "flow step 5" in said and "4.0 from disk, 0.0 encoded" in said


@pytest.mark.gloo
def test_conversations_train_alike_in_eager_pytorch_and_on_ranks(tmp_path: Path) -> None:
    """Some without pictures, of unequal lengths, with several turns."""
    rows = [
        {"conversations": [{"from": who, "value": text} for who, text in zip(("human", "gpt") * 2, turns)], **more}
        for turns, more in (
            (("<image> what colour is it ?", "red"), {"images": ["red.png"]}),
            (("what is a colour ?", "it is a word", "which ?", "blue"), {"system": "answer in a word"}),
            (("<image> <image> what colour is it ?", "blue and red"), {"images": ["blue.png", "red.png"]}),
            (("is it the picture ?", "it is"), {}),
        )
    ]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    for colour in ("red", "blue"):
        Image.new("RGB", (20, 30), colour).save(tmp_path / f"{colour}.png")
    given = "examples/conversations.py", "--data", str(tmp_path / "data.json"), "--output"
    eager = output(*given, str(tmp_path / "eager"), "--eager")
    ranks = "".join(launching.script(2, *given, str(tmp_path / "ranks")))
    expected = losses_in(eager, 5)
    assert len(expected) == 1 and losses_in(ranks, 5) == pytest.approx(expected, abs=2e-4)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("eager", "ranks"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"conversations": [{"from": "human", "value": "what is it ?"}]}, "gpt says something"),
        ({"conversations": [{"from": "user", "value": "what"}, {"from": "gpt", "value": "it"}]}, "turns are from"),
        ({"conversations": [{"from": "gpt", "value": "<image>"}]}, "says <image> 1 times and lists 0 images"),
    ],
)
def test_what_is_no_conversation_is_named(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps([{"conversations": [{"from": "gpt", "value": "it"}]}, row]))
    with pytest.raises(ValueError, match=f"conversation 1: .*{said}"):
        runpy.run_path("examples/conversations.py")["conversations"](file)
