"""csc.search against every pair to the end: the 24 pairs of examples/search/digits.py.

python -m benchmarks.search.record DIRECTORY     learning curves of all pairs by seed: ten minutes of a core for each
python -m benchmarks.search                 strategies replayed on the recorded curves, and searches that really train
"""
