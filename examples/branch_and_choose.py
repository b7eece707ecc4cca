"""Several branches from one document, then a choice between fixed answers.

`fork` sends the branches at the same time; they share the document's keys and values, because they share its prefix in
the radix cache. `select` does not generate: it compares the model's probabilities of the given answers.
"""

from __future__ import annotations

from typing import Any

import sglang as sgl
from material import FACTS, SYSTEM, arguments, connect, document

CHOICES = ("1689", "1742", "1815", "1903")


@sgl.function
def explore(s, text: str):
    s += sgl.system(SYSTEM)
    s += sgl.user_begin() + text + "\n\n"
    branches = s.fork(len(FACTS))
    for branch, (question, _, _) in zip(branches, FACTS, strict=True):
        branch += question + sgl.user_end()
        branch += sgl.assistant(sgl.gen("answer", max_tokens=24, temperature=0, stop="\n"))
    s.set_var("answers", [branch["answer"].strip() for branch in branches])

    s += "In which year was the castle built?" + sgl.user_end()
    s += sgl.assistant_begin() + "The castle was built in the year " + sgl.select("choice", choices=list(CHOICES))


def run(url: str, characters: int) -> dict[str, Any]:
    """The answer of every branch, and the year that was chosen for the castle."""
    sgl.set_default_backend(connect(url))
    state = explore.run(text=document(characters, [fact for _, fact, _ in FACTS]))
    return {"answers": state["answers"], "choice": state["choice"]}


if __name__ == "__main__":
    given = arguments(__doc__, characters=16_000)
    result = run(given.url, given.characters)
    for (question, _, _), answer in zip(FACTS, result["answers"], strict=True):
        print(f"{question} {answer}")
    print(f"The year of the castle, out of {', '.join(CHOICES)}: {result['choice']}")
