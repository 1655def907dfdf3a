"""What takes long is asked once, where a test is about how its answer is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def asked_once(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> None:
    """`name` stands for the function, which is called the first time alone: later calls get its answer, and ask for the
    same numbers and words.
    """
    answers: list[tuple[list[Any], Any]] = []

    def first(*asked: Any) -> Any:
        plain = [one for one in asked if isinstance(one, str | float | int | None)]
        if not answers:
            answers.append((plain, function(*asked)))
        before, answer = answers[0]
        assert plain == before
        return answer

    monkeypatch.setattr(name, first)
