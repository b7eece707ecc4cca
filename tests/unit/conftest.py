from __future__ import annotations

import logging

import pytest

from tests.unit import interpreter


@pytest.fixture(autouse=True)
def _what_we_log(caplog: pytest.LogCaptureFixture) -> None:
    """Tests of SGLang's start-up, in the same process, leave the root logger at ERROR."""
    caplog.set_level(logging.INFO, logger="oasis_sglang")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not interpreter.is_elsewhere(pyfuncitem):
        return None
    interpreter.report(pyfuncitem)
    return True
