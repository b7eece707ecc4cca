"""The SGLang frontend programs in `examples/` run against a server with this backend, and get right answers."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oasis_sglang.serving import Server

pytestmark = [pytest.mark.server, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
# Beyond the test server's budget of 1,024 tokens, so that decoding is sparse, and short enough to be read quickly.
CHARACTERS = 8000
RIGHT = ("14 dollars", "1742", "48213")  # dense SGLang gives these too


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Import a program the way `python examples/<name>.py` sees its neighbours."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_chat_answers_every_turn_and_reads_the_document_once(
    oasis_server: Server, example: Callable[[str], Any]
) -> None:
    turns = example("long_document_chat").run(oasis_server.url, CHARACTERS)
    for turn, expected in zip(turns, RIGHT, strict=True):
        assert expected in turn["answer"]
    assert turns[0]["prompt_tokens"] > 1024
    # Pages are cached whole, and tokens at a turn's seam may be cut differently: a few may be read again.
    for before, after in itertools.pairwise(turns):
        assert before["prompt_tokens"] - 64 <= after["cached_tokens"] < after["prompt_tokens"]


def test_branches_see_the_document_and_select_chooses(oasis_server: Server, example: Callable[[str], Any]) -> None:
    result = example("branch_and_choose").run(oasis_server.url, CHARACTERS)
    for answer, expected in zip(result["answers"], RIGHT, strict=True):
        assert expected in answer
    assert result["choice"] == "1742"


def test_batch_answers_each_document_with_its_own_code(oasis_server: Server, example: Callable[[str], Any]) -> None:
    rows = example("batch_of_documents").run(oasis_server.url, CHARACTERS)
    assert [row["answered"] for row in rows] == [row["hidden"] for row in rows]


def test_every_program_is_tested_and_listed() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")} - {"material"}
    readme = (EXAMPLES / "README.md").read_text()
    tests = Path(__file__).read_text()
    for name in programs:
        assert f"examples/{name}.py" in readme
        assert f'example("{name}")' in tests
