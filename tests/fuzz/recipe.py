"""A random model as data: which parts, in which order, trained how. `source` makes it a file that runs.

    random_recipe(random, kinds) -> Recipe
    smaller(recipe) -> each recipe with one thing less: what shrinking tries

Terms: a *part* is a list of layers of one kind; a *setting* is how csc is asked to train the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from random import Random

from tests.fuzz.kinds import ENCODERS, LAYERS, LOSSES, SIMPLEST, USES
from tests.fuzz.setting import Setting, random_setting

# Kinds that show in several steps: what Python reads of a batch, rows by number, state that changes, layers told apart.
SEVERAL = ("read_*", "rows_*", "outside_*", "identity_*", "entropy_*", "pictures*")
TOKENS = (
    "cross_entropy",
    "transposed",
    "module",
    "nll",
    "log_softmax",
    "sum_by_count",
    "each_masked",
)  # means over labels


@dataclass(frozen=True)
class Part:
    """kind: a key of LAYERS. use: a key of USES, how features pass the layers. layers: how many, unequal in nothing but
    their weights and place. skip: the features in front of the part are added behind the last part.
    """

    kind: str = "linear"
    use: str = "residual"
    layers: int = 1
    skip: bool = False


@dataclass(frozen=True)
class Recipe:
    """parts: in order. encoder: a key of ENCODERS. tied: head and embedding share their weight. flat: layers stand in
    the model itself instead of in a submodule. seed: of weights and batches.
    """

    parts: tuple[Part, ...]
    loss: str = SIMPLEST
    encoder: str = "none"
    tied: bool = False
    flat: bool = True
    norm: bool = True
    seed: int = 0
    settings: tuple[Setting, ...] = (Setting(),)

    @property
    def features(self) -> frozenset[str]:
        """What the recipe is made of, for telling failures apart."""
        found = {part.kind for part in self.parts} | {
            f"use {part.use}" for part in self.parts if part.use != "residual"
        }
        found |= {"skip"} if any(part.skip for part in self.parts) else set()
        found |= {"layers"} if any(part.layers > 1 for part in self.parts) else set()
        found |= {"tied"} if self.tied else set()
        found |= {f"loss {self.loss}"} if self.loss != SIMPLEST else set()
        return frozenset(found | ({f"encoder {self.encoder}"} if self.encoder != "none" else set()))


def random_recipe(random: Random, without: Sequence[str] = (), settings: int = 8, favour: Sequence[str] = ()) -> Recipe:
    """A recipe of one to four parts. without: globs over the names of kinds, losses, encoders and uses that are left
    out; favour: of those that every second choice is made of.
    """

    def choose(names: Iterable[str], plain: str, share: float) -> str:
        allowed = [name for name in names if not _matches(name, without)]
        liked = [name for name in allowed if _matches(name, favour)]
        if liked and random.random() < 0.5:
            return random.choice(liked)
        return plain if random.random() < share or not allowed else random.choice(allowed)

    attention = [name for name in LAYERS if name.startswith("attention")]
    others = [name for name in LAYERS if not name.startswith("attention")]
    parts = [
        Part(
            kind=choose(attention if random.random() < 0.3 else others, "gelu", 0.1),
            use=choose(USES, "residual", 0.6),
            layers=random.choice([1, 1, 1, 2, 3]),
            skip=random.random() < 0.1,
        )
        for _ in range(random.choice([1, 2, 2, 3, 3, 4]))
    ]
    loss, encoder = choose(LOSSES, SIMPLEST, 0.5), choose(ENCODERS, "none", 0.7)
    if loss.startswith("pictures") and not encoder.startswith("pictures"):
        encoder = "pictures"
    return Recipe(
        parts=tuple(parts),
        loss=loss,
        encoder=encoder,
        tied=random.random() < 0.15,
        flat=random.random() < 0.6,
        norm=random.random() < 0.7,
        seed=random.randrange(1000),
        settings=tuple(
            random_setting(random, encoder != "none", loss in TOKENS and not encoder.startswith("pictures"))
            for _ in range(settings)
        ),
    )


def each_alone(without: Sequence[str] = (), favour: Sequence[str] = ()) -> list[Recipe]:
    """Every kind in a recipe of its own, a list of two layers where it is a layer. Attention is spread too, and what
    shows in several steps has several. favour: these alone.
    """
    ways = (Setting(pp=2, microbatches=2, steps=True),)
    spread = (*ways, Setting(cp=2, microbatches=2))
    mixed = (
        Setting(pp=2, microbatches=2, forms=("first", "second", "both"), moved=True),
        Setting(dp=2, forms=("second", "first", "turned")),
        Setting(microbatches=2, forms=("second", "ignored", "both"), moved=True, tp=2),
        Setting(microbatches=4, dp=2, zero=3, forms=("plain", "single"), written="frozen"),
        Setting(microbatches=2, cp=2, forms=("first", "hollow")),
    )

    def settings(name: str, others: tuple[Setting, ...]) -> tuple[Setting, ...]:
        return mixed if _matches(name, SEVERAL) else others

    def left(names: Iterable[str]) -> list[str]:
        return [name for name in names if not _matches(name, without) and (not favour or _matches(name, favour))]

    recipes = [
        Recipe((Part(kind, layers=2),), settings=settings(kind, spread if "attention" in kind else ways))
        for kind in left(LAYERS)
    ]
    recipes += [
        Recipe(
            (Part("attention_is_causal"),),
            loss=loss,
            encoder="pictures" if loss.startswith("pictures") else "none",
            settings=settings(loss, spread),
        )
        for loss in left(LOSSES)
    ]
    recipes += [
        Recipe((Part("attention_is_causal"),), encoder=encoder, settings=settings(encoder, spread))
        for encoder in left(ENCODERS)
    ]
    return recipes + [Recipe((Part("attention_is_causal", use, 2),), settings=spread) for use in left(USES)]


def _matches(name: str, globs: Sequence[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Recipes with one thing less, the largest steps first."""
    for place, part in enumerate(recipe.parts):
        rest = recipe.parts[:place], recipe.parts[place + 1 :]
        if len(recipe.parts) > 1:
            yield replace(recipe, parts=rest[0] + rest[1])
        for plain in ({"kind": "gelu"}, {"use": "residual"}, {"layers": 1}, {"skip": False}):
            if replace(part, **plain) != part:
                yield replace(recipe, parts=(*rest[0], replace(part, **plain), *rest[1]))
    for change in ({"encoder": "none"}, {"loss": SIMPLEST}, {"tied": False}, {"norm": False}, {"flat": True}):
        if replace(recipe, **change) != recipe:
            yield replace(recipe, **change)
    (setting,) = recipe.settings
    for simpler in setting.simpler():
        yield replace(recipe, settings=(simpler,))
