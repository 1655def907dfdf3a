import collections
import dataclasses
import functools
import itertools
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

D, V = 16, 30


class GeluLayer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a = nn.Linear(D, D)
        self.b = nn.Linear(D, D)

    def forward(self, x, more):
        return self.b(F.gelu(self.a(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.encoder = nn.Sequential(nn.Linear(6, D), nn.GELU(), nn.Linear(D, D))
        self.projector = nn.Linear(D, D)
        self.part0 = nn.ModuleList(GeluLayer(n) for n in range(1))
        self.head = nn.Linear(D, V)

    def forward(self, ids, labels, keep, pixels):
        x = self.embed(ids)
        seen = self.projector(self.encoder(pixels)).flatten(0, 1)
        x = x.masked_scatter((ids == 1)[..., None].expand_as(x), seen.to(x.dtype))
        more = {'ids': ids, 'keep': keep}
        for layer in self.part0:
            x = x + layer(x, more)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(seed, samples, tokens):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, V, (samples, tokens), generator=generator)
    ids[:, 1:5] = 1
    keep = torch.arange(tokens) < tokens - torch.arange(samples)[:, None] % 3
    labels = torch.randint(0, V, (samples, tokens), generator=generator).masked_fill(~keep, -100)
    return {"ids": ids, "labels": labels, "keep": keep, "pixels": torch.randn(samples, 4, 6, generator=generator)}


def make():
    torch.manual_seed(419)
    return Model().train()


SETTINGS = [
    {'tp': 2},
]
