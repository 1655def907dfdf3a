import torch
from torch import nn
from torch.nn import functional as F

D, V = 16, 30


class EmbeddingOfTableLayer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a = nn.Linear(D, D)
        self.register_buffer('table', torch.linspace(-1, 1, 5 * D).view(5, D))

    def forward(self, x, more):
        ids = more['ids']
        return x + F.embedding(ids % 5, self.a(self.table))


class AttentionPaddedBothSdpaBoolLayer(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, x, more):
        keep = more['keep']
        q, k, v = (t.view(*t.shape[:2], 2, D // 2).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        T = x.shape[1]
        q_at, k_at = torch.arange(T)[:, None], torch.arange(T)
        see = keep[:, None, None, :].expand(-1, -1, T, -1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=see)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.encoder = nn.Sequential(nn.Linear(6, D), nn.GELU(), nn.Linear(D, D)).double()
        self.projector = nn.Linear(D, D)
        self.part0 = nn.ModuleList(EmbeddingOfTableLayer(n) for n in range(3))
        self.part1 = nn.ModuleList(AttentionPaddedBothSdpaBoolLayer(n) for n in range(1))
        self.head = nn.Linear(D, V)

    def forward(self, ids, labels, keep, pixels):
        x = self.embed(ids)
        x = x + self.projector(self.encoder(pixels.double()).to(x.dtype)).mean(1, keepdim=True)
        more = {'ids': ids, 'keep': keep}
        for layer in self.part0:
            x = x + layer(x, more)
        for layer in self.part1:
            x = x + layer(x, more)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(seed, samples, tokens):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, V, (samples, tokens), generator=generator)
    ids[:, 1:2] = 1
    keep = torch.arange(tokens) < tokens - torch.arange(samples)[:, None] % 3
    labels = torch.randint(0, V, (samples, tokens), generator=generator).masked_fill(~keep, -100)
    return {"ids": ids, "labels": labels, "keep": keep, "pixels": torch.randn(samples, 4, 6, generator=generator)}


def make():
    torch.manual_seed(188)
    return Model().train()


SETTINGS = [
    {'microbatches': 4, 'precision': 'bf16'},
]
