"""The benchmark of energy: csc's clocks beside the frontiers that Perseus published, and on plans of multimodal LLMs.

python -m benchmarks.energy [--quick] [--json] [--no-lowtime] [--no-plans]
"""
