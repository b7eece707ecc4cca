"""Many documents at once, and answers held to a form.

`run_batch` keeps all programs in flight together, so the server needs the keys and values of every document at the
same time: far more than its device pool has to hold. A regular expression makes each answer a five-digit number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sglang as sgl
from material import SYSTEM, arguments, connect, document

CODES = {"harbour": "48213", "museum": "70564", "library": "19387", "station": "62950"}


@sgl.function
def ask(s, text: str, place: str):
    s += sgl.system(SYSTEM)
    s += sgl.user(f"{text}\n\nWhat is the secret code of the {place}?")
    s += sgl.assistant_begin() + f"The secret code of the {place} is "
    s += sgl.gen("code", max_tokens=8, temperature=0, regex=r"[0-9]{5}")


def run(url: str, characters: int) -> list[dict[str, Any]]:
    """For each document: the place asked about, the code it hides, and the code that was answered."""
    sgl.set_default_backend(connect(url))
    programs: Sequence[dict[str, str]] = [
        {"text": document(characters, [f"The secret code of the {place} is {code}."], number * 40_000), "place": place}
        for number, (place, code) in enumerate(CODES.items())
    ]
    states = ask.run_batch(list(programs), num_threads=len(programs), progress_bar=False)
    return [
        {"place": place, "hidden": hidden, "answered": state["code"]}
        for (place, hidden), state in zip(CODES.items(), states, strict=True)
    ]


if __name__ == "__main__":
    given = arguments(__doc__, characters=12_000)
    for row in run(given.url, given.characters):
        print(f"{row['place']:>8}: answered {row['answered']}, hidden was {row['hidden']}")
