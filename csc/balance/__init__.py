"""Batches balanced by what each stage pays for their samples: csc.balanced over torch's DataLoader."""
