"""Adapters to training frameworks, one a file; each imports its framework, so import the one you use."""
