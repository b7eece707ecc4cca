"""A chat of several turns over one long document.

The document is read once, in the first turn. Every later turn finds it in the radix cache, and its keys and values in
host memory: the server reads only the new question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sglang as sgl
from material import FACTS, SYSTEM, arguments, connect, document


@sgl.function
def chat(s, text: str, questions: Sequence[str]):
    s += sgl.system(SYSTEM)
    for turn, question in enumerate(questions):
        s += sgl.user(f"{text}\n\n{question}" if turn == 0 else question)
        s += sgl.assistant(sgl.gen(f"answer_{turn}", max_tokens=24, temperature=0, stop="\n"))


def run(url: str, characters: int) -> list[dict[str, Any]]:
    """Each turn's question, answer, prompt tokens, and how many of those the server had already."""
    sgl.set_default_backend(connect(url))
    questions = [question for question, _, _ in FACTS]
    state = chat.run(text=document(characters, [fact for _, fact, _ in FACTS]), questions=questions)
    turns = []
    for turn, question in enumerate(questions):
        meta = state.get_meta_info(f"answer_{turn}")
        turns.append({
            "question": question,
            "answer": state[f"answer_{turn}"].strip(),
            "prompt_tokens": meta["prompt_tokens"],
            "cached_tokens": meta["cached_tokens"],
        })  # fmt: skip
    return turns


if __name__ == "__main__":
    given = arguments(__doc__, characters=20_000)
    for number, turn in enumerate(run(given.url, given.characters), start=1):
        print(f"{number}. {turn['question']}\n   {turn['answer']}")
        print(f"   ({turn['prompt_tokens']:,} tokens, {turn['cached_tokens']:,} of them from the cache)")
