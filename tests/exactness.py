"""How far two runs of the same computation may be apart.

Bits are asserted where both run the same kernels on the same shapes and strides, and add in the same order: then every
processor gives the same bits. Where another kernel runs, or on other shapes or strides, some processors give the same
bits and others do not. There the tolerance is FLOAT32: each of n operations on the way rounds by up to half an epsilon
of its result; such errors add up as the root of n, in both runs: sqrt(2 n) / 2 epsilons, which for n = 512, more than
these models have in a row, is 16.

Where that is so in the tests, beside sums over microbatches, replicas and readers of a value:
- a linear map with a frozen matrix: eager multiplies a batch of matrices if its input is a slice, csc one large matrix;
- rows that are computed and masked (empty images), which eager's code leaves out;
- texts without padding: eager has a causal attention kernel without a mask, csc's is given one.
"""

from __future__ import annotations

EPSILON = 2.0**-23  # of float32: between 1 and the next number
FLOAT32 = 16 * EPSILON  # relative, of a norm: 1.9e-6
