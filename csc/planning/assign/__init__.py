"""Which sample goes to which replica and microbatch: pure functions on lengths (csc.planning.assign.assign)."""
