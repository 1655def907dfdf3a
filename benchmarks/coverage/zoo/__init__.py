"""Every architecture that transformers registers for training a language model, made small by rules."""
