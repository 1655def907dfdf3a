"""Measurements. They compile afresh: CSC_CACHE=1 in the environment lets them use the cache."""

import os

os.environ.setdefault("CSC_CACHE", "0")
