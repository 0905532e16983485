"""How queries see the slots: one mask rule, in a dense form and in FlexAttention's."""
