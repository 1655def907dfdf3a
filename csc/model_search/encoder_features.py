"""An encoder that runs on each picture or clip of sound once: what it makes of it is kept on disk.

Terms
  item      one picture or clip, a row of a batch's entry; it is known by its bytes
  pack      a file of safetensors with the features of the items that were encoded together, by their keys. It is there
            whole or not at all, so a run that is taken up encodes what is left as it would have been encoded

    remembered = RememberedEncoder(encoder, layer, directory)       in an encoder's place in a composed model
    remembered.passes                                               runs of the encoder for each item

Several processes may share the directory: one of them encodes at a time, and the others find what it made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from csc.model_search.ledger import LOCK, alone
from csc.runtime.weights import bytes_of

MEMORY = 2 * 10**9  # bytes of features that stay in memory, of one encoder
TOGETHER = 64  # items that are encoded in one run
PACK = "pack-"


class RememberedEncoder(nn.Module):
    """Gives what the encoder gives. encoder: of csc.compose, frozen. layer: of its hidden states; None: its last one.

    Its features are those of eval mode: an encoder that drops out makes others of one item each time.
    """

    def __init__(self, encoder: nn.Module, layer: int | None, directory: Path) -> None:
        super().__init__()
        self.encoder, self.config, self.layer = encoder, encoder.config, layer
        self._home = directory / _identity(encoder, layer)
        self._packs: dict[str, Path] = {}  # by the key of an item
        self._known: set[str] = set()  # names of packs
        self._rows = 0  # of all packs
        self._memory: dict[str, torch.Tensor] = {}
        self._held = 0

    def forward(self, items: torch.Tensor, output_hidden_states: bool = False) -> Any:
        """items: (items, *item shape). As the encoder's own: last_hidden_state, or hidden_states of the layer."""
        states = self.of(items)
        if output_hidden_states:
            return SimpleNamespace(hidden_states={self.layer: states})
        return SimpleNamespace(last_hidden_state=states)

    @torch.no_grad()
    def of(self, items: torch.Tensor) -> torch.Tensor:
        """(items, tokens, width), on the items' device."""
        keys = [_key(item) for item in items]
        if any(self._find(key) is None for key in dict.fromkeys(keys)):
            with alone(self._home / LOCK):
                self._look()
                self._encode({key: item for key, item in zip(keys, items) if self._find(key) is None})
        states = [self._find(key) for key in keys]
        return torch.stack([states for states in states if states is not None]).to(items.device)

    @property
    def passes(self) -> float:
        """How often an item was encoded, in the mean over items, by all processes and runs."""
        self._look()
        return self._rows / max(1, len(self._packs))

    def _encode(self, items: Mapping[str, torch.Tensor]) -> None:
        """New items, in runs of at most TOGETHER, a pack each."""
        training = self.encoder.training
        self.encoder.eval()
        try:
            named = list(items.items())
            for start in range(0, len(named), TOGETHER):
                part = named[start : start + TOGETHER]
                states = self._run(torch.stack([item for _, item in part]))
                self._write({key: states[number].contiguous() for number, (key, _) in enumerate(part)})
        finally:
            self.encoder.train(training)

    def _run(self, items: torch.Tensor) -> torch.Tensor:
        where = next(self.encoder.parameters())
        items = items.to(where.device, where.dtype)
        if self.layer is None:
            return self.encoder(items).last_hidden_state.cpu()
        return self.encoder(items, output_hidden_states=True).hidden_states[self.layer].cpu()

    def _write(self, states: Mapping[str, torch.Tensor]) -> None:
        name = PACK + hashlib.sha256("".join(states).encode()).hexdigest() + ".safetensors"
        building = self._home / f".{name}.{os.getpid()}"
        save_file({key: state.clone() for key, state in states.items()}, building)
        os.replace(building, self._home / name)
        self._known.add(name)
        self._rows += len(states)
        self._packs.update(dict.fromkeys(states, self._home / name))
        for key, state in states.items():
            self._remember(key, state.clone())

    def _find(self, key: str) -> torch.Tensor | None:
        known = self._memory.get(key)
        if known is not None or key not in self._packs:
            return known
        with safe_open(self._packs[key], framework="pt") as pack:
            states = pack.get_tensor(key)
        self._remember(key, states)
        return states

    def _remember(self, key: str, states: torch.Tensor) -> None:
        if self._held + states.nbytes <= MEMORY:
            self._memory[key] = states
            self._held += states.nbytes

    def _look(self) -> None:
        """What other processes, and earlier runs, have encoded."""
        for path in sorted(self._home.glob(f"{PACK}*")):
            if path.name not in self._known:
                with safe_open(path, framework="pt") as pack:
                    keys = list(pack.keys())
                self._packs.update(dict.fromkeys(keys, path))
                self._rows += len(keys)
                self._known.add(path.name)


def _identity(encoder: nn.Module, layer: int | None) -> str:
    """Of its code's class, configuration and weights, and of the layer."""
    config: Any = encoder.config
    digest = hashlib.sha256(json.dumps([type(encoder).__qualname__, config.to_json_string(), layer]).encode())
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor.detach().cpu().contiguous()))
    return digest.hexdigest()[:32]


def _key(item: torch.Tensor) -> str:
    digest = hashlib.sha256(f"{item.dtype} {list(item.shape)}\n".encode())
    digest.update(bytes_of(item.detach().cpu().contiguous()))
    return digest.hexdigest()
