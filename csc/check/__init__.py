"""The check: a program against eager PyTorch, by code that has nothing in common with the code that it judges."""
