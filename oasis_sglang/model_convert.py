"""Convert SmolLM2-135M-Instruct from GGUF to the folder that SGLang loads: bf16 safetensors and a tokenizer.

Runs as a process of its own (`python -m oasis_sglang.model_convert GGUF FOLDER`), so that the caller does not keep
torch, transformers and the dequantized weights in memory.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

#: A question the model answers reliably; a mangled conversion (rotary layout, tokenizer) does not.
SANITY_PROMPT = "What is the capital of France?"
SANITY_ANSWER = "Paris"
MAX_CONTEXT = 8192


def convert(gguf: Path, folder: Path) -> None:
    """Write model, tokenizer, chat template and generation config of `gguf` to `folder`, then try them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    _split_digits(tokenizer)
    tokenizer.model_max_length = MAX_CONTEXT
    for key in ("is_local", "local_files_only"):  # say where this copy was loaded from, not what it is
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(folder)

    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=quantization)
    if hasattr(model.config, "quantization_config"):
        # The weights are plain bf16 from here on; with this entry left, loaders would look for GGUF tensors.
        del model.config.quantization_config
    # GGUF carries the name of a training stage here, and loaders take this field for the model's.
    model.config._model_name_or_path = "SmolLM2-135M-Instruct"
    model.config.rms_norm_eps = 1e-05  # GGUF keeps it as a float32
    model.save_pretrained(folder)
    _try_out(folder)


def _split_digits(tokenizer: Any) -> None:
    """Restore the pre-tokenizer's first step, which the GGUF reader of transformers does not know.

    GGUF names the pre-tokenizer `smollm`: single digits, then GPT-2's pattern. The reader builds the second only, and
    then white space before a digit is cut otherwise than in training.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _try_out(folder: Path) -> None:
    """Load what was saved and let it answer one question; raises RuntimeError if the answer is wrong."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    chat = [{"role": "user", "content": SANITY_PROMPT}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if SANITY_ANSWER not in answer:
        raise RuntimeError(f"the converted model answers {SANITY_PROMPT!r} with {answer!r}")


def main() -> int:
    """Entry of the conversion process."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here may depend on a model hub
    os.environ["TQDM_DISABLE"] = "1"  # the caller shows the progress
    warnings.filterwarnings("ignore")
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
