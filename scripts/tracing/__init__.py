"""The parts of `scripts/trace.py`: what is run, what is made of it, and how it is shown."""
