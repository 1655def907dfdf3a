"""The benchmark of failures and jitter: real processes that are killed, and what csc plans, against Oobleck's and
RRFP's own figures.

python -m benchmarks.faults [--json] [--quick] [--part PART] [--faults N] [--recovery SECONDS]; see docs/survive.md.
"""
