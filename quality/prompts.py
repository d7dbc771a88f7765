"""What the gate asks: questions with known answers, and prompts of all kinds."""

from typing import NamedTuple


class Question(NamedTuple):
    """A prompt whose greedy answer is known, with a margin that other precisions keep."""

    # "completion" or "chat".
    kind: str
    prompt: str
    # What the answer must contain.
    answer: str


SIX_QUESTIONS = [
    Question("completion", "The capital of France is", " Paris"),
    Question("completion", "The opposite of hot is", " cold"),
    Question("completion", "1, 2, 3, 4, 5,", " 6, 7,"),
    Question("completion", "Romeo and Juliet was written by William", " Shakespeare"),
    Question("completion", "def add(a, b):\n    return", " a + b"),
    Question("chat", "How many days are in a week?", "7"),
]

_PARAGRAPH = (
    "The river leaves the lake at its northern end and winds through three valleys before it "
    "meets the sea. Fishermen mend their nets along the quay, and on market days the square "
    "behind the church fills with stalls that sell bread, cheese, apples and wool. "
)

VARIED_PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Explain in simple terms why the sky is blue.",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, count(*) FROM orders WHERE",
    '{"name": "Ada", "age": 36, "languages": [',
    "1, 1, 2, 3, 5, 8, 13,",
    "中国的首都是",
    "今天天气很好,我们去公园",
    "Les trois mousquetaires étaient",
    "🎉 Happy birthday! 🎂🎈",
    "👩‍🚀 went to space and",
    "the",
    "\n",
    "    indented    text   with   spaces",
    "Q: What is 12 times 12?\nA:",
    _PARAGRAPH * 2,
    "Summary:\n" + _PARAGRAPH * 10,
    _PARAGRAPH * 58,
]
"""Twenty: English, code, Chinese, emoji, one token, about 3,000 tokens."""
