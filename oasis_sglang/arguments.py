"""`--kv-backend` and `--oasis-config` on SGLang's command line, and how the choice travels to the rank processes.

SGLang's `ServerArgs` is a closed record: it takes no new field. The configuration rides on the instance under a name
that starts with an underscore, which the record allows and pickles along to its children.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from oasis_sglang.config import ConfigError, OasisConfig, parse_config

KV_BACKEND = "oasis"
ATTENTION_BACKEND = "oasis"
# For `sglang.Engine` and other callers without a command line.
CONFIG_ENV = "SGLANG_OASIS_CONFIG"
# Drafts per step where the user does not say.
DRAFT_STEPS = 3
_ATTRIBUTE = "_oasis"


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("oasis (KV cache in host memory, sparse decode attention)")
    group.add_argument(
        "--kv-backend",
        choices=[KV_BACKEND],
        default=None,
        help="Where the KV cache lives. 'oasis' keeps it in host memory and on the device only the pages that "
        "attention is about to use. Default: SGLang's own device pool.",
    )
    group.add_argument(
        "--oasis-config",
        default=None,
        metavar="JSON|@FILE",
        help="Settings of --kv-backend oasis as a JSON object or a file (@name.json, @name.yaml, @name.toml), "
        """for example '{"token_budget": 2048, "host_to_device_ratio": 4}'. See the README for all keys.""",
    )


def read_cli_args(args: argparse.Namespace) -> OasisConfig | None:
    """The configuration that a command line asks for, or None where it does not ask for this backend.

    Raises:
        ConfigError: `--oasis-config` is wrong, or was given without `--kv-backend oasis`.
    """
    source = getattr(args, "oasis_config", None)
    if getattr(args, "kv_backend", None) != KV_BACKEND:
        if source is not None:
            raise ConfigError(f"--oasis-config {source!r} needs --kv-backend {KV_BACKEND}")
        return None
    return parse_config(source)


def read_environment() -> OasisConfig | None:
    """The configuration in `SGLANG_OASIS_CONFIG` (`{}` for the defaults), or None where it is not set."""
    text = os.environ.get(CONFIG_ENV, "").strip()
    return parse_config(text) if text else None


def attach(server_args: Any, config: OasisConfig | None) -> None:
    """Remember what was asked for; None is remembered too, so that the environment does not override a command line."""
    setattr(server_args, _ATTRIBUTE, config)


def attached(server_args: Any) -> OasisConfig | None:
    return getattr(server_args, _ATTRIBUTE, None)


def settle(server_args: Any) -> OasisConfig | None:
    """What this record asks for: its command line, else the environment. Remembered on the record."""
    if not hasattr(server_args, _ATTRIBUTE):
        attach(server_args, read_environment())
    return attached(server_args)


def apply(server_args: Any, config: OasisConfig) -> None:
    """Set the SGLang flags that the backend needs, before SGLang resolves them.

    Raises:
        ConfigError: the user set one of them to something else.
    """
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        given = getattr(server_args, name)
        if given not in (None, ATTENTION_BACKEND):
            raise ConfigError(
                f"--{name.replace('_', '-')} {given} does not work with --kv-backend {KV_BACKEND}, which brings its "
                "own attention; leave the flag out"
            )
    server_args.attention_backend = ATTENTION_BACKEND
    if server_args.page_size not in (None, config.page_size):
        raise ConfigError(
            f"--page-size {server_args.page_size} and page_size={config.page_size} in --oasis-config differ; use "
            f"""--page-size {config.page_size} or --oasis-config '{{"page_size": {server_args.page_size}}}'"""
        )
    server_args.page_size = config.page_size
    # SGLang captures prompt chunks too, on CUDA; graphs of decode steps and the overlap scheduler stay as they are.
    server_args.disable_prefill_cuda_graph = True
    if server_args.speculative_algorithm is not None:
        _default_chain(server_args)


def _default_chain(server_args: Any) -> None:
    """Drafts as a chain, where the user did not say: SGLang would pick a tree for some models."""
    if server_args.speculative_num_steps is None and server_args.speculative_num_draft_tokens is not None:
        server_args.speculative_num_steps = server_args.speculative_num_draft_tokens - 1
    if server_args.speculative_num_steps is None:
        server_args.speculative_num_steps = DRAFT_STEPS
    if server_args.speculative_eagle_topk is None:
        server_args.speculative_eagle_topk = 1
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = server_args.speculative_num_steps + 1


def make_engine_args(server_args_class: type, **kwargs: Any) -> Any:
    """`ServerArgs` for `sglang.Engine(kv_backend="oasis", oasis_config=..., **kwargs)`."""
    backend, source = kwargs.pop("kv_backend", None), kwargs.pop("oasis_config", None)
    if backend not in (None, KV_BACKEND):
        raise ConfigError(f"kv_backend={backend!r} is unknown; use kv_backend={KV_BACKEND!r} or leave it out")
    if source is not None and backend is None:
        raise ConfigError(f"oasis_config={source!r} needs kv_backend={KV_BACKEND!r}")
    server_args = server_args_class(**kwargs)
    if backend is not None:
        attach(server_args, parse_config(source))
    return server_args
