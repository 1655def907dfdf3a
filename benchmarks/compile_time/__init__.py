"""Seconds and memory of a compilation against depth and ranks, beside PyTorch's own tracers on the same models.

    python -m benchmarks.compile_time [--quick] [--json]

Terms
  model      LLaVA with CLIP-L and a Llama of 8,192 features, 2 to 80 layers of it (80: 70 billion parameters), no
             weights; one sample of 8,192 tokens
  capture    tracing and normalising, up to the flat graph
  after      everything else: passes, planning, the files of all ranks
  refreeze   the same model compiled again with other parts frozen, in the same process

Every number is of a process of its own: seconds from the model made to the last file written (or the last graph made),
peak resident memory from the start of Python, imports included. csc plans 1F1B, and once, at the largest size, searches
for the order of work too (`auto`): a search takes the time that it is given.
"""
