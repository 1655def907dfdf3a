"""Errors that a first user meets: what they say, by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import csc
from csc.errors import InputError, MissingPackage
from tests.compiler import small

ROOT = Path(__file__).parents[2]


def test_labels_of_another_length_are_named() -> None:
    batch = small.text_batch(2, 8)
    short = {**batch, "labels": batch["labels"][:, :-3]}
    with pytest.raises(InputError) as caught:
        csc.compile(small.text(2), example=short, cache=False)
    assert "'labels' is [2, 5] and 'tokens' [2, 8], which do not fit together" in str(caught.value)
    assert "-100" in caught.value.remedy
    compiled = csc.compile(small.text(2), example=batch, check=False, cache=False)
    with pytest.raises(InputError, match=r"'labels' is .* and 'tokens' .* do not fit together"):
        compiled.train_step(short)
    with pytest.raises(InputError, match=r"the batch holds nothing.*a microbatch at least"):
        compiled.train_step([])
    nothing = {name: one[:0] for name, one in batch.items()}
    for given, said in ((nothing, "the batch has no samples"), ([batch, nothing], "microbatch 1 has no samples")):
        with pytest.raises(InputError, match=said):
            compiled.train_step(given)
    compiled.train_step(batch)  # the next one is in order


def test_options_that_are_not_options() -> None:
    with pytest.raises(InputError, match=r"no option exmaple.*did you mean example"):
        csc.compile(small.text(2), exmaple=small.text_batch(2, 8))
    compiled = csc.compile(lambda: small.text(2), example=small.text_batch(2, 8))
    with pytest.raises(InputError, match=r"no option timeout.*give it to csc\.compile"):
        compiled.with_options(timeout=5.0)
    with pytest.raises(InputError) as caught:
        compiled.with_options(microbatch=2)
    assert "did you mean microbatches" in str(caught.value) and "forward_only" not in str(caught.value)


def test_a_package_that_is_missing_names_its_extra() -> None:
    code = (
        "import sys, importlib\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('transformers', 'lightning'): raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Without())\n"
        "for module in ('hf', 'lightning'):\n"
        "    try: importlib.import_module('csc.integrations.' + module)\n"
        "    except ImportError as error: print(type(error).__name__, error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600)
    for module, package, extra in (("hf", "transformers", "hf"), ("lightning", "lightning", "lightning")):
        assert f"MissingPackage csc.integrations.{module}: {package} is not installed" in found.stdout, found.stderr
        assert f'pip install "{package}>=' in found.stdout and f'pip install -e ".[{extra}]"' in found.stdout


def test_a_file_that_imports_what_is_missing(tmp_path: Path) -> None:
    from csc.commands.target import load_target

    path = tmp_path / "train.py"
    path.write_text("raise ModuleNotFoundError('No module', name='peft.tuners')\n")
    with pytest.raises(MissingPackage, match=r"train\.py:1.*peft is not installed.*pip install \"peft>=.*\[hf\]"):
        load_target(f"{path}:model")
    path.write_text("import nothing_of_that_name\n")
    with pytest.raises(InputError, match="No module named 'nothing_of_that_name'"):
        load_target(f"{path}:model")
