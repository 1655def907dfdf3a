import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

D, V = 16, 30


class ReluLayer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a = nn.RNN(D, D, nonlinearity="relu", batch_first=True)

    def forward(self, x, more):
        return self.a(x)[0]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.part0 = nn.ModuleList(ReluLayer(n) for n in range(3))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, V)

    def forward(self, ids, labels, keep):
        x = self.embed(ids)
        more = {'ids': ids, 'keep': keep}
        for layer in self.part0:
            x = x + layer(x, more)
        x = self.norm(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(seed, samples, tokens):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, V, (samples, tokens), generator=generator)
    ids[:, 1:2] = 1
    keep = torch.arange(tokens) < tokens - torch.arange(samples)[:, None] % 3
    labels = torch.randint(0, V, (samples, tokens), generator=generator).masked_fill(~keep, -100)
    return {"ids": ids, "labels": labels, "keep": keep}


def make():
    torch.manual_seed(45)
    return Model().train()


SETTINGS = [
    {'precision': 'bf16', 'microbatches': 2},
]
