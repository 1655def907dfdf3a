"""One training step in one process: eager PyTorch, torch.compile and csc in turns; see __main__."""
