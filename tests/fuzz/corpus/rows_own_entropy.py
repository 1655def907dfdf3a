import torch
from torch import nn
from torch.nn import functional as F

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
        self.part0 = nn.ModuleList(GeluLayer(n) for n in range(1))
        self.head = nn.Linear(D, V)

    def forward(self, ids, labels, keep):
        x = self.embed(ids)
        more = {'ids': ids, 'keep': keep}
        for layer in self.part0:
            x = x + layer(x, more)
        logits = self.head(x)
        b, t = torch.where(labels != -100)
        return -logits[b, t].log_softmax(-1).gather(1, labels[b, t][:, None]).mean()


def batch(seed, samples, tokens, form="plain"):
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(samples)
    half = place < samples // 2
    other = {"first": place < 0, "both": half, "turned": ~half, "single": place == 0}.get(form, place >= 0)
    length, topic, count = tokens - place % 3, place % 3, torch.ones_like(place)
    if form != "plain":
        length = torch.where(place % 2 == 0, torch.where(other, tokens, tokens - 2), 2)
        topic, count = torch.where(other & (place % 2 == 1), 1, 2), (~other).long()
    if form == "hollow":
        length[-1] = 0
    ids = torch.randint(2, V, (samples, tokens), generator=generator)
    ids[:, 1:2] = 1
    keep = torch.arange(tokens) < length[:, None]
    labels = torch.randint(0, V, (samples, tokens), generator=generator).masked_fill(~keep, -100)
    if form == "ignored":
        labels[~half], topic[~half] = -100, 0
    return {"ids": ids, "labels": labels, "keep": keep}


def make():
    torch.manual_seed(211)
    return Model().train()


DIVIDE = None


SETTINGS = [
    {},
]
