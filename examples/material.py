"""A long English text with facts in it, for the examples: Python's own language reference, as `pydoc` ships it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang import RuntimeEndpoint

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # what SmolLM2 was trained with

# What is asked about, the fact to plant, and the part of it that a right answer holds.
FACTS = (
    ("What does a ticket to the museum cost?", "A ticket to the museum costs 14 dollars.", "14 dollars"),
    ("In which year was the castle built?", "The castle was built in the year 1742.", "1742"),
    ("What is the secret code of the harbour?", "The secret code of the harbour is 48213.", "48213"),
)


def document(characters: int, facts: Sequence[str] = (), start: int = 0) -> str:
    """About `characters` characters of text from `start` on, `facts` spread evenly over it. A token is about four."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name].strip() for name in sorted(topics))[start : start + characters]
    paragraphs = text.split("\n\n")
    step = len(paragraphs) / (len(facts) + 1)
    for number in range(len(facts), 0, -1):
        paragraphs.insert(round(number * step), facts[number - 1])
    return "\n\n".join(paragraphs)


def arguments(description: str | None, characters: int) -> argparse.Namespace:
    """The command line that all examples share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="a running server (default: %(default)s)")
    parser.add_argument("--characters", type=int, default=characters, help="length of the text (default: %(default)s)")
    return parser.parse_args()


def connect(url: str) -> RuntimeEndpoint:
    """The server as a backend for SGLang programs. SmolLM2 speaks ChatML, which its name does not tell SGLang."""
    return RuntimeEndpoint(url, chat_template_name="chatml")
