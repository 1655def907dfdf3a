import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

D, V = 16, 30


class AttentionPrefixFillMinLayer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, x, more):
        q, k, v = (t.view(*t.shape[:2], 2, D // 2).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        T = x.shape[1]
        q_at, k_at = torch.arange(T)[:, None], torch.arange(T)
        see = (k_at <= q_at) | (k_at < 2)
        score = q @ k.mT / (D // 2) ** 0.5
        y = score.masked_fill(~see, torch.finfo(score.dtype).min).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.part0 = nn.ModuleList(AttentionPrefixFillMinLayer(n) for n in range(1))
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
    torch.manual_seed(0)
    return Model().train()


SETTINGS = [
    {'precision': 'bf16'},
]
