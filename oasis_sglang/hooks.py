"""The hook table: every symbol of SGLang that this package touches, and the check that each is what we expect.

SGLang logs a plugin's failure and then serves without it. So the table is verified when `--kv-backend oasis` is given:
a symbol that moved or changed its parameters stops the start with the list and the remedy. `oasis check` prints it.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

SGLANG_VERSION = "0.5.23"


class Kind(StrEnum):
    """How a symbol is used. The first three are `HookRegistry` hooks; a name to fill is None in SGLang on hosts without
    its kernels, and ours there; the others are only called or subclassed."""

    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    CALL = "call"
    SUBCLASS = "subclass"
    FILL = "fill"


class Hook(NamedTuple):
    """One symbol of SGLang.

    Attributes:
        target: dotted path.
        kind: how it is used.
        parameters: the parameters it has in `SGLANG_VERSION`, in order; None where only existence matters.
        why: one line.
    """

    target: str
    kind: Kind
    parameters: tuple[str, ...] | None
    why: str

    @property
    def is_patch(self) -> bool:
        return self.kind in (Kind.BEFORE, Kind.AFTER, Kind.AROUND)


_SRT = "sglang.srt."
_ARGS = f"{_SRT}server_args.ServerArgs"
_CONFIGURATOR = f"{_SRT}mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ALLOCATOR = f"{_SRT}mem_cache.allocator.paged.PagedTokenToKVPoolAllocator"
_ROWS = f"{_SRT}mem_cache.memory_pool.ReqToTokenPool"
_SCHEDULER = f"{_SRT}managers.scheduler.Scheduler"

HOOKS: tuple[Hook, ...] = (
    Hook(f"{_ARGS}.add_cli_args", Kind.AFTER, ("parser",), "adds --kv-backend and --oasis-config"),
    Hook(f"{_ARGS}.from_cli_args", Kind.AROUND, ("cls", "args"), "carries them, which the record would drop"),
    Hook(
        f"{_ARGS}.resolve_once",
        Kind.AROUND,
        ("self",),
        "sets the flags the backend needs, refuses what it cannot serve",
    ),
    Hook(
        f"{_CONFIGURATOR}._resolve_memory_pool_config",
        Kind.AROUND,
        ("self", "pre_model_load_memory"),
        "token capacity is the host pool's, device bytes are ours",
    ),
    Hook(
        f"{_CONFIGURATOR}._profile_available_bytes",
        Kind.CALL,
        ("self", "pre_model_load_memory"),
        "what a device has for pools, maps and workspaces",
    ),
    Hook(f"{_CONFIGURATOR}._resolve_kv_pool_class", Kind.AROUND, ("self", "kind", "default"), "our pool class"),
    Hook(
        f"{_ALLOCATOR}._release_page_ids", Kind.BEFORE, ("self", "page_ids"), "freed host pages hold nothing any more"
    ),
    Hook(f"{_ALLOCATOR}.clear", Kind.AFTER, ("self",), "/flush_cache empties the host pool"),
    Hook(f"{_ROWS}.alloc", Kind.AFTER, ("self", "reqs"), "a request that gets its row gets its device pages"),
    Hook(
        f"{_ROWS}.free_rows", Kind.BEFORE, ("self", "indices"), "finish, abort and retract give the device pages back"
    ),
    Hook(f"{_ROWS}.clear", Kind.AFTER, ("self",), "/flush_cache drops every row"),
    Hook(
        f"{_SRT}managers.schedule_policy.PrefillAdder.add_one_req",
        Kind.AROUND,
        ("self", "req", "has_chunked_req", "truncation_align_size"),
        "admission counts device pages too",
    ),
    Hook(
        f"{_SRT}managers.schedule_batch.Req.materialized_host_hit_len",
        Kind.AROUND,
        ("self",),
        "prefix hits are host hits: cached_tokens_details and metrics",
    ),
    Hook(
        f"{_SRT}beam_search.coordinator.BeamCoordinator.validate_and_init",
        Kind.AROUND,
        ("self", "req", "recv_req"),
        "refuses beam search with 400",
    ),
    Hook(
        f"{_SRT}managers.scheduler.validate_input_length",
        Kind.AROUND,
        ("req", "max_req_input_len", "allow_auto_truncate"),
        "refuses prompts without tokens and unknown token ids with 400: either would end the scheduler",
    ),
    Hook(
        f"{_SCHEDULER}.is_fully_idle",
        Kind.AROUND,
        ("self", "for_health_check", "ignore_waiting"),
        "transfers in flight are not idle",
    ),
    Hook(
        f"{_SRT}managers.scheduler_components.invariant_checker.SchedulerInvariantChecker._check_req_pool",
        Kind.AFTER,
        ("self",),
        "our own leak check beside SGLang's, at idle",
    ),
    Hook(
        f"{_SRT}managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        Kind.AFTER,
        ("self", "recv_req"),
        "state in /server_info",
    ),
    Hook(
        f"{_SRT}observability.metrics_collector.SchedulerMetricsCollector.log_stats",
        Kind.AFTER,
        ("self", "stats"),
        "sglang:oasis_* metrics",
    ),
    Hook(
        f"{_SRT}layers.attention.attention_registry.register_attention_backend",
        Kind.CALL,
        ("name",),
        "registers the attention backend",
    ),
    Hook(f"{_SRT}server_args.add_attention_backend_choices", Kind.CALL, None, "makes its name a valid choice"),
    Hook(
        f"{_SRT}layers.attention.base_attn_backend.AttentionBackend.forward",
        Kind.SUBCLASS,
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs"),
        "dispatches to forward_decode/_extend",
    ),
    Hook(
        f"{_SRT}layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata",
        Kind.SUBCLASS,
        ("self", "forward_batch"),
        "once per forward pass",
    ),
    Hook(
        f"{_SRT}layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_out_graph",
        Kind.SUBCLASS,
        ("self", "forward_batch", "in_capture"),
        "what a graph is captured or replayed for",
    ),
    Hook(
        f"{_SRT}layers.attention.base_attn_backend.AttentionBackend.shared_read_ends",
        Kind.SUBCLASS,
        ("self", "fm"),
        "when the overlap scheduler may change what a step uses",
    ),
    Hook(
        f"{_SRT}models.utils.enable_fused_set_kv_buffer",
        Kind.AROUND,
        ("forward_batch",),
        "no model writes to the pool by slot",
    ),
    Hook(
        f"{_SRT}mem_cache.memory_pool.MHATokenToKVPool._create_buffers",
        Kind.SUBCLASS,
        ("self",),
        "device pages instead of one buffer per slot",
    ),
    Hook(
        f"{_SRT}mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
        Kind.SUBCLASS,
        ("self", "layer", "loc_info", "cache_k", "cache_v", "k_scale", "v_scale", "layer_id_override", "dcp_kv_mask"),
        "overridden to refuse writes by slot",
    ),
    Hook(
        f"{_SRT}mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache",
        Kind.SUBCLASS,
        ("self", "tgt_loc", "src_loc"),
        "overridden to refuse moves by slot",
    ),
    Hook(
        f"{_SRT}speculative.eagle_worker_common.run_eagle_verify",
        Kind.AFTER,
        (
            *("batch", "target_worker", "req_to_token_pool", "token_to_kv_pool_allocator", "plan_stream"),
            *("plan_stream_ctx", "topk", "num_draft_tokens", "device", "metadata_ready_pre_pad", "finalize_tree_path"),
            *("pp_proxy_tensors", "grammar_barrier", "uno_target_max_top_k"),
        ),
        "commits accepted tokens",
    ),
    Hook(
        f"{_SRT}speculative.eagle_worker_common.build_eagle_verify_input",
        Kind.AROUND,
        (
            *("batch", "draft_input", "parent_list", "top_scores_index", "draft_tokens", "draft_probs"),
            *("target_worker", "topk", "num_steps", "num_draft_tokens", "tree_mask_mode", "device"),
        ),
        "drafts copied from where the text repeats",
    ),
    Hook(
        f"{_SRT}speculative.eagle_utils.eagle_sample",
        Kind.AROUND,
        (
            *("verify_input", "batch", "logits_output", "grammar_mask", "uno_target_max_top_k", "watermark_state"),
            "watermark_full_mask",
        ),
        "probe mode accepts no draft",
    ),
    Hook(
        f"{_SRT}speculative.draft_utils.DraftBackendFactory._create_backend",
        Kind.BEFORE,
        ("self", "backend_name", "backend_map", "error_template", "stamps_children"),
        "attention of the draft model",
    ),
    Hook(
        f"{_SRT}layers.attention.verify_mask.maybe_create_verify_mask",
        Kind.CALL,
        (
            *("is_draft_runner", "skip_prefill", "max_bs", "max_context_len", "num_draft_tokens", "device", "is_read"),
            "dtype",
        ),
        "chains need no mask",
    ),
    Hook(f"{_SRT}environ.envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH", Kind.CALL, None, "refused on a GPU"),
    Hook(f"{_SRT}arg_groups.overrides.model_config_of", Kind.CALL, ("server_args",), "the model's configuration"),
    Hook(f"{_SRT}configs.hybrid_arch.mambaish_config", Kind.CALL, ("model_config",), "models with recurrent layers"),
    Hook(f"{_SRT}entrypoints.engine.Engine.server_args_class", Kind.CALL, None, "Engine(kv_backend='oasis')"),
)


class Finding(NamedTuple):
    hook: Hook
    problem: str | None  # None: as expected
    applied: bool  # for patches: whether ours is in place in this process


def _original(symbol: Any) -> Any:
    """The function beneath hooks: `HookRegistry` leaves the original in `__wrapped__`."""
    while hasattr(symbol, "__wrapped__") and getattr(symbol, "__module__", "").startswith("sglang"):
        symbol = symbol.__wrapped__
    return symbol


def _resolve(target: str) -> Any:
    path, name = target.rsplit(".", 1)
    owner = pkgutil.resolve_name(path)
    if isinstance(owner, type):
        raw = next((c.__dict__[name] for c in owner.__mro__ if name in c.__dict__), None)
        if isinstance(raw, (classmethod, staticmethod)):
            return raw.__func__
    return getattr(owner, name)


def inspect_hook(hook: Hook) -> Finding:
    """Compare one symbol with the installed SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    try:
        symbol = _resolve(hook.target)
    except (ImportError, AttributeError) as error:
        return Finding(hook, f"not found ({error})", False)
    applied = hook.target in HookRegistry._patched
    if hook.parameters is None:
        return Finding(hook, None, applied)
    actual = tuple(inspect.signature(_original(symbol)).parameters)
    if actual != hook.parameters:
        return Finding(hook, f"has parameters ({', '.join(actual)}), expected ({', '.join(hook.parameters)})", applied)
    return Finding(hook, None, applied)


def whole_table() -> tuple[Hook, ...]:
    """The table above and the CPU platform's."""
    # Imported here: that table is made of this module's `Hook`.
    from oasis_sglang.platform import cpu
    from oasis_sglang.platform.symbols import CHAIN_HOOKS, CPU_HOOKS

    return (*HOOKS, *CPU_HOOKS, *(CHAIN_HOOKS if cpu.activate() else ()))


def inspect_all() -> list[Finding]:
    return [inspect_hook(hook) for hook in whole_table()]


def installed_sglang() -> str:
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "none"


class HookMismatchError(RuntimeError):
    """SGLang is not the one this package was verified against."""


def require(applied: bool = True) -> None:
    """Raise unless every symbol is as expected and, with `applied`, every hook is in place.

    Raises:
        HookMismatchError: with SGLang's version, each mismatch and the remedy.
    """
    problems = []
    for finding in inspect_all():
        if finding.problem:
            problems.append(f"{finding.hook.target} {finding.problem}")
        elif applied and finding.hook.is_patch and not finding.applied:
            problems.append(f"{finding.hook.target}: hook did not land")
    if problems:
        lines = "\n  ".join(problems)
        raise HookMismatchError(
            f"--kv-backend oasis cannot start on SGLang {installed_sglang()} (verified against {SGLANG_VERSION}):\n"
            f"  {lines}\nRemedy: pip install 'sglang=={SGLANG_VERSION}', or an oasis-sglang release for your SGLang. "
            "`oasis check` prints the whole table."
        )


def install(handlers: dict[str, Callable[..., Any]]) -> None:
    """Register a handler for every patch of the table."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    patches = {hook.target: hook for hook in whole_table() if hook.is_patch}
    if set(patches) != set(handlers):
        raise RuntimeError(f"hook table and handlers differ: {sorted(set(patches) ^ set(handlers))}")
    for target, hook in patches.items():
        HookRegistry.register(target, handlers[target], HookType(hook.kind.value))


def main_check(as_json: bool = False) -> int:
    """`oasis check`: print the table; 0 when SGLang is as expected, else 1."""
    findings = inspect_all()
    bad = sum(f.problem is not None for f in findings)
    if as_json:
        import json

        rows = [
            {"target": f.hook.target, "kind": f.hook.kind.value, "why": f.hook.why, "problem": f.problem}
            for f in findings
        ]
        print(json.dumps({"sglang": installed_sglang(), "verified": SGLANG_VERSION, "hooks": rows}, indent=2))
        return 1 if bad else 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Hooks into SGLang {installed_sglang()} (verified against {SGLANG_VERSION})")
    for column in ("symbol", "kind", "why", "state"):
        table.add_column(column, overflow="fold")
    for f in findings:
        state = f"[red]{f.problem}[/red]" if f.problem else "[green]as expected[/green]"
        table.add_row(f.hook.target.removeprefix("sglang.srt."), f.hook.kind.value, f.hook.why, state)
    console = Console()
    console.print(table)
    if bad:
        console.print(f"[red]{bad} of {len(findings)} differ.[/red] Remedy: pip install 'sglang=={SGLANG_VERSION}'")
    else:
        console.print(f"All {len(findings)} symbols are as expected.")
    return 1 if bad else 0
