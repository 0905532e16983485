"""What the scripts share: command lines made from dataclasses, errors in one line, prompts, printing."""
