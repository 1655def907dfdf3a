"""Lengths of samples: the forms in which they are given, and what is said of those that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from csc.balance.sample_costs import of_file, read
from csc.errors import InputError


class Columns:
    """As a Hugging Face dataset: columns by name, rows by number."""

    column_names = ("text", "n_tokens", "n_tiles")

    def __init__(self) -> None:
        self.loaded = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return {"n_tokens": [5, 7, 9], "n_tiles": [1, 0, 2]}[key]
        self.loaded += 1
        return {}


def test_columns_names_and_functions_say_the_same(tmp_path: Path) -> None:
    dataset = Columns()
    np.savez(tmp_path / "lengths.npz", tiles=[1, 0, 2], tokens=[5, 7, 9])
    found = [
        read({"tokens": "n_tokens", "tiles": "n_tiles"}, dataset),
        read({"tiles": torch.tensor([1, 0, 2]), "tokens": np.array([5, 7, 9])}, dataset),
        read(lambda i: {"tokens": [5, 7, 9][i], "tiles": [1, 0, 2][i]}, dataset),
        of_file(tmp_path / "lengths.npz"),
    ]
    for one in found:
        assert one.tokens.tolist() == [5, 7, 9] and one.units.tolist() == [[1], [0], [2]] and one.names == ("tiles",)
    assert read("n_tokens", dataset).units.shape == (3, 0)
    assert read(lambda i: 4, dataset).tokens.tolist() == [4, 4, 4]
    assert dataset.loaded == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tokens": [1, 2]}, r"there are 2 values of 'tokens', and the dataset has 3 samples"),
        ({"tokens": [1, float("nan"), 2]}, r"sample 1 has nan tokens"),
        ({"tokens": [1, 2, -3]}, r"sample 2 has -3 tokens"),
        ({"tokens": [1, 2, 2.5]}, r"sample 2 has 2.5 tokens"),
        ({"tokens": [1, 0, 2]}, r"sample 1 has no tokens"),
        ({"tokens": [1, 1, 2], "tiles": [0, 0, float("inf")]}, r"sample 2 has inf tiles"),
        ({"tiles": [1, 1, 2]}, r"there is no column 'tokens' among tiles"),
        ({"tokens": ["a", "b", "c"]}, r"holds something that is no number"),
        ({"tokens": [[1], [2], [3]]}, r"there are 3 x 1 values of 'tokens'"),
        ("length", r"the dataset has no column 'length' for tokens.*text, n_tokens, n_tiles"),
        (lambda i: {"tokens": 1, **({"tiles": 2} if i else {})}, r"lengths gives tokens, tiles for sample 1"),
    ],
)
def test_what_are_no_lengths(given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(given, Columns())


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("tokens")
    with pytest.raises(InputError, match="it holds no columns"):
        of_file(tmp_path / "text.npz")
    with pytest.raises(InputError, match="it holds no columns"):
        of_file(tmp_path / "nothing.npz")
    np.savez(tmp_path / "objects.npz", tokens=np.array([{}], dtype=object))
    with pytest.raises(InputError, match="it holds no columns"):  # nothing is unpickled
        of_file(tmp_path / "objects.npz")
    np.savez(tmp_path / "uneven.npz", tokens=[1, 2], tiles=[1])
    with pytest.raises(InputError, match="there are 1 values of 'tiles', and 'tokens' has 2 samples"):
        of_file(tmp_path / "uneven.npz")
