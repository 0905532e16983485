"""What RULER asks, in its own words: `scripts/data/synthetic/constants.py` of https://github.com/NVIDIA/RULER.

Every answer prefix starts with one space, for it follows a chat template, or the question itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    prompt: str
    answer_prefix: str
    max_new_tokens: int


NEEDLE = "One of the special magic {kind} for {key} is: {value}."

NIAH = Template(
    prompt=(
        "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {kind} afterwards.\n"
        "{context}\n"
        "What are all the special magic {kind} for {query} mentioned in the provided text?"
    ),
    answer_prefix=" The special magic {kind} for {query} mentioned in the provided text are",
    max_new_tokens=128,
)


def _singular(text: str) -> str:
    """RULER's rewrite, in this order, for one key with one value."""
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is")


NIAH_ONE = Template(_singular(NIAH.prompt), _singular(NIAH.answer_prefix), NIAH.max_new_tokens)

VARIABLES = Template(
    prompt=(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        "{context}\n"
        "Question: Find all variables that are assigned the value {query} in the text above."
    ),
    # "assgined" is how RULER has it, in its code and in its paper.
    answer_prefix=(
        " Answer: According to the chain(s) of variable assignment in the text above, "
        "{count} variables are assgined the value {query}, they are: "
    ),
    max_new_tokens=30,
)

COMMON_WORDS = Template(
    prompt=(
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n"
        "{context}\n"
        "Question: What are the 10 most common words in the above list?"
    ),
    answer_prefix=" Answer: The top 10 words that appear most often in the list are:",
    max_new_tokens=120,
)

FREQUENT_WORDS = Template(
    prompt=(
        "Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. {context}\n"
        "Question: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    ),
    answer_prefix=(
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    ),
    max_new_tokens=50,
)

DOCUMENT = "Document {number}:\n{text}"

QUESTIONS = Template(
    prompt=(
        "Answer the question based on the given documents. "
        "Only give me the answer and do not output any other words.\n\n"
        "The following are given documents.\n\n"
        "{context}\n\n"
        "Answer the question based on the given documents. "
        "Only give me the answer and do not output any other words.\n\n"
        "Question: {query}"
    ),
    answer_prefix=" Answer:",
    max_new_tokens=32,
)
