"""What has no description."""

from __future__ import annotations


class Opaque(ValueError):
    """A value that has no description, or code whose result cannot be told beforehand; with its place."""
