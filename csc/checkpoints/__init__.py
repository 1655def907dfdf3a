"""Checkpoints of training: what is written of a step, its index, what is read again, other formats."""
