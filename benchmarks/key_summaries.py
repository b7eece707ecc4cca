"""What page scores cost: perplexity when every token attends to the pages that a scoring rule chooses, offline.

One forward pass of transformers' weights in float32: the context densely, then all tokens of the text at once, each
attending to its own top-K pages and its local tail, as decoding one by one would (`benchmarks.perplexity` is the same
through a server, for the rule that the server has). So a rule is judged by what the model makes of its choice, in two
minutes each and without writing a kernel for it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track

from benchmarks import common
from oasis_sglang.memory_pool.sketch import LARGEST, every_dim, slow_half
from oasis_sglang.serving import Documents, Report

PAGE = 16
CHUNK = 400  # queries whose scores are held at once
SEGMENT = 1000

# (queries [Hq, n, D], keys [Hq, pages, PAGE, D], q.k of each token [Hq, n, pages, PAGE]) -> [Hq, n, pages]
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def minmax(q: torch.Tensor, keys: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Quest's bound (arXiv 2406.10774)."""
    high, low = keys.amax(2), keys.amin(2)
    return q.clamp_min(0) @ high.transpose(1, 2) + q.clamp_max(0) @ low.transpose(1, 2)


def exact(q: torch.Tensor, keys: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """The attention mass of the page itself."""
    return (products * q.shape[-1] ** -0.5).logsumexp(-1) * q.shape[-1] ** 0.5


def best_token(q: torch.Tensor, keys: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    return products.amax(-1)


def sketch_of(dims: Callable[[int], tuple[int, ...]]) -> Rule:
    """Keys in 4 bits, of some dimensions; a page counts for its best token."""

    def rule(q: torch.Tensor, keys: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
        kept = list(dims(q.shape[-1]))
        part = keys[..., kept]
        step = part.abs().amax(-1, keepdim=True) / LARGEST
        codes = (part / step).round() * step
        scores = q[..., kept] @ codes.flatten(1, 2).transpose(1, 2)
        return scores.unflatten(-1, keys.shape[1:3]).amax(-1)

    return rule


def fast_half(head_dim: int) -> tuple[int, ...]:
    """What `slow_half` leaves out, as a control."""
    return tuple(sorted(set(every_dim(head_dim)) - set(slow_half(head_dim))))


RULES: dict[str, tuple[str, Rule]] = {
    "exact": ("exact attention mass", exact),
    "best": ("exact, best token", best_token),
    "minmax": ("minmax", minmax),
    "sketch": ("sketch, slow half", sketch_of(slow_half)),
    "sketch_all": ("sketch, every dimension", sketch_of(every_dim)),
    "sketch_fast": ("sketch, fast half", sketch_of(fast_half)),
}


def arguments_parser() -> argparse.ArgumentParser:
    parser = common.parser(__doc__)
    parser.add_argument("--context", type=int, default=4000, help="tokens before the text (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=4000, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="document to take (default: %(default)s)")
    parser.add_argument("--budgets", default="2048", help="token budgets (default: %(default)s)")
    parser.add_argument("--rules", default="exact,minmax,sketch", help=f"of {', '.join(RULES)} (default: %(default)s)")
    return parser


class Replay:
    """A Llama's attention layers, replayed with a choice of pages."""

    def __init__(self, model_path: str, text: list[int], context: int) -> None:
        from transformers import AutoModelForCausalLM

        # One token early, so that every token of the text is predicted by a token that attends sparsely.
        self.context = context - 1
        self.ids = torch.tensor(text)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).model.eval()
        config = self.model.config
        self.heads, self.dim = config.num_attention_heads, config.head_dim
        self.group = self.heads // config.num_key_value_heads
        angles = torch.outer(torch.arange(len(text)).float(), self.model.rotary_emb.inv_freq)
        self.cos, self.sin = (torch.cat((x, x), -1) for x in (angles.cos(), angles.sin()))
        # K and V of the context per layer, each [kv_heads, context, D]
        self.past: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._layers(self.ids[: self.context], 0, None, 0)

    def _rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        at = slice(start, start + x.shape[1])
        swapped = torch.cat((-x[..., self.dim // 2 :], x[..., : self.dim // 2]), -1)
        return x * self.cos[at] + swapped * self.sin[at]

    def _layers(self, ids: torch.Tensor, start: int, rule: Rule | None, budget: int) -> torch.Tensor:
        x = self.model.embed_tokens(ids)
        for index, layer in enumerate(self.model.layers):
            normed, attention = layer.input_layernorm(x), layer.self_attn
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            q, k, v = (p(normed).unflatten(-1, (-1, self.dim)).transpose(0, 1) for p in projections)
            q, k = self._rotate(q, start), self._rotate(k, start)
            if start:
                k, v = (torch.cat(pair, 1) for pair in zip(self.past[index], (k, v), strict=True))
            else:
                self.past.append((k, v))
            keys, values = (y.repeat_interleave(self.group, 0) for y in (k, v))
            out = [
                self._attend(part, keys, values, start + at * CHUNK, rule, budget)
                for at, part in enumerate(q.split(CHUNK, 1))
            ]
            x = x + attention.o_proj(torch.cat(out, 1).transpose(0, 1).flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.norm(x)

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, rule: Rule | None, budget: int
    ) -> torch.Tensor:
        """`q` `[Hq, n, D]` of tokens from position `first` on; keys and values `[Hq, tokens, D]`."""
        n, tokens = q.shape[1], keys.shape[1]
        position = torch.arange(first, first + n).view(-1, 1)
        products = q @ keys.transpose(1, 2)
        hidden = torch.arange(tokens) > position
        logits = (products * self.dim**-0.5).masked_fill(hidden, -torch.inf)
        if rule is not None:
            pages = tokens // PAGE
            whole = keys[:, : pages * PAGE].unflatten(1, (pages, PAGE))
            scores = rule(q, whole, products[..., : pages * PAGE].unflatten(-1, (pages, PAGE))) * self.dim**-0.5
            candidates = torch.arange(pages) < position // PAGE
            weight = scores.masked_fill(~candidates, -torch.inf).softmax(-1).unflatten(0, (-1, self.group)).mean(1)
            chosen = weight.masked_fill(~candidates, -1).topk(budget // PAGE, dim=-1).indices
            kept = torch.zeros_like(weight, dtype=torch.bool).scatter_(-1, chosen, True)
            every = torch.zeros(*kept.shape[:2], tokens, dtype=torch.bool)
            every[..., : pages * PAGE] = kept.repeat_interleave(PAGE, -1)
            every |= torch.arange(tokens) >= position // PAGE * PAGE
            logits = logits.masked_fill(~every.repeat_interleave(self.group, 0), -torch.inf)
        return logits.softmax(-1) @ values

    def logprobs(self, rule: Rule | None, budget: int = 0) -> torch.Tensor:
        """Of each token of the text."""
        x = self._layers(self.ids[self.context :], self.context, rule, budget)[:-1]
        following = self.ids[self.context + 1 :]
        parts = []
        for states, tokens in zip(x.split(CHUNK), following.split(CHUNK), strict=True):
            logits = states @ self.model.embed_tokens.weight.T  # tied, as in the demo model
            parts.append(logits.log_softmax(-1).gather(-1, tokens.view(-1, 1)).squeeze(1))
        return torch.cat(parts)


def perplexity(logprobs: torch.Tensor) -> float:
    return math.exp(-float(logprobs.mean()))


@torch.inference_mode()
def run(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    model = common.model_path(arguments)
    text = Documents(model).text(arguments.start, arguments.context + arguments.tokens)
    replay = Replay(model, text, arguments.context)
    dense = replay.logprobs(None)
    asked = [(int(budget), name) for budget in arguments.budgets.split(",") for name in arguments.rules.split(",")]
    rows: list[dict[str, Any]] = [{"rule": "dense", "perplexity": perplexity(dense)}]
    for budget, name in track(asked, "rules", console=report.console):
        own = replay.logprobs(RULES[name][1], budget)
        segments = zip(own.split(SEGMENT), dense.split(SEGMENT), strict=True)
        rows.append(
            {
                "rule": name,
                "budget": budget,
                "perplexity": perplexity(own),
                "relative_to_dense": perplexity(own) / perplexity(dense) - 1,
                "segments": [perplexity(a) / perplexity(b) - 1 for a, b in segments],
            }
        )
    return {"rows": rows}


def show(results: dict[str, Any], arguments: argparse.Namespace, report: Report) -> None:
    rows = []
    for row in results["rows"]:
        if "budget" not in row:
            rows.append(("", "dense", f"{row['perplexity']:.4f}", "", ""))
            continue
        per = " ".join(f"{value:+.2%}" for value in row["segments"])
        label = RULES[row["rule"]][0]
        rows.append((f"{row['budget']:,}", label, f"{row['perplexity']:.4f}", f"{row['relative_to_dense']:+.2%}", per))
    report.table(
        f"Perplexity of {arguments.tokens:,} tokens after {arguments.context:,}, by how pages are scored",
        ("budget", "rule", "perplexity", "against dense", f"per {SEGMENT:,} tokens"),
        rows,
    )


def main() -> int:
    arguments = arguments_parser().parse_args()
    report = Report("key_summaries")
    results = run(arguments, report)
    show(results, arguments, report)
    report.results = results
    common.write(report, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
