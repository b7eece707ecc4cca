"""Prompts of an exact number of tokens, made of the English text in `pydoc_data.topics` of the standard library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any


def _topics_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


class Documents:
    """Cuts documents for one model's tokenizer.

    The source holds a few hundred thousand tokens; document `i` starts at its own place, so that no two share a
    prefix and the radix cache cannot help one with another.
    """

    def __init__(self, model_path: str | os.PathLike[str]) -> None:
        self.model_path = Path(model_path)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        tokenizer.model_max_length = 1 << 30  # the source is cut after encoding; no need to warn about its length
        return tokenizer

    @cached_property
    def source(self) -> list[int]:
        return self.encode(_topics_text())

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def text(self, index: int, tokens: int, stride: int = 8000) -> list[int]:
        """`tokens` tokens of running text; texts of different `index` start `stride` tokens apart, wrapping around."""
        source = self.source
        start = index * stride % len(source)
        return [source[(start + i) % len(source)] for i in range(tokens)]

    def with_question(
        self,
        index: int,
        tokens: int,
        question: str,
        fact: str = "",
        depth: float = 0.5,
        instruction: str = "",
        answer: str = "",
    ) -> list[int]:
        """A chat prompt of exactly `tokens` tokens: instruction, document with `fact` planted at `depth`, question, and
        the first words of the answer.

        `depth` 0 is the document's beginning, 1 its end.
        """
        marker = "\x00"
        chat = [{"role": "user", "content": f"{instruction}{marker}\n\n{question}"}]
        rendered = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, after = rendered.split(marker)
        # The template's special tokens are in the text already, so the pieces are encoded without adding more.
        head, tail = self.encode(before), self.encode(after + answer)
        planted = self.encode(f"\n\n{fact}\n\n") if fact else []
        room = tokens - len(head) - len(tail) - len(planted)
        if room < 0:
            raise ValueError(f"{tokens} tokens leave no room for a document: the rest takes {tokens - room}")
        body = self.text(index, room)
        cut = round(room * depth)
        return head + body[:cut] + planted + body[cut:] + tail
