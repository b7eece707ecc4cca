"""Machines that have torch and triton, but not everything that this package depends on.

A GPU that is lent for minutes comes with an image of its own, and often nothing can be installed there. Of the
dependencies the kernels only meet msgspec, whose `Struct` the configuration and the pools' geometry are.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType


class Struct:
    """What a benchmark without a command line of keys needs of `msgspec.Struct`: a record that does not change."""

    def __init_subclass__(cls, **options: bool) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


def stand_in() -> None:
    """Put `Struct` in the place of msgspec where that is not installed."""
    if importlib.util.find_spec("msgspec") is None:
        module = ModuleType("msgspec")
        module.Struct = Struct  # type: ignore[attr-defined]
        sys.modules["msgspec"] = module
