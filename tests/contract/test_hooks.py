"""The hook table against the installed SGLang (C50): SGLang logs a plugin's failure and serves without it, so whatever
does not fit must stop the start."""

from __future__ import annotations

import inspect
import json
import sys
import types
from typing import Any

import pytest

from oasis_sglang import hooks, plugin
from oasis_sglang.cli import main
from oasis_sglang.hooks import Hook, HookMismatchError, Kind


@pytest.mark.parametrize("hook", hooks.whole_table(), ids=lambda hook: hook.target.removeprefix("sglang.srt."))
def test_the_installed_sglang_has_every_symbol(hook: Hook) -> None:
    """C50: one row each, so that a new SGLang shows at once what moved."""
    assert hooks.inspect_hook(hook).problem is None


def test_the_pin_is_the_version_that_is_checked() -> None:
    """C50: a pin and a table that name different releases make the remedy wrong."""
    from importlib.metadata import requires

    pins = [r for r in requires("oasis-sglang") or () if r.startswith("sglang") and "extra" not in r]
    assert pins == [f"sglang=={hooks.SGLANG_VERSION}"]
    assert hooks.installed_sglang() == hooks.SGLANG_VERSION


def test_every_patch_has_a_handler_and_every_handler_a_row() -> None:
    """C50: a handler that no row names would never be verified; a row without one would never be applied."""
    table = hooks.whole_table()
    patches = [hook.target for hook in table if hook.is_patch]
    assert sorted(patches) == sorted(plugin.handlers())
    assert len({hook.target for hook in table}) == len(table), "a symbol has two rows"
    assert all(hook.why for hook in table)
    functions = [handler.__name__ for handler in plugin.handlers().values()]
    assert len(set(functions)) == len(functions), "two symbols share a handler"


@pytest.mark.parametrize("hook", filter(lambda h: h.is_patch, hooks.whole_table()), ids=lambda h: h.target[-40:])
def test_handlers_take_what_the_symbol_is_called_with(hook: Hook) -> None:
    """C50: a handler that cannot bind the symbol's arguments would fail on the first request, not at start."""
    assert hook.parameters is not None
    before = {Kind.BEFORE: 0, Kind.AFTER: 1, Kind.AROUND: 1}[hook.kind]  # result or original comes first
    arguments = [object()] * (before + len(hook.parameters))
    handler = inspect.signature(plugin.handlers()[hook.target])
    names = list(handler.parameters.values())
    if any(p.kind is p.KEYWORD_ONLY for p in names):
        positional = [p for p in names if p.kind is p.POSITIONAL_OR_KEYWORD]
        handler.bind(*arguments[: len(positional)], **{p.name: None for p in names[len(positional) :]})
    else:
        handler.bind(*arguments)


def test_installing_with_a_handler_missing_or_too_many() -> None:
    """C50: nothing is registered unless handlers and table agree."""
    handlers = plugin.handlers()
    target, handler = handlers.popitem()
    with pytest.raises(RuntimeError, match=target):
        hooks.install(handlers)
    with pytest.raises(RuntimeError, match=r"sglang\.srt\.no_such"):
        hooks.install({**handlers, target: handler, "sglang.srt.no_such": handler})


# -- a SGLang that differs --------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module `sglang_fake` with one class, and a hook table of one row for it."""
    module = types.ModuleType("sglang_fake")

    class Pool:
        def free(self, index: int, pages: int) -> None: ...

        @classmethod
        def build(cls, size: int) -> None: ...

        @staticmethod
        def names(parser: Any) -> None: ...

    module.Pool = Pool  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang_fake", module)

    def table(name: str, parameters: tuple[str, ...] | None, kind: Kind = Kind.CALL) -> None:
        monkeypatch.setattr(hooks, "whole_table", lambda: (Hook(f"sglang_fake.{name}", kind, parameters, "test"),))

    return table


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Pool.free", ("self", "index", "pages")),
        ("Pool.build", ("cls", "size")),
        ("Pool.names", ("parser",)),
        ("Pool", None),
    ],
)
def test_a_symbol_as_expected_passes(fake: Any, name: str, parameters: tuple[str, ...] | None) -> None:
    """C50: methods, class methods and static methods are compared with all their parameters."""
    fake(name, parameters)
    hooks.require()


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("Pool.release", ("self",), "sglang_fake.Pool.release not found"),
        ("Tank.free", ("self",), "sglang_fake.Tank.free not found"),
        ("Pool.free", ("self", "index"), r"has parameters \(self, index, pages\), expected \(self, index\)"),
        ("Pool.free", ("self", "pages", "index"), r"expected \(self, pages, index\)"),
        ("Pool.build", ("cls", "length"), r"has parameters \(cls, size\), expected \(cls, length\)"),
    ],
)
@pytest.mark.parametrize("applied", [True, False])
def test_a_renamed_symbol_or_changed_parameters_stop_the_start(
    fake: Any, name: str, parameters: tuple[str, ...], words: str, applied: bool
) -> None:
    """C50: the message names symbol, version and remedy."""
    fake(name, parameters)
    with pytest.raises(HookMismatchError, match=words) as error:
        hooks.require(applied)
    message = str(error.value)
    assert f"cannot start on SGLang {hooks.installed_sglang()} (verified against {hooks.SGLANG_VERSION})" in message
    assert f"pip install 'sglang=={hooks.SGLANG_VERSION}'" in message
    assert "oasis check" in message


@pytest.mark.parametrize("kind", [Kind.BEFORE, Kind.AFTER, Kind.AROUND])
def test_a_hook_that_did_not_land_stops_the_start(fake: Any, kind: Kind) -> None:
    """C50: `apply_hooks()` only logs; a patch that is not in place would serve dense without a word."""
    fake("Pool.free", ("self", "index", "pages"), kind)
    hooks.require(applied=False)
    with pytest.raises(HookMismatchError, match=r"sglang_fake\.Pool\.free: hook did not land"):
        hooks.require()


def test_all_mismatches_are_listed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """C50: an operator should see the whole extent of the difference, not the first line of it."""
    changed = tuple(h._replace(parameters=("self", "moved")) for h in hooks.HOOKS if h.parameters)
    monkeypatch.setattr(hooks, "whole_table", lambda: changed)
    with pytest.raises(HookMismatchError) as error:
        hooks.require(applied=False)
    for hook in changed:
        assert hook.target in str(error.value)


@pytest.mark.parametrize("other", ["0.5.24", None])
def test_another_version_is_named(fake: Any, monkeypatch: pytest.MonkeyPatch, other: str | None) -> None:
    """C50: what is installed, not only what is wanted."""
    from importlib.metadata import PackageNotFoundError

    def version(_: str) -> str:
        if other is None:
            raise PackageNotFoundError
        return other

    fake("Pool.gone", ("self",))
    monkeypatch.setattr(hooks, "version", version)
    with pytest.raises(HookMismatchError, match=f"on SGLang {other or 'none'} "):
        hooks.require()


# -- in place ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("plugged")
def test_hooks_land_in_the_installed_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """C50: after registration every patch is in place and still shows the original's parameters; one that is taken
    away again is noticed."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    hooks.require()
    assert all(f.applied for f in hooks.inspect_all() if f.hook.is_patch)
    target = next(h.target for h in hooks.HOOKS if h.is_patch)
    monkeypatch.setattr(HookRegistry, "_patched", HookRegistry._patched - {target})
    with pytest.raises(HookMismatchError, match=f"{target}: hook did not land"):
        hooks.require()


def test_oasis_check(capsys: pytest.CaptureFixture[str], fake: Any) -> None:
    """`oasis check` exits with 1 where something differs, so that a pipeline can use it."""
    fake("Pool.gone", ("self",))
    assert main(["check"]) == 1
    out = capsys.readouterr().out
    assert "1 of 1 differ" in out
    assert f"sglang=={hooks.SGLANG_VERSION}" in out
    fake("Pool.free", ("self", "index", "pages"))
    assert main(["check"]) == 0
    assert "All 1 symbols are as expected" in capsys.readouterr().out


def test_oasis_check_on_the_installed_sglang(capsys: pytest.CaptureFixture[str]) -> None:
    """C50: the released table fits; as JSON, each row says why the symbol is touched."""
    assert main(["check"]) == 0
    assert hooks.main_check(as_json=True) == 0
    out = capsys.readouterr().out
    report = json.loads(out[out.index("{") :])
    assert report["sglang"] == report["verified"] == hooks.SGLANG_VERSION
    assert [row["target"] for row in report["hooks"]] == [hook.target for hook in hooks.whole_table()]


# -- what we override -------------------------------------------------------------------------------------------------


def _call_shape(function: Any) -> list[tuple[str, Any]]:
    return [(p.name, p.default) for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]


@pytest.mark.parametrize(
    "method", ["forward_decode", "forward_extend", "init_forward_metadata", "get_cuda_graph_seq_len_fill_value"]
)
def test_the_attention_backend_keeps_the_base_signature(method: str) -> None:
    """C50: SGLang calls these by position and by keyword; a parameter it adds must not be swallowed unseen."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    from oasis_sglang.attention.backend import OasisAttnBackend

    base, ours = getattr(AttentionBackend, method), getattr(OasisAttnBackend, method)
    assert ours is not base
    assert _call_shape(ours) == _call_shape(base)


def test_everything_overridden_exists_in_the_base() -> None:
    """C50: an override of a method that SGLang renamed is dead code that looks alive."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from oasis_sglang.attention.backend import OasisAttnBackend
    from oasis_sglang.attention.device_backend import DeviceAttnBackend
    from oasis_sglang.memory_pool.device_pool import OasisKVPool
    from oasis_sglang.memory_pool.hnd_pool import HndPool

    ours = {
        "_plan_decode",
        "_plan_extend",
        "_layer_index",
        "buffer_tokens",
        "_storage",
        "_start_workers",
        "_create_tier",
    }
    pools = ((OasisKVPool, MHATokenToKVPool), (HndPool, MHATokenToKVPool))
    backends = ((OasisAttnBackend, AttentionBackend), (DeviceAttnBackend, AttentionBackend))
    for mine, base in (*backends, *pools):
        for name, value in vars(mine).items():
            if inspect.isfunction(value) and name != "__init__" and name not in ours:
                assert hasattr(base, name), f"{base.__name__} has no {name}"
    for name in ("init_cuda_graph_state", "init_forward_metadata_out_graph"):
        assert _call_shape(getattr(DeviceAttnBackend, name)) == _call_shape(getattr(AttentionBackend, name))
    for name in ("_create_buffers", "_finalize_allocation_log", "move_kv_cache"):
        assert _call_shape(getattr(OasisKVPool, name)) == _call_shape(getattr(MHATokenToKVPool, name))
