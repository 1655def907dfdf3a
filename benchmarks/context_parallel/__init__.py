"""Dispatch of context parallelism: csc's planner against the layouts in use, on eleven masks (docs/dispatch.md).

python -m benchmarks.context_parallel [--quick] [--json] [--hardware NAME] [--partial RATIO]
"""
