"""Planners: numbers in, decisions out. No graph, no tensor."""
