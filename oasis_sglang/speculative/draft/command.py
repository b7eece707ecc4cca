"""`oasis train-draft`: from a target to a folder that SGLang loads as its draft."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import platform
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

DEFAULT_TOKENS = 300_000

README = """# EAGLE-3 draft for {target}

For SGLang {sglang}: `--speculative-algorithm EAGLE3 --speculative-draft-model-path <this folder>`. Embeddings are the
target's and not in the file.

Accept length {accept_length:.2f} (bonus token included) with three greedy draft tokens, on {held_out_prompts} held-out
prompts and {verify_steps} verify steps, counted without a server. At least one, two, three drafts accepted: {shares}.

Made by

```bash
{command}
```

- Corpus: {corpus}. {prompts} prompts, {tokens} tokens written by the target itself, a quarter of the continuations
  sampled at temperature 0.7 and the rest greedy. Nothing of the held-out prompts' subjects is in it.
- Draft vocabulary: {draft_vocab} tokens, {coverage:.1%} of what the target wrote.
- Time on this run's machine: {generation:.0f} minutes of writing, {training:.0f} minutes of training ({steps} steps).

`training.json` has everything else: settings, versions, hashes, accept length along the way.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-path", type=Path, required=True, metavar="DIR", help="the target, a Llama model")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the draft's folder")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one a line or JSONL (default: built in)")
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS, help="tokens the target writes (%(default)s)")
    parser.add_argument("--new-tokens", type=int, default=160, help="most tokens per continuation (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=640, help="most tokens per prompt (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="prompts continued at once (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="for writing (%(default)s)")
    parser.add_argument("--draft-vocab", type=int, default=4096, help="tokens the draft can write (%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the tokens (%(default)s)")
    parser.add_argument("--rows", type=int, default=12, help="continuations per optimizer step (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak (%(default)s)")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon", help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, sampling and training (%(default)s)")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="corpus and state (default: the user's cache)")
    parser.add_argument("--evaluate-every", type=int, default=100, metavar="STEPS", help="accept length (%(default)s)")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop after M minutes; the same command goes on")


def run(arguments: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from oasis_sglang.speculative.draft.target import TargetError

    console = Console(stderr=True, highlight=False)
    torch.set_flush_denormal(True)  # of softmax and optimizer: arithmetic on denormals is many times slower
    try:
        return _Run(arguments, console).run()
    except (TargetError, ValueError, OSError) as error:
        print(f"oasis train-draft: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        console.print("Interrupted. The same command goes on from the last saved state.")
        return 130


class _Run:
    """One invocation, step by step."""

    def __init__(self, arguments: argparse.Namespace, console: Any) -> None:
        import torch
        from transformers import AutoTokenizer, GenerationConfig
        from transformers.utils import logging

        from oasis_sglang.speculative.draft.data import Corpus, CorpusPlan
        from oasis_sglang.speculative.draft.prompts import builtin_prompts, file_prompts
        from oasis_sglang.speculative.draft.target import Target, fingerprint

        self.arguments, self.console = arguments, console
        self.deadline = time.monotonic() + 60 * (arguments.minutes or math.inf)
        model = arguments.model_path
        identity = fingerprint(model)
        logging.disable_progress_bar()  # one for loading a model says nothing
        self.target = Target.load(model, getattr(torch, arguments.dtype))
        tokenizer = AutoTokenizer.from_pretrained(model)
        if arguments.prompts:
            prompts = file_prompts(arguments.prompts, 1 << 30, arguments.seed)
            self.described = f"{len(prompts[0])} prompts of {arguments.prompts.name}"
        else:
            prompts = builtin_prompts(1 << 30, arguments.seed)
            self.described = (
                "everyday questions from templates; passages and docstrings of the Python "
                f"{platform.python_version()} documentation, to be explained, summarised, continued or used in code"
            )
        plan = CorpusPlan(
            seed=arguments.seed, new_tokens=arguments.new_tokens, prompt_tokens=arguments.prompt_tokens,
            batch=arguments.batch, sampled=0.25, temperature=0.7, dtype=arguments.dtype,
        )  # fmt: skip
        self.cache = arguments.cache or _default_cache(arguments.output)
        stop = self.target.config.eos_token_id
        if (model / "generation_config.json").exists():
            stop = GenerationConfig.from_pretrained(model).eos_token_id or stop
        stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
        self.corpus = Corpus(self.cache, lambda: self.target, tokenizer, identity, prompts, plan, stops)

    def run(self) -> int:
        from oasis_sglang.speculative.draft.checkpoint import read_draft, write_draft
        from oasis_sglang.speculative.draft.evaluate import accept_length
        from oasis_sglang.speculative.draft.training import Settings, Trainer

        arguments = self.arguments
        shards = self._generate()
        if shards is None:
            return self._paused()
        settings = Settings(
            seed=arguments.seed, draft_vocab=arguments.draft_vocab, epochs=arguments.epochs, rows=arguments.rows,
            learning_rate=arguments.learning_rate, optimizer=arguments.optimizer,
        )  # fmt: skip
        key = json.dumps([dataclasses.asdict(settings), shards])
        state = self.cache / f"training-{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt"
        # Trained in float32 whatever the corpus was made with.
        self.target.model.float()
        trainer = Trainer(self.target, self.corpus, shards, settings, state)
        if not self._train(trainer):
            return self._paused()

        write_draft(arguments.output, trainer.head, self.target, arguments.model_path, trainer.vocabulary)
        head, vocabulary = read_draft(arguments.output, self.target)
        accepted = accept_length(head, self.target, vocabulary, self.corpus.held_out())
        self._write_report(trainer, accepted, shards)
        shares = ", ".join(f"{share:.1%}" for share in accepted.by_step)
        self.console.print(f"Accept length {accepted.mean:.3f} on held-out prompts (drafts accepted: {shares})")
        print(arguments.output)
        return 0

    def _generate(self) -> list[int] | None:
        """Indices of the shards that hold `--tokens` tokens, all on the disk; None if the time was up before."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        shards, tokens = [], 0
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("Target writes (tokens)", total=self.arguments.tokens)
            self.corpus.held_out()
            for index in range(len(self.corpus.batches)):
                if tokens >= self.arguments.tokens:
                    break
                found = self.corpus.path(index).exists()
                tokens += self.corpus.shard(index).new_tokens
                shards.append(index)
                progress.update(task, completed=min(tokens, self.arguments.tokens))
                if not found and time.monotonic() > self.deadline:  # so each call adds something
                    return None
        if tokens < self.arguments.tokens:
            self.console.print(f"All prompts are used: {tokens} tokens instead of {self.arguments.tokens}")
        return shards

    def _train(self, trainer: Any) -> bool:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if trainer.step:
            self.console.print(f"Going on after step {trainer.step}")
        text = TextColumn("loss {task.fields[loss]:.3f} hits {task.fields[hits]} accept {task.fields[accept]}")
        columns = (TextColumn("Training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), text)
        with Progress(*columns, console=self.console) as progress:
            fields: dict[str, Any] = {"loss": math.nan, "hits": "", "accept": "-"}
            task = progress.add_task("", total=trainer.steps, completed=trainer.step, **fields)

            def report(now: Any) -> None:
                hits = " ".join(f"{share:.0%}" for share in now.accuracy)
                accept = f"{trainer.history[-1]['accept_length']:.2f}" if trainer.history else "-"
                progress.update(task, completed=now.step, loss=now.loss, hits=hits, accept=accept)
                if now.step % 100 == 0:
                    progress.console.print(f"step {now.step}: loss {now.loss:.3f}, hits {hits}, accept length {accept}")

            return bool(
                trainer.run(
                    report,
                    evaluate_every=self.arguments.evaluate_every,
                    stop_after=self.deadline - time.monotonic(),
                )
            )

    def _paused(self) -> int:
        self.console.print("Time is up. The same command goes on from here.")
        return 0

    def _write_report(self, trainer: Any, accepted: Any, shards: list[int]) -> None:
        from oasis_sglang.speculative.draft.data import write_atomically

        settings = dataclasses.asdict(trainer.settings)
        report: dict[str, Any] = {
            "command": _command(self.arguments),
            "target": self.arguments.model_path.resolve().name,
            "target_sha256": self.corpus.identity["target"],
            "corpus": self.described,
            "corpus_sha256": self.corpus.identity["prompts"],
            "corpus_plan": dataclasses.asdict(self.corpus.plan),
            "prompts": sum(len(self.corpus.batches[index]) for index in shards),
            "tokens": trainer.tokens,
            "draft_vocabulary_coverage": round(trainer.coverage, 4),
            "settings": settings,
            "steps": trainer.steps,
            "tokens_trained": trainer.seen_tokens,
            "generation_seconds": round(self.corpus.seconds(shards)),
            "training_seconds": round(trainer.seconds),
            "held_out_prompts": len(self.corpus.held_out_prompts),
            "accept_length": round(accepted.mean, 4),
            "accepted_by_draft_step": [round(share, 4) for share in accepted.by_step],
            "verify_steps": accepted.verify_steps,
            "history": trainer.history,
            "versions": {name: version(name) for name in ("oasis-sglang", "sglang", "torch", "transformers")}
            | {"python": platform.python_version()},
        }
        text = json.dumps(report, indent=1) + "\n"
        readme = README.format(
            **report,
            sglang=version("sglang"),
            shares=", ".join(f"{share:.0%}" for share in accepted.by_step),
            draft_vocab=len(trainer.vocabulary),
            coverage=trainer.coverage,
            generation=report["generation_seconds"] / 60,
            training=report["training_seconds"] / 60,
        )
        write_atomically(self.arguments.output / "README.md", lambda path: path.write_text(readme))
        # Last: whoever waits for the end of training looks for this one.
        write_atomically(self.arguments.output / "training.json", lambda path: path.write_text(text))


def _default_cache(output: Path) -> Path:
    from oasis_sglang.model import default_folder

    return default_folder().parent.parent / "drafts" / output.resolve().name


def _command(arguments: argparse.Namespace) -> str:
    """The command line with folders by their names: where they lie is of no use elsewhere."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["oasis", "train-draft"]
    for action in parser._actions:
        value = getattr(arguments, action.dest, None)
        if not action.option_strings or value in (None, action.default) or action.dest in ("cache", "minutes", "help"):
            continue
        words += [action.option_strings[-1], value.resolve().name if isinstance(value, Path) else str(value)]
    return shlex.join(words)
