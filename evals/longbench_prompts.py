"""The prompts of LongBench's English tasks and of LongBench-v2: the authors' own, with their odd spaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Prompt:
    """One task of LongBench."""

    text: str
    """With `{context}` and, in most, `{input}`."""
    max_new_tokens: int
    metric: Literal["qa_f1", "rouge-l", "retrieval", "count"]
    chat: bool = True
    """Whether the prompt goes into a chat template. A few whose context is examples to continue don't."""
    first_line: bool = False
    """Whether the first line of a prediction is scored alone."""


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other "
    "words.\n\nThe following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not output any other "
    "words.\n\nQuestion: {input}\nAnswer:"
)
_STORY = "as concisely as you can, using a single phrase if possible. Do not provide any explanation."
_ARTICLE = (
    "as concisely as you can, using a single phrase or sentence if possible. If the question cannot be "
    'answered based on the information in the article, write "unanswerable". If the question is a yes/no '
    'question, answer "yes", "no", or "unanswerable". Do not provide any explanation.'
)

# The eight of the method's paper.
PAPER = {
    "hotpotqa": Prompt(_PASSAGES, 32, "qa_f1"),
    "2wikimqa": Prompt(_PASSAGES, 32, "qa_f1"),
    "musique": Prompt(_PASSAGES, 32, "qa_f1"),
    "qasper": Prompt(
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}\n\n"
        "Article: {context}\n\n"
        f" Answer the question based on the above article {_ARTICLE}\n\n"
        "Question: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "gov_report": Prompt(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge-l",
    ),
    "multi_news": Prompt(
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge-l",
    ),
    "qmsum": Prompt(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        512,
        "rouge-l",
    ),
    "passage_retrieval_en": Prompt(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the "
        "abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\n"
        "Please enter the number of the paragraph that the abstract is from. The answer format must be like "
        '"Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        "retrieval",
    ),
}

# The other English ones, but for three: `trec`, whose published scorer changes a list while it walks through
# it, and `lcc` and `repobench-p`, whose edit distance differs from one installation to the next.
OTHERS = {
    "narrativeqa": Prompt(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"Answer the question {_STORY}\n\n"
        "Story: {context}\n\n"
        f"Now, answer the question based on the story {_STORY}\n\n"
        "Question: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "multifieldqa_en": Prompt(
        "Read the following text and answer briefly.\n\n{context}\n\n"
        "Now, answer the following question based on the above text, only give me the answer and do not "
        "output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
    ),
    "triviaqa": Prompt(
        "Answer the question based on the given passage. Only give me the answer and do not output any other "
        "words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        "qa_f1",
        chat=False,
        first_line=True,
    ),
    "samsum": Prompt(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        128,
        "rouge-l",
        chat=False,
        first_line=True,
    ),
    "passage_count": Prompt(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please "
        "carefully read these paragraphs and determine how many unique paragraphs there are after removing "
        "duplicates. In other words, how many non-repeating paragraphs are there in total?\n\n{context}\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. The output format "
        "should only contain the number, such as 1, 2, 3, and so on.\n\nThe final answer is: ",
        32,
        "count",
    ),
}
PROMPTS = PAPER | OTHERS

V2_PROMPT = """Please read the following text and answer the question below.

<text>
$DOC$
</text>

What is the correct answer to this question: $Q$
Choices:
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$

Format your response as follows: "The correct answer is (insert answer here)"."""
V2_PLACEHOLDERS = {
    "$DOC$": "context",
    "$Q$": "question",
    "$C_A$": "choice_A",
    "$C_B$": "choice_B",
    "$C_C$": "choice_C",
    "$C_D$": "choice_D",
}
