"""Which models csc compiles: Hugging Face classes in tiny configurations, compiled and compared with eager PyTorch."""
