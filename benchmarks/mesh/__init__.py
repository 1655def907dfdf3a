"""The mesh that csc chooses against those of rules and formulas, on the same costs and simulator."""
