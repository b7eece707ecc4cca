"""What dense SGLang answers: the independent side of every comparison in this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oasis_sglang.serving import Answer, Client, Documents, ask_all, greedy
from tests.server.checks import metrics, refusal

LENGTHS = (20, 24, 31, 37, 48, 55, 60, 64, 97, 111, 128, 150, 190, 240, 300, 400, 512, 700, 1500, 1543)
NEW_TOKENS = 64
LOGPROB_PROMPTS = (3, 13, 17)
LOGPROB_FIELDS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
# Prompts that, with what they get, stay within 128 tokens of budget and a page of local tail.
SHORT = range(8)
CONTEXT = 8192

Prompt = list[int]


@dataclass
class Truth:
    """Prompts and dense SGLang's answers to them, all in fp32 and greedy."""

    prompts: list[Prompt]
    answers: list[Answer]  # NEW_TOKENS tokens each, whatever they say
    natural: Answer  # to `question`, ending where the model ends it
    question: Prompt
    logprobs: list[dict[str, Any]]  # `/generate` with LOGPROB_FIELDS, of LOGPROB_PROMPTS
    # Per short prompt and token of its answer: whether dense says it too when it never saw the prompt's first token.
    without_first: list[list[bool]]
    second_turn: Prompt  # prompts[16], its answer, and what the user says next
    second_answer: Answer
    long: Prompt
    long_first: dict[str, Any]  # `/generate` of one token with its logprob: what a prefill computes
    too_long: Prompt
    too_long_refusal: str
    info: dict[str, Any]
    metrics: dict[str, float]

    def short(self) -> tuple[list[Prompt], list[Answer]]:
        return [self.prompts[at] for at in SHORT], [self.answers[at] for at in SHORT]


def make_prompts(documents: Documents) -> list[Prompt]:
    """Running text and chat questions in turn."""
    question = "Which of these sentences matters most, and why?"
    return [
        documents.with_question(at, length, question) if at % 2 and length >= 60 else documents.text(at, length)
        for at, length in enumerate(LENGTHS)
    ]


def gather(client: Client, documents: Documents) -> Truth:
    """Ask a dense server everything."""
    prompts = make_prompts(documents)
    answers = ask_all(client, prompts, greedy(NEW_TOKENS, ignore_eos=True))
    question = documents.with_question(40, 70, "What is two plus two? Answer with one number.")
    natural = client.stream(question, greedy(48))
    client.flush_cache()
    logprobs = [client.generate(prompts[at], greedy(16, ignore_eos=True), **LOGPROB_FIELDS) for at in LOGPROB_PROMPTS]
    client.flush_cache()
    without_first = [_agreement(client, prompts[at], answers[at].output_ids) for at in SHORT]
    client.flush_cache()
    second_turn = [*prompts[16], *answers[16].output_ids, *documents.text(50, 40)]
    second_answer = client.stream(second_turn, greedy(32, ignore_eos=True))
    long = documents.text(60, 1600)
    client.flush_cache()
    long_first = client.generate(long, greedy(1), return_logprob=True, top_logprobs_num=5)
    too_long = documents.text(70, CONTEXT + 1)
    return Truth(
        prompts=prompts,
        answers=answers,
        natural=natural,
        question=question,
        logprobs=logprobs,
        without_first=without_first,
        second_turn=second_turn,
        second_answer=second_answer,
        long=long,
        long_first=long_first,
        too_long=too_long,
        too_long_refusal=refusal(client, too_long, greedy(4)),
        info=client.server_info(),
        metrics=metrics(client),
    )


def _agreement(client: Client, prompt: Prompt, output: list[int]) -> list[bool]:
    fields = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    meta = client.generate([*prompt, *output][1:], greedy(1), **fields)["meta_info"]
    best = [row[0][1] if row else None for row in meta["input_top_logprobs"]]
    return [token == said for token, said in zip(output, best[len(prompt) - 1 :], strict=True)]


def assert_same(prompts: Sequence[Prompt], ours: Sequence[Answer], dense: Sequence[Answer]) -> None:
    """Token for token; says which prompt differs, and where."""
    different = []
    for prompt, our, their in zip(prompts, ours, dense, strict=True):
        if our.output_ids != their.output_ids:
            pairs = zip(our.output_ids, their.output_ids, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), "end")
            different.append(f"prompt of {len(prompt)} tokens, from output token {at}: {our.text!r} / {their.text!r}")
        elif our.text != their.text:
            different.append(f"prompt of {len(prompt)} tokens: same tokens, text {our.text!r} / {their.text!r}")
    assert not different, "\n".join(different)
