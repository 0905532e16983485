"""Compiled graphs, and all that touches torch's internals."""
