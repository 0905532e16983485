"""Parts of `scripts/eval.py`."""
