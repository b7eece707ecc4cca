"""Run as a process of its own: SGLang's draft class, built for a folder and loaded from it, then asked what it got.

Process groups and SGLang's global context would stay behind in a test process. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig


def main(folder: Path) -> None:
    publish(ServerArgs(model_path="dummy", device="cpu"), role="test", ranks=SpawnRanks(world_rank=0, dp_rank=None))
    address = f"file://{folder / 'rendezvous'}"
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=address, backend="gloo"
    )  # fmt: skip
    initialize_model_parallel(backend="gloo")
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLMEagle3(AutoConfig.from_pretrained(folder))
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    tensors = load_file(folder / "model.safetensors")
    model.load_weights(iter(tensors.items()))
    parameters = dict(model.named_parameters())
    layer = parameters["model.layers.0.self_attn.qkv_proj.weight"]
    parts = [tensors[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv"]
    print(
        json.dumps(
            {
                "not loaded": sorted(name for name, value in parameters.items() if bool(value.isnan().any())),
                "numbers": sum(value.numel() for name, value in parameters.items() if "embed" not in name),
                "numbers in the file": sum(value.numel() for name, value in tensors.items() if name != "d2t"),
                "qkv": torch.equal(layer, torch.cat(parts)),
                "fc": torch.equal(parameters["model.fc.weight"], tensors["fc.weight"]),
                "hot tokens": model.hot_token_id.tolist(),
                "aux": model.model.num_aux_hidden_states,
                "feeds back": "normed" if model.model.norm_output else "before norm",
                "rope theta": model.model.layers[0].self_attn.rotary_emb.base,
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
