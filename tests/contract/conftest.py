"""The installed SGLang with our hooks in place, and without them again afterwards."""

from __future__ import annotations

import os
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit import interpreter

_ABSENT = object()


def _raw(owner: Any, name: str) -> Any:
    return vars(owner).get(name, _ABSENT)


@pytest.fixture(scope="module")
def plugged() -> Iterator[None]:
    """What `load_plugins()` does for this package; all of it is undone, so that the next module meets stock SGLang."""
    from sglang.srt import server_args as server_args_module
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry

    from oasis_sglang import arguments, coordinator, hooks, plugin

    places = []
    for hook in hooks.HOOKS:
        if hook.is_patch:
            path, name = hook.target.rsplit(".", 1)
            owner = pkgutil.resolve_name(path)
            places.append((owner, name, _raw(owner, name)))
    places.append((Engine, "server_args_class", _raw(Engine, "server_args_class")))
    registered, patched = {k: list(v) for k, v in HookRegistry._hooks.items()}, set(HookRegistry._patched)
    environment = dict(os.environ)
    plugin.register()
    HookRegistry.apply_hooks()
    yield
    coordinator.stop()
    for owner, name, raw in places:
        if raw is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, raw)
    HookRegistry.reset()
    HookRegistry._hooks.update(registered)
    HookRegistry._patched.update(patched)
    ATTENTION_BACKENDS.pop(arguments.ATTENTION_BACKEND, None)
    choices = server_args_module.ATTENTION_BACKEND_CHOICES
    while arguments.ATTENTION_BACKEND in choices:
        choices.remove(arguments.ATTENTION_BACKEND)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not interpreter.is_elsewhere(pyfuncitem):
        return None
    interpreter.report(pyfuncitem)
    return True
