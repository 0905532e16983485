"""What a caller hands in and gets back: prompts, sampling, text, results."""
