"""Benchmarks of answers: what is asked, how it is scored, how scores are compared and reported."""
