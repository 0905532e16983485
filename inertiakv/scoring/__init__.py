"""What a token is worth: scorers, and how scores add up over layers and steps."""
