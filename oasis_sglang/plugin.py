"""Entry point of group `sglang.srt.plugins`: puts the hook table in place. Each handler returns at once unless
`--kv-backend oasis` was given, so that without it nothing of SGLang changes."""

from __future__ import annotations

from typing import Any

from oasis_sglang import arguments, coordinator, hooks, metrics, validate
from oasis_sglang.platform import spec_ops


def register() -> None:
    """Called by SGLang once in every process that loads plugins, before anything is parsed or built."""
    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ServerArgs, add_attention_backend_choices

    hooks.install(handlers())
    register_attention_backend(arguments.ATTENTION_BACKEND)(_create_attention_backend)
    add_attention_backend_choices([arguments.ATTENTION_BACKEND])
    add_draft_attention_backend_choices([arguments.ATTENTION_BACKEND])
    if Engine.server_args_class is ServerArgs:
        Engine.server_args_class = staticmethod(lambda **kwargs: arguments.make_engine_args(ServerArgs, **kwargs))


def handlers() -> dict[str, Any]:
    """Handler of every patch in the hook table, by dotted path."""
    short = {
        "add_cli_args": _add_cli_args,
        "from_cli_args": _from_cli_args,
        "resolve_once": _resolve_once,
        "_resolve_memory_pool_config": _resolve_memory_pool_config,
        "_resolve_kv_pool_class": _resolve_kv_pool_class,
        "_release_page_ids": _release_page_ids,
        "PagedTokenToKVPoolAllocator.clear": _allocator_cleared,
        "ReqToTokenPool.alloc": _rows_allocated,
        "free_rows": _rows_freed,
        "ReqToTokenPool.clear": _rows_cleared,
        "add_one_req": _add_one_req,
        "materialized_host_hit_len": _host_hit_len,
        "validate_and_init": _refuse_beam,
        "validate_input_length": _check_prompt,
        "is_fully_idle": _is_fully_idle,
        "_check_req_pool": _check_req_pool,
        "get_internal_state": _get_internal_state,
        "log_stats": _log_stats,
        "run_eagle_verify": _commit_accepted,
        "build_eagle_verify_input": _copy_repeats,
        "eagle_sample": _accept_none_in_probe,
        "DraftBackendFactory._create_backend": _offer_draft_backend,
        "enable_fused_set_kv_buffer": _writes_kv_itself,
        **{path.rsplit(".", 1)[1]: spec_ops.on_cpu(path) for path in spec_ops.AROUND},
    }
    found = {}
    for hook in hooks.whole_table():
        for name, handler in short.items():
            if hook.is_patch and hook.target.endswith("." + name):
                found[hook.target] = handler
    return found


def _create_attention_backend(model_runner: Any) -> Any:
    if model_runner.is_draft_worker:
        from oasis_sglang.attention.draft_backend import DraftAttnBackend

        return DraftAttnBackend(model_runner)
    active = coordinator.active()
    if active is not None and active.setup.load is not None:
        from oasis_sglang.attention.device_backend import DeviceAttnBackend

        return DeviceAttnBackend(model_runner)
    from oasis_sglang.attention.backend import OasisAttnBackend

    return OasisAttnBackend(model_runner)


# -- flags ------------------------------------------------------------------------------------------------------------


def _add_cli_args(result: None, parser: Any) -> None:
    arguments.add_cli_args(parser)


def _from_cli_args(original: Any, cls: Any, args: Any) -> Any:
    config = arguments.read_cli_args(args)
    server_args = original(cls, args)
    arguments.attach(server_args, config)
    return server_args


def _resolve_once(original: Any, self: Any) -> None:
    config = arguments.settle(self)
    if config is None or getattr(self, "_resolution_finished", False):
        return original(self)
    hooks.require()
    arguments.apply(self, config)
    validate.check_flags(self)
    from sglang.srt.arg_groups.overrides import model_config_of, resolving_view

    try:
        original(self)
    except Exception:
        # SGLang stumbles over some of the models that are refused below: name the reason, not where it fell.
        if (model := getattr(self, "_model_config", None)) is not None:
            validate.check_model(model)
        raise
    view, model = resolving_view(self), model_config_of(self)
    validate.check_device(view, config)
    validate.check_graphs(view.cuda_graph_config)
    validate.check_speculation(view, config)
    validate.check_model(model)
    validate.check_layers(config, model.num_hidden_layers)
    validate.check_kv_dtype(view.kv_cache_dtype, model.dtype)
    return None


# -- pools ------------------------------------------------------------------------------------------------------------


def _resolve_memory_pool_config(original: Any, self: Any, pre_model_load_memory: Any) -> Any:
    config = arguments.attached(self.server_args)
    if config is None or self.is_draft_worker:
        return original(self, pre_model_load_memory)
    from oasis_sglang.memory_pool.device_setup import plan_rank

    hooks.require()  # in this process too: it is the one that serves
    resolved = original(self, pre_model_load_memory)
    setup = plan_rank(self, config, resolved, pre_model_load_memory)
    resolved.max_total_num_tokens = setup.plan.host_tokens
    resolved.max_running_requests = setup.rows
    coordinator.prepare(setup)
    return resolved


def _resolve_kv_pool_class(original: Any, self: Any, *, kind: str, default: type) -> type:
    # SGLang resolves the class of every kind before it picks one; models that use another were refused at start.
    if arguments.attached(self.server_args) is None or kind != "mha":
        return original(self, kind=kind, default=default)
    if self.is_draft_worker:
        from oasis_sglang.memory_pool.draft_pool import OasisDraftPool

        return OasisDraftPool
    from oasis_sglang.memory_pool.device_pool import OasisKVPool

    metrics.install_log_parts()
    return OasisKVPool


def _writes_kv_itself(original: Any, forward_batch: Any) -> bool:
    # Some models write K and V of new tokens to the pool where they turn them, by slot: on CUDA, in bfloat16.
    return bool(original(forward_batch)) if coordinator.active() is None else False


def _release_page_ids(self: Any, *page_ids: Any) -> None:
    active = coordinator.active()
    if active is not None:
        for pages in page_ids:
            active.pages_freed(pages)


def _allocator_cleared(result: None, self: Any) -> None:
    active = coordinator.active()
    if active is not None:
        active.pool_cleared()


# -- requests ---------------------------------------------------------------------------------------------------------


def _rows_allocated(result: Any, self: Any, reqs: list[Any]) -> None:
    active = coordinator.active()
    if active is not None and result is not None:
        active.enter(reqs)


def _rows_freed(self: Any, indices: list[int]) -> None:
    active = coordinator.active()
    if active is not None:
        active.leave(indices)


def _rows_cleared(result: None, self: Any) -> None:
    active = coordinator.active()
    if active is not None:
        active.leave_all()


def _add_one_req(original: Any, self: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any:
    active = coordinator.active()
    if active is not None and not active.has_room(req, self.can_run_list):
        from sglang.srt.managers.schedule_policy import AddReqResult

        return AddReqResult.NO_TOKEN
    return original(self, req, has_chunked_req, truncation_align_size)


def _host_hit_len(original: Any, self: Any) -> int:
    # The tree sees every slot as resident, but what a hit finds is in the host pool: the device holds only the pages of
    # running requests.
    return original(self) if coordinator.active() is None else self.prefix_len


def _check_prompt(original: Any, req: Any, max_req_input_len: int, allow_auto_truncate: bool) -> str | None:
    if coordinator.active() is not None and (problem := validate.prompt_problem(req)):
        return problem
    return original(req, max_req_input_len, allow_auto_truncate)


def _refuse_beam(original: Any, self: Any, req: Any, recv_req: Any) -> str | None:
    if coordinator.active() is None:
        return original(self, req, recv_req)
    width = req.sampling_params.beam_width
    return f"beam_width={width} does not work with --kv-backend oasis; use beam_width=1, or n for parallel samples."


# -- speculation ------------------------------------------------------------------------------------------------------


def _commit_accepted(result: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    active = coordinator.active()
    if active is not None and result.accept_lens.numel():
        active.accept(result.accept_lens)


def _copy_repeats(original: Any, batch: Any, draft_input: Any, *tree: Any, **kwargs: Any) -> Any:
    active = coordinator.active()
    if active is not None and not batch.forward_mode.is_idle():
        parents, scores, drafts, *rest = tree
        tree = (parents, scores, active.drafts(batch, draft_input.bonus_tokens, drafts), *rest)
    return original(batch, draft_input, *tree, **kwargs)


def _accept_none_in_probe(original: Any, *args: Any, **kwargs: Any) -> Any:
    predict, accept_lens, accept_index = original(*args, **kwargs)
    active = coordinator.active()
    if active is not None and active.setup.config.probe and accept_lens.numel():
        accept_lens = accept_lens.new_ones(accept_lens.shape)
        accept_index[:, 1:] = -1
    return predict, accept_lens, accept_index


def _offer_draft_backend(
    self: Any, backend_name: str, backend_map: dict[str, Any], error_template: str, stamps_children: bool = False
) -> None:
    if coordinator.active() is None:
        return
    from oasis_sglang.attention.draft_backend import DraftAttnBackend, MultiStepDraftBackend

    name, runner = arguments.ATTENTION_BACKEND, self.draft_model_runner
    if stamps_children:
        backend_map[name] = lambda: (name, MultiStepDraftBackend(runner, self.topk, self.speculative_num_steps))
    else:
        backend_map[name] = lambda: (name, DraftAttnBackend(runner))


# -- state ------------------------------------------------------------------------------------------------------------


def _is_fully_idle(original: Any, self: Any, for_health_check: bool = False, ignore_waiting: bool = False) -> bool:
    active = coordinator.active()
    idle = original(self, for_health_check, ignore_waiting)
    return idle if active is None or for_health_check else idle and active.idle()


def _check_req_pool(result: None, self: Any) -> None:
    active = coordinator.active()
    if active is not None:
        active.check_idle()


def _get_internal_state(result: Any, self: Any, recv_req: Any) -> Any:
    active = coordinator.active()
    if active is not None:
        result.internal_state["oasis"] = active.state()
    return result


def _log_stats(result: None, self: Any, stats: Any) -> None:
    metrics.publish(self.labels)
