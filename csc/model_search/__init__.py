"""The best pair of encoder and language model for a task, out of many; docs/search.md shows how.

    result = csc.search({"clip": clip, "siglip": siglip}, {"small": llama, "large": qwen}, data, score, directory="run")
    model = result.winner()

`search` (the whole way), `Choice` and `Rung` (what strategies decide), strategies by name: csc.model_search.strategies.
"""

from csc.model_search.searching import search

__all__ = ["search"]
