"""The benchmark of pipelines: csc's plans beside those that are made by hand and the schedules of PyTorch.

python -m benchmarks.pipeline [--quick] [--part simulated|emulated|real] [--json]
"""
