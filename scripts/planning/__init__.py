"""The parts of `scripts/plan.py`: what a model takes on a device, and how long its decode step takes."""
