"""Attention: csc's kernels on multimodal masks, on a GPU against FlexAttention and SDPA, on a CPU against SDPA.

python -m benchmarks.attention [--json] [--quick] [--part gpu] [--part cpu] [--threads N] [--tune HEAD_DIM]
"""
