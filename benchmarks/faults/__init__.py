"""The benchmark of failures and jitter: what csc plans for them, against Oobleck's and RRFP's own figures.

python -m benchmarks.faults [--json] [--quick] [--recovery SECONDS]; see docs/survive.md.
"""
