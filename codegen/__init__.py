"""Code generation: a scheduled Program becomes a directory of readable Python, one file per template and per rank."""
