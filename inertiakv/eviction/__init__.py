"""What goes: the rule, what it never evicts, and how a budget is spread."""
