"""What has no form in text, and so is not kept on disk nor handed to other ranks."""

from __future__ import annotations


class Unstorable(ValueError):
    """Says what it is, in words that follow `it holds`."""
