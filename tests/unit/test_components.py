"""Components: what the module tree calls the parts of a model."""

from __future__ import annotations

from torch import nn

from csc.capture.module_tree import describe


class Tower(nn.Module):
    """Layers, and what is handed out of their middle, each in a list of its own."""

    def __init__(self, lists: int) -> None:
        super().__init__()
        for index in range(lists):
            layers = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
            self.add_module(f"list_{index}", nn.ModuleList(layers))
        self.norm = nn.LayerNorm(4)


def components(model: nn.Module) -> set[str]:
    return {info.component for path, info in describe(model).items() if "list" in path or "norm" in path}


def test_a_tower_with_several_lists_is_one_component() -> None:
    assert components(nn.ModuleDict({"visual": Tower(2), "language_model": Tower(1)})) == {"visual", "language_model"}


def test_lists_of_a_model_that_holds_all_layers_are_components() -> None:
    assert components(nn.ModuleDict({"model": Tower(2)})) == {"list_0", "list_1", "norm"}


def test_layers_of_two_classes_in_turns_are_one_list() -> None:
    """A list of towers, one of each class, is none."""
    turns = nn.ModuleList(
        make() for _ in range(2) for make in (lambda: Tower(1), lambda: nn.TransformerEncoderLayer(4, 1))
    )
    infos = describe(nn.ModuleDict({"text": nn.ModuleDict({"list": turns}), "norm": nn.LayerNorm(4)}))
    assert [infos[f"text.list.{i}"].role for i in range(4)] == ["layer"] * 4
    towers = nn.ModuleList([Tower(1), nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1), 2)])
    assert describe(nn.ModuleDict({"towers": towers}))["towers.0"].role == "container"


def test_parts_around_towers_are_components() -> None:
    towers = {"encoders": nn.ModuleDict({"vision": Tower(1), "audio": Tower(2)}), "norm": nn.LayerNorm(4)}
    assert components(nn.ModuleDict(towers)) == {"vision", "audio", "norm"}
