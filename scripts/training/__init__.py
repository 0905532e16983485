"""Behind scripts/train_scorer.py: a model's own attention, and the learned scorer's distillation from it."""
