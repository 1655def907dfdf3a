"""Copies of a rank's tensors in another process' memory."""

from __future__ import annotations

import torch

from csc.runtime.copies import Copies


def test_a_copy_outlives_what_it_was_made_of() -> None:
    holder, sender = Copies(0, "127.0.0.1", 10.0), Copies(1, "127.0.0.1", 10.0)
    sender.to(holder.address)
    for count in range(3):
        gradient = torch.full((3, 2), float(count), dtype=torch.bfloat16)
        sender.send("0", {"counted": list(range(count))}, {"w": gradient, "scalar": torch.tensor(count)})
        gradient.zero_()
    sender.send("1", {}, {})
    sender.to(None)
    found = holder.of(1)
    assert found["0"].about == {"counted": [0, 1]} and not found["1"].tensors
    torch.testing.assert_close(found["0"].tensors["w"], torch.full((3, 2), 2.0, dtype=torch.bfloat16))
    assert int(found["0"].tensors["scalar"]) == 2
    holder.drop(1, "0")
    assert "0" not in holder.of(1) and holder.of(5) == {}


def test_a_holder_that_dies_stops_nothing() -> None:
    holder, sender = Copies(0, "127.0.0.1", 1.0), Copies(1, "127.0.0.1", 1.0)
    sender.to(holder.address)
    for there in holder._sockets:
        there.close()
    for _ in range(200):
        sender.send("0", {}, {"w": torch.zeros(1000)})
    sender.to(("127.0.0.1", 1))
    assert not sender.is_on
