"""Attention over slots: one mask rule, in a dense form and as FlexAttention."""
