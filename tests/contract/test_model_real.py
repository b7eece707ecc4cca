"""The real demo model, as transformers sees it. Built first if the cache does not hold it."""

from __future__ import annotations

from pathlib import Path

import pytest

from oasis_sglang.model import ensure_model, problems_of

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_model().path


@pytest.fixture(scope="module")
def tokenizer(folder: Path):  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def network(folder: Path):  # type: ignore[no-untyped-def]
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def test_second_call_only_verifies(folder: Path) -> None:
    assert problems_of(folder) == []
    again = ensure_model()
    assert again.path == folder
    assert not again.built


def test_chat_template_and_special_tokens(tokenizer) -> None:  # type: ignore[no-untyped-def]
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 1
    assert ids.count(2) == 2
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.model_max_length == 8192
    # The seventeen control tokens are cut out of the text before anything else.
    assert tokenizer("<|im_start|><|endoftext|><empty_output>")["input_ids"] == [1, 0, 16]


def test_digits_are_split_off_before_white_space(tokenizer) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.tokenize("12345") == list("12345")
    # Without the digit step the two spaces would be cut apart.
    assert tokenizer.tokenize("a  7") == ["a", "ĠĠ", "7"]


@pytest.mark.parametrize("text", ["def f(x):\n    return x + 1  # é 日本\n\n\n", "  12,345.67 don't  stop\t!", ""])
def test_tokenizer_round_trip(tokenizer, text: str) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_logits_are_finite_and_the_answer_is_right(network, tokenizer) -> None:  # type: ignore[no-untyped-def]
    inputs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        logits = network(**inputs).logits
        output = network.generate(**inputs, max_new_tokens=32, do_sample=False)
    assert logits.shape == (1, inputs["input_ids"].shape[1], 49152)
    assert torch.isfinite(logits).all()
    answer = output[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == 2, "greedy decoding must stop at <|im_end|>, not at the length limit"


def test_weights_are_bf16_and_tied(network) -> None:  # type: ignore[no-untyped-def]
    assert {parameter.dtype for parameter in network.parameters()} == {torch.bfloat16}
    assert network.lm_head.weight.data_ptr() == network.model.embed_tokens.weight.data_ptr()
    assert sum(parameter.numel() for parameter in network.parameters()) == 134_515_008
