"""Every private torch name that csc leans on, in one place, by what it is about.

Each has a contract test in tests/unit/test_torch_private.py: a torch release that moves or changes one fails there, by
name, and not somewhere inside a pass.
"""
