"""`sglang.Engine(kv_backend="oasis")`: the same backend without a command line or HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.truth import NEW_TOKENS, Truth

pytestmark = [pytest.mark.server, pytest.mark.slow]

PROGRAM = """
import json, sys
import sglang

if __name__ == "__main__":
    model, prompt, new_tokens = json.loads(sys.argv[1])
    engine = sglang.Engine(
        model_path=model, kv_backend="oasis", oasis_config={"token_budget": 512}, dtype="float32",
        max_total_tokens=4096, log_level="error",
    )
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    answer = engine.generate(input_ids=prompt, sampling_params=sampling)
    state = engine.get_server_info()["internal_states"][0]["oasis"]
    engine.shutdown()
    print("RESULT " + json.dumps([answer["output_ids"], state]))
"""


def test_engine(truth: Truth, model_path: str, no_server: None, tmp_path: Path) -> None:
    """The engine takes both settings as arguments, answers as dense SGLang does, and ends when told to."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = json.dumps([model_path, truth.prompts[14], NEW_TOKENS])
    process = subprocess.Popen(
        [sys.executable, str(program), arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=900)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-4000:]
    ids, state = json.loads(next(line for line in out.splitlines() if line.startswith("RESULT "))[7:])
    assert ids == truth.answers[14].output_ids
    assert state["config"]["token_budget"] == 512
    assert state["decode_steps_total"] >= NEW_TOKENS - 1
    assert (state["working_sets"], state["device_tokens_used"]) == (0, 0)
