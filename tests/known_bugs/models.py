"""Small models with the parts that published wrong-number bugs were in, of our own making.

decoder(), decoder_batch()      tied embeddings, a norm that all heads share, a second head for the token after the
                                next; targets in other numbers in each sample
sinks()                         attention whose heads have a learned logit that takes a share of each softmax
routed(), routed_batch()        a mixture of experts with a balance loss that leaves padding out
seeing(), seeing_batch()        an encoder of images whose features are merged into tokens, and attended to
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, VOCABULARY, EXPERTS, CHOSEN = 16, 4, 30, 3, 2
SECOND, BALANCE = 0.3, 0.1  # weights of the further losses
IMAGE = VOCABULARY - 1  # the token in whose place a patch's feature goes
PATCHES = 4


class Attention(nn.Module):
    """memory: what is attended to; None: the tokens before."""

    def __init__(self, sinks: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.query_norm = nn.RMSNorm(WIDTH // HEADS)
        self.out_norm = nn.Identity() if sinks else nn.RMSNorm(WIDTH // HEADS)  # it would undo what a sink takes
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS)) if sinks else None

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        def heads(t: torch.Tensor) -> torch.Tensor:
            return t.view(*t.shape[:2], HEADS, -1).transpose(1, 2)

        read = x if memory is None else memory
        q, k, v = self.query_norm(heads(self.query(x))), heads(self.key(read)), heads(self.value(read))
        if self.sinks is None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=memory is None)
        else:
            scores = q @ k.transpose(2, 3) / 2
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            sinks = self.sinks.view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)
            mixed = torch.cat([scores.masked_fill(future, -1e9), sinks], -1).softmax(-1)[..., :-1] @ v
        return self.out(self.out_norm(mixed).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module | None = None, sinks: bool = False, crosses: bool = False) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(sinks)
        self.cross = Attention() if crosses else None
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = mlp or nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        if self.cross is not None:
            x = x + self.cross(x, memory)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """The mean over the next tokens, and SECOND times that over those after them, of which there are fewer. smoothing:
    of labels; whole: the model itself makes log-probabilities, of all words.
    """

    def __init__(self, sinks: bool = False, smoothing: float = 0.0, whole: bool = False) -> None:
        super().__init__()
        self.smoothing, self.whole = smoothing, whole
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(sinks=sinks)])
        self.second = Layer(sinks=sinks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        after = F.pad(labels[:, 1:], (0, 1), value=-100)
        return self.loss(x, labels) + SECOND * self.loss(self.second(x), after)

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(x)).flatten(0, 1)
        if self.whole:
            return F.nll_loss(torch.log_softmax(logits, -1), labels.flatten())
        return F.cross_entropy(logits, labels.flatten(), label_smoothing=self.smoothing)


class Experts(nn.Module):
    """Tokens go to their CHOSEN experts, weighed by the router's shares of these."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.reshape(-1, WIDTH)
        shares, chosen = torch.topk(self.router(hidden).softmax(-1), CHOSEN, -1)
        out = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            token, place = torch.where(chosen == expert)
            made = F.gelu(hidden[token] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, token, made * shares[token, place, None])
        return out.view(x.shape)


class Routed(nn.Module):
    """With a balance loss over the tokens that are no padding: how many each expert was chosen by, times its shares."""

    def __init__(self, balance: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(Experts())])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.balance = balance

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        balance = x.new_zeros(())
        for layer in self.layers:
            if self.balance:
                shares = layer.mlp.router(layer.mlp_norm(x)).softmax(-1)
                chosen = F.one_hot(shares.topk(CHOSEN, -1).indices, EXPERTS).sum(2) * mask[..., None]
                real = mask.sum()
                counts, means = chosen.sum((0, 1)) / real, (shares * mask[..., None]).sum((0, 1)) / real
                balance = balance + (counts * means).sum()
            x = layer(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
        return loss + BALANCE * balance if self.balance else loss


class Encoder(nn.Module):
    """Patches of images, each of which sees all of its image."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList([Layer()])

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        x = self.patches(pixels)
        for layer in self.layers:
            x = layer(x)
        return x


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer(crosses=True)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x.masked_scatter((ids == IMAGE)[..., None].expand_as(x), features)
        for layer in self.layers:
            x = layer(x, features)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision, self.projector, self.language = Encoder(), nn.Linear(WIDTH, WIDTH), Language()

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.language(ids, self.projector(self.vision(pixels)), labels)


def decoder() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


def sinks() -> Decoder:
    torch.manual_seed(0)
    return Decoder(sinks=True)


def smoothed() -> Decoder:
    torch.manual_seed(0)
    return Decoder(smoothing=0.2)


def gathered() -> Decoder:
    torch.manual_seed(0)
    return Decoder(whole=True)


def routed() -> Routed:
    torch.manual_seed(0)
    return Routed()


def unbalanced() -> Routed:
    torch.manual_seed(0)
    return Routed(balance=False)


def seeing() -> Seeing:
    torch.manual_seed(0)
    return Seeing()


def _text(samples: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the next ones as labels; sample n has 2 + 2n fewer, all of them at its beginning."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, IMAGE, (samples, length), generator=generator)
    labels = torch.cat([ids[:, 1:], torch.full((samples, 1), -100)], dim=1)
    for sample in range(samples):
        labels[sample, : min(2 + 2 * sample, length - 3)] = -100
    return ids, labels


def decoder_batch(samples: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    ids, labels = _text(samples, length)
    return {"ids": ids, "labels": labels}


def routed_batch(samples: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    """The second half of samples ends in padding."""
    ids, labels = _text(samples, length)
    mask = torch.ones_like(ids)
    mask[samples // 2 :, -3:] = 0
    labels[mask == 0] = -100
    return {"ids": ids, "mask": mask, "labels": labels}


def seeing_batch(samples: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    """An image each, in place of the first tokens."""
    ids, labels = _text(samples, length)
    ids[:, :PATCHES] = IMAGE
    labels[:, :PATCHES] = -100
    pixels = torch.randn(samples, PATCHES, 6, generator=torch.Generator().manual_seed(2))
    return {"ids": ids, "pixels": pixels, "labels": labels}
