"""What decode steps attend with on a device that has memory of its own: chosen before the pools are sized, since it
takes of their memory, and made with them."""

from __future__ import annotations

import msgspec
import torch

from oasis_sglang.attention.ops import AttentionOps
from oasis_sglang.config import OasisConfig
from oasis_sglang.kernels.choose import choose_ops
from oasis_sglang.kernels.flashinfer import FlashInferOps
from oasis_sglang.kernels.ops import TritonOps
from oasis_sglang.memory_pool.device_bytes import DeviceLoad
from oasis_sglang.memory_pool.sizing import PoolGeometry


def choose_attention(
    load: DeviceLoad, config: OasisConfig, geometry: PoolGeometry, dtype: torch.dtype, device: torch.device
) -> DeviceLoad:
    """The load, with what attends in its largest step (`choose_ops`, which logs what and why). What was tried with is
    given back.

    Args:
        dtype: of the model and its KV.
    """
    choice = choose_ops(TritonOps(), load.shape(config, geometry).attention(dtype), device)
    return msgspec.structs.replace(load, flashinfer=isinstance(choice.ops, FlashInferOps))


def create_attention(
    load: DeviceLoad, config: OasisConfig, geometry: PoolGeometry, dtype: torch.dtype, device: torch.device
) -> AttentionOps:
    """The ops that were chosen, with their memory: `device_bytes.attention_bytes`, of which FlashInfer takes its plans'
    part when batches of their sizes come up."""
    shape = load.shape(config, geometry)
    if load.flashinfer:
        return FlashInferOps(shape.attention(dtype), device)
    return TritonOps(torch.zeros(shape.attend_work(device), device=device))
