import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

D, V = 16, 30


class AttentionLearnedBiasLayer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.bias = nn.Embedding(8, 2)

    def forward(self, x, more):
        q, k, v = (t.view(*t.shape[:2], 2, D // 2).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        T = x.shape[1]
        q_at, k_at = torch.arange(T)[:, None], torch.arange(T)
        bias = self.bias((q_at - k_at).clamp(0, 7)).permute(2, 0, 1)[None].to(q.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(k_at > q_at, float('-inf')))
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.part0 = nn.ModuleList(AttentionLearnedBiasLayer(n) for n in range(1))
        self.head = nn.Linear(D, V)

    def forward(self, ids, labels, keep):
        x = self.embed(ids)
        more = {'ids': ids, 'keep': keep}
        for layer in self.part0:
            x = x + layer(x, more)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(seed, samples, tokens):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, V, (samples, tokens), generator=generator)
    ids[:, 1] = 1
    keep = torch.arange(tokens) < tokens - torch.arange(samples)[:, None] % 3
    labels = torch.randint(0, V, (samples, tokens), generator=generator).masked_fill(~keep, -100)
    return {"ids": ids, "labels": labels, "keep": keep}


def make():
    torch.manual_seed(0)
    return Model().train()


SETTINGS = [
    {},
]
