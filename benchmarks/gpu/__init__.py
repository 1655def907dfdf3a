"""All that runs on a machine with a GPU, in one command and one report: `make gpu`, python -m benchmarks.gpu."""
