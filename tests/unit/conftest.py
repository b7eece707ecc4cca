from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _what_we_log(caplog: pytest.LogCaptureFixture) -> None:
    """Tests of SGLang's start-up, in the same process, leave the root logger at ERROR."""
    caplog.set_level(logging.INFO, logger="oasis_sglang")
