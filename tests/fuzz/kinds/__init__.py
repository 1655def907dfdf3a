"""The parts of random models, by name. ENCODERS bring in `pixels`; USES say how features pass a list of layers."""

from __future__ import annotations

from tests.fuzz.kinds.attention import kinds
from tests.fuzz.kinds.reading import read

LAYERS = read("plain") | read("views") | kinds() | read("autograd") | read("state")
LAYERS |= read("objects") | read("decisions") | read("modules")
LAYERS |= read("reads") | read("rows") | read("outside") | read("identity")
LOSSES, ENCODERS, USES = read("losses") | read("counted"), read("encoders"), read("uses")
SIMPLEST = "cross_entropy"
__all__ = ["ENCODERS", "LAYERS", "LOSSES", "SIMPLEST", "USES"]
