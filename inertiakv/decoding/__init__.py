"""Passes over the cache: prompt chunks, the first step, the decode step, and the loop that runs them."""
