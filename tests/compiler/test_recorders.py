"""Hooks that only record are no change of the model: a model without weights is traced once, not twice."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from transformers.utils.output_capturing import maybe_install_capturing_hooks

import csc
from csc.capture import capture as capturing
from csc.capture.batch import INSTALLED, only_records
from tests.models.hf import llava, llava_batch


def test_a_model_without_weights_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []
    traced = capturing._captured

    def counted(*args: Any) -> Any:
        traces.append(args)
        return traced(*args)

    monkeypatch.setattr(capturing, "_captured", counted)
    with csc.meta_init():
        model = llava()
    capturing.capture(model, llava_batch())
    assert len(traces) == 1
    assert not any(module._forward_hooks for module in model.modules())  # nothing stays behind


def test_what_records_and_what_does_not() -> None:
    tower = llava().model.vision_tower
    layer = next(module for path, module in tower.named_modules() if path.endswith("layers.0"))
    before = OrderedDict(layer._forward_hooks)
    maybe_install_capturing_hooks(tower)
    recorded = OrderedDict(layer._forward_hooks)
    assert recorded and getattr(tower, INSTALLED)
    assert only_records("_forward_hooks", before, recorded)
    assert not only_records("_forward_hooks", recorded, before)  # one was taken away
    assert not only_records("kept", before, recorded)
    layer.register_forward_hook(lambda module, args, output: output)
    assert not only_records("_forward_hooks", before, layer._forward_hooks)
