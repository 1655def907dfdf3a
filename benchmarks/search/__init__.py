"""csc.search against every pair to the end: the 24 pairs of examples/search/digits.py.

python -m benchmarks.search.record FILE     learning curves of all pairs, 10 seeds: an hour on two busy cores
python -m benchmarks.search                 strategies replayed on the recorded curves, and searches that really train
"""
