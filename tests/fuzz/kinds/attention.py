"""Attention with masks of all kinds: written out, by SDPA and by torch's modules.

Terms: q, k, v are (samples, heads, tokens, D / heads); q_at and k_at the places of queries and keys; `see`, which a
mask gives, is a boolean tensor that broadcasts to (samples, heads, queries, keys).
"""

from __future__ import annotations

from tests.fuzz.kinds.reading import Kind, read

INIT = "self.qkv = nn.Linear(D, 3 * D)\nself.out = nn.Linear(D, D)"
HEADS = """\
q, k, v = (t.view(*t.shape[:2], 2, D // 2).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
T = x.shape[1]
q_at, k_at = torch.arange(T)[:, None], torch.arange(T)
"""
OUT = "\nreturn self.out(y.transpose(1, 2).reshape(x.shape))"


def kinds() -> dict[str, Kind]:
    """Every mask in every way of saying it, and the attentions that have no such mask."""
    found = {
        f"attention_{mask}_{way}": Kind(INIT, HEADS + see.forward + "\n" + use.forward + OUT)
        for mask, see in read("masks").items()
        for way, use in read("softmaxes").items()
        if not (mask == "hidden_rows" and way in ("fill_inf", "sdpa_inf"))  # eager gives no numbers there
    }
    return found | read("attention")
