"""Several branches from one document, then a choice between fixed answers.

`fork` sends the branches at the same time; they share the document's keys and values, because they share its prefix in
the radix cache. `select` does not generate: it compares the model's probabilities of the given answers.
"""

from __future__ import annotations

from typing import Any

import sglang as sgl
from material import arguments, connect, document

FACTS = (
    "The secret code of the harbour is 48213.",
    "The secret code of the museum is 70564.",
    "The secret code of the castle is 84026.",
)
PLACES = ("harbour", "museum", "castle")
CODES = ("48213", "70564", "84026", "35718")


@sgl.function
def explore(s, text: str):
    s += sgl.user_begin() + text + "\n\n"
    branches = s.fork(len(PLACES))
    for branch, place in zip(branches, PLACES, strict=True):
        branch += f"What is the secret code of the {place}?" + sgl.user_end()
        branch += sgl.assistant(sgl.gen("code", max_tokens=24, temperature=0, stop="\n"))
    for branch, place in zip(branches, PLACES, strict=True):
        s.set_var(place, branch["code"].strip())

    s += "What is the secret code of the castle?" + sgl.user_end()
    s += sgl.assistant_begin() + "The secret code of the castle is " + sgl.select("choice", choices=list(CODES))


def run(url: str, characters: int) -> dict[str, Any]:
    """The answer of every branch, and the code that was chosen for the castle."""
    sgl.set_default_backend(connect(url))
    state = explore.run(text=document(characters, FACTS))
    return {"branches": {place: state[place] for place in PLACES}, "choice": state["choice"]}


if __name__ == "__main__":
    given = arguments(__doc__, characters=16_000)
    result = run(given.url, given.characters)
    for place, answer in result["branches"].items():
        print(f"{place:>8}: {answer}")
    print(f"Chosen for the castle, out of {', '.join(CODES)}: {result['choice']}")
