"""`benchmarks.lookahead`: what it simulates is what the configuration says, worked out anew with lists and loops."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.lookahead_capture import Capture, Target
from benchmarks.lookahead_drafts import CopyingDraft, NgramDraft, RandomDraft
from benchmarks.lookahead_measure import ORACLE, Tables, measure
from benchmarks.lookahead_simulation import PageScorer, Residency, agreement, merge, page_mass, select, simulate
from oasis_sglang.attention import selector as selector_module
from oasis_sglang.attention.selector import TorchSelector
from oasis_sglang.config import OasisConfig
from oasis_sglang.memory_pool import extend as extend_module
from oasis_sglang.memory_pool import tier as tier_module
from oasis_sglang.memory_pool.working_set import NONE
from oasis_sglang.speculative.lookahead import select_pages
from tests.unit.harness import Harness

PAGE = 4


def distinct(*shape: int) -> torch.Tensor:
    """Random scores without ties, below 0.3: those of a softmax never exceed 1."""
    return torch.randperm(math.prod(shape)).view(shape).double() * 0.3 / math.prod(shape)


def best(scores: dict[int, float], count: int) -> list[int]:
    return sorted(scores, key=lambda p: -scores[p])[:count]


class Lane:
    """One KV head of one row under `skip`: which pages are resident, and the step each was last used in. Where several
    were last used in the same step, any may be evicted: the lane checks the choice and goes on with it."""

    def __init__(self, config: OasisConfig, scores: list[float], tail: int, width: int) -> None:
        self.config, self.width = config, width
        known = {p: scores[p] for p in range(tail)}
        self.chosen = best(known, config.budget_pages)
        # steps count from 1
        if tail + 1 <= width:
            self.used = {p: p - tail - 1 for p in range(tail + 1)} | dict.fromkeys(self.chosen, 0)
        else:
            self.used = {p: -1 - rank for rank, p in enumerate(best(known, width - 1))} | {tail: 0}

    def bring_in(self, pages: list[int], now: int, resident: set[int]) -> None:
        """`pages` come and as many others as there is no room for go; `resident` is what is there then."""
        leave = max(0, len(self.used) + len(pages) - self.width)
        gone = set(self.used) - resident
        assert set(self.used) - gone | set(pages) == resident
        assert len(gone) == leave
        last = sorted(self.used.values())
        assert sorted(self.used[p] for p in gone) == last[:leave], "not the least recently used"
        self.used = {p: used for p, used in self.used.items() if p not in gone} | dict.fromkeys(pages, now)

    def recall(self, position: int, now: int, resident: set[int]) -> list[int]:
        tail, offset = divmod(position, PAGE)
        if offset == 0:
            self.bring_in([tail], now, resident)
            self.chosen = [*self.chosen[:-1], tail - 1]
        if self.config.predictor == "none":
            self.used.update(dict.fromkeys(self.chosen, now))
        return list(self.chosen)

    def refresh(self, scores: list[float], position: int, now: int, resident: set[int]) -> int:
        """Returns the pages fetched."""
        tail = position // PAGE
        known = {p: scores[p] for p in range(tail)}
        wanted = best(known, self.config.budget_pages)
        self.used.update({p: now for p in [*wanted, tail] if p in self.used})
        misses = [p for p in wanted if p not in self.used]
        room = self.width - sum(used == now for used in self.used.values())
        admitted = misses[: min(self.config.fetch_cap_pages, room)]
        self.bring_in(admitted, now, resident)
        self.chosen = best({p: known[p] for p in self.used if p < tail}, self.config.budget_pages)
        self.used.update(dict.fromkeys(self.chosen, now))
        return len(admitted)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_residency_follows_a_plain_simulation(data: st.DataObject) -> None:
    budget = data.draw(st.integers(2, 5), "budget pages")
    config = OasisConfig(
        page_size=PAGE,
        token_budget=budget * PAGE,
        slack_ratio=data.draw(st.sampled_from([0.0, 0.5, 2.0]), "slack"),
        fetch_ratio=data.draw(st.sampled_from([0.01, 0.5, 1.0]), "fetch"),
        miss_policy="skip",
        predictor=data.draw(st.sampled_from(["previous", "previous", "none"]), "predictor"),
    )
    never = config.predictor == "none"
    torch.manual_seed(data.draw(st.integers(0, 999), "seed"))
    first = data.draw(st.integers((budget + 1) * PAGE + 1, 24 * PAGE), "first")
    steps, rows, heads = data.draw(st.integers(1, 20), "steps"), 2, 2
    columns = (first + steps) // PAGE + 1
    start, lookahead = distinct(rows, heads, columns), distinct(steps, rows, heads, columns)
    for step in range(1, steps):  # so that choices persist and pages come back
        lookahead[step] += lookahead[step - 1] / math.pi
    start[..., (first - 1) // PAGE :] = -torch.inf
    for step in range(steps):
        lookahead[step, ..., (first + step) // PAGE :] = -torch.inf
    mass = torch.rand(steps, rows, heads, columns).double()
    for step in range(steps):
        mass[step, ..., (first + step + 1) // PAGE + 1 :] = 0

    positions = range(first, first + steps + 1)
    wanted = select(lookahead, positions, config)
    residency = Residency(config, rows, heads, columns)
    residency.settle(start, (first - 1) // PAGE)

    def resident(row: int, head: int) -> set[int]:
        return set((residency.sets.slot_of[0, residency.rows[row], head] != NONE).nonzero().flatten().tolist())

    lanes = {
        (row, head): Lane(config, start[row, head].tolist(), (first - 1) // PAGE, int(residency.sets.width[0]))
        for row in range(rows)
        for head in range(heads)
    }
    held, fetched = [], 0
    for (row, head), lane in lanes.items():
        assert resident(row, head) == set(lane.used)
    for step in range(steps + 1):
        pages = residency.recall(first + step)
        for (row, head), lane in lanes.items():
            here = resident(row, head)
            assert sorted(pages[row, head].tolist()) == sorted(lane.recall(first + step, step + 1, here))
            assert set(pages[row, head].tolist()) <= here
        if step:
            tail = torch.full((rows, heads, 1), (first + step) // PAGE)
            held.append(mass[step - 1].gather(-1, torch.cat((pages, tail), dim=-1)).sum(-1))
        if step < steps and not never:
            residency.refresh(lookahead[step], wanted[step], first + step)
            for (row, head), lane in lanes.items():
                scores = lookahead[step, row, head].tolist()
                fetched += lane.refresh(scores, first + step, step + 1, resident(row, head))
        residency.sets.check_integrity()

    outcome = simulate(config, positions, start, *((None, None) if never else (lookahead, wanted)), mass)
    torch.testing.assert_close(outcome.mass, torch.stack(held))
    assert outcome.fetched * steps * rows * heads == pytest.approx(fetched)


def test_page_scores_are_quests_bound() -> None:
    torch.manual_seed(0)
    layers, heads, group, dim, tokens = 2, 3, 2, 8, 30
    keys, q = torch.randn(layers, heads, tokens, dim), torch.randn(layers, heads * group, dim)
    scores = PageScorer(keys, PAGE, 0.5).score(q, 6)
    assert scores.shape == (layers, heads, tokens // PAGE)
    assert bool((scores[..., 6:] == -torch.inf).all())
    for layer in range(layers):
        for head in range(heads):
            weight = torch.zeros(6)
            for j in range(group):
                ask = q[layer, head * group + j]
                bounds = []
                for p in range(6):
                    page = keys[layer, head, p * PAGE : (p + 1) * PAGE]
                    bounds.append(
                        0.5 * sum(max(x * k for k in page[:, d].tolist()) for d, x in enumerate(ask.tolist()))
                    )
                weight += torch.tensor(bounds).softmax(0) / group
            torch.testing.assert_close(scores[layer, head, :6], weight)


def test_page_mass_sums_the_softmax_of_every_query_head() -> None:
    torch.manual_seed(0)
    keys, q = torch.randn(1, 2, 10, 8), torch.randn(1, 4, 8)
    mass = page_mass(keys, q, PAGE, 0.3)
    assert mass.shape == (1, 2, 3)
    for head in range(2):
        weight = torch.stack([(keys[0, head] @ q[0, 2 * head + j] * 0.3).softmax(0) for j in range(2)]).mean(0)
        torch.testing.assert_close(mass[0, head], torch.stack([x.sum() for x in weight.split(PAGE)]))
    torch.testing.assert_close(mass.sum(-1), torch.ones(1, 2))


def test_agreement_is_the_share_of_common_pages() -> None:
    one, other = torch.tensor([[5.0, 4, 3, 2, 1]]), torch.tensor([[5.0, 1, 4, 3, 0]])
    assert agreement(one, other, 3).tolist() == [pytest.approx(2 / 3)]
    assert agreement(one, one, 2).tolist() == [1.0]


def random_capture(steps: int, chain: int, context: int = 45) -> Capture:
    torch.manual_seed(0)
    layers, heads, group, dim = 2, 2, 2, 8
    total = context + steps
    return Capture(
        context,
        list(range(total)),
        torch.randn(layers, heads, total, dim),
        torch.randn(steps + 1, layers, heads * group, dim),
        {"random": torch.randn(steps, chain, layers, heads * group, dim)},
        {"random": torch.full((steps, chain), -7)},
        dim**-0.5,
    )


def test_an_oracle_draft_of_one_token_agrees_fully() -> None:
    """Its query is the next step's; and fetching all it asks for holds what the next step's own choice would."""
    steps, budget = 9, 3
    measured = measure([random_capture(steps + 3, 3), random_capture(steps + 3, 3)], steps, [1, 3], PAGE)
    positions = range(45, 45 + steps + 1)
    by_label = {x.label: x for x in measured.lookaheads}
    scores = by_label["oracle (1)"].scores
    assert scores is not None
    assert agreement(scores, measured.true, budget).eq(1).all()
    assert agreement(by_label["previous"].scores, measured.true, budget).mean() < 1
    merged = by_label["oracle (3) + own"].scores
    assert merged is not None
    assert bool((merged >= scores).all())
    assert set(by_label) == {
        "none", "previous",
        *(f"{name} ({n}){own}" for name in ("random", "oracle") for n in (1, 3) for own in ("", " + own")),
    }  # fmt: skip
    config = OasisConfig(token_budget=budget * PAGE, page_size=PAGE, miss_policy="skip")
    outcome = simulate(config, positions, measured.start, scores, select(scores, positions, config), measured.mass)
    for step in range(steps):
        tail = (45 + step + 1) // PAGE
        if (45 + step + 1) % PAGE:  # on a new page the lookahead could not know the page just completed
            pages = measured.own[step].topk(budget, dim=-1).indices
            own = measured.mass[step].gather(-1, pages).sum(-1) + measured.mass[step, ..., tail]
            torch.testing.assert_close(outcome.mass[step], own)


def test_a_chain_goes_on_behind_what_it_accepted() -> None:
    """Positions, committed tokens, lookaheads and mean attention of a walk whose guesses are right 0 to 2 times."""
    steps, chain, context = 9, 2, 45
    capture = random_capture(steps + chain, chain, context)
    # step i decodes token 45 + i; a right first guess is 46 + i
    right = [2, 0, 0, 1, 0, 1, 2, 0, 0, 0, 0]
    guesses = [[46 + i if n > 0 else -1, 47 + i if n > 1 else -1] for i, n in enumerate(right)]
    capture.guesses["random"] = torch.tensor(guesses)
    tables = Tables(capture, PAGE)
    previous, mass = tables.of_steps(steps, 0), tables.mass()
    whole = merge([previous, *(tables.of_draft(steps, "random", j) for j in range(chain))])
    walk = tables.chain("random", chain, whole, previous, mass)
    # 0 accepts 2, so 3 is next; it accepts 1; 5 accepts 1; 7 and 8 accept none
    at = [0, 3, 5, 7, 8]
    assert walk.positions == [context + i for i in at]
    assert walk.tokens == [3, 2, 2, 1, 1]
    assert torch.equal(walk.whole, whole[at])
    for j, (step, newest) in enumerate([(0, 2), (3, 4), (5, 6), (7, 7)]):
        expected = tables.score(capture.queries[newest + 1], (context + step) // PAGE)
        assert torch.equal(walk.last[j], expected)
    for j, tokens in enumerate([(3, 4), (5, 6), (7,), (8,)]):
        of = [
            page_mass(capture.keys[:, :, : context + t + 1], capture.queries[t + 1], PAGE, capture.scale)
            for t in tokens
        ]
        mean = sum(torch.nn.functional.pad(x, (0, tables.columns - x.shape[-1])) for x in of) / len(of)
        torch.testing.assert_close(walk.mass[j], mean)
    simulated = simulate(
        OasisConfig(token_budget=3 * PAGE, page_size=PAGE, miss_policy="skip"),
        walk.positions, walk.start, walk.last,
        select(walk.last, walk.positions, OasisConfig(token_budget=3 * PAGE, page_size=PAGE)), walk.mass,
    )  # fmt: skip
    assert simulated.mass.shape == (4, 2, 2)
    assert bool((simulated.mass <= 1 + 1e-5).all())
    everything = tables.chain(ORACLE, chain, whole, previous, mass)
    assert everything.positions == [context, context + 3, context + 6]


def test_prompt_lookup_copies_what_followed() -> None:
    draft, nothing = NgramDraft(), torch.empty(0)
    assert draft.propose([1, 2, 3, 9, 8, 7, 1, 2, 3], nothing, 3) == [9, 8, 7]
    assert draft.propose([5, 1, 2, 6, 2, 3, 1, 2], nothing, 2) == [6, 2], "the longer match before the nearer one"
    assert draft.propose([4, 5, 5], nothing, 3) == [5, 5, 5], "a match at the very end repeats the last token"
    assert draft.propose([1, 2, 3], nothing, 2) == [3, 3]


def test_the_servers_draft_copies_before_it_guesses() -> None:
    class Head:
        name, feature_layers = "eagle", (1, 2)

        def propose(self, tokens: list[int], features: torch.Tensor, count: int) -> list[int]:
            return [70, 71, 72][:count]

    draft, nothing = CopyingDraft(Head()), torch.empty(0)  # type: ignore[arg-type]
    assert (draft.name, draft.feature_layers) == ("draft", (1, 2))
    assert draft.propose([1, 2, 3, 4, 9, 8, 7, 1, 2, 3, 4], nothing, 3) == [9, 8, 7]
    assert draft.propose([1, 2, 3, 9, 8, 7, 1, 2, 3], nothing, 3) == [70, 71, 72], "three tokens are too few"


def test_guesses_count_until_the_first_wrong_one() -> None:
    capture = random_capture(4, 2, context=3)  # decodes 3, 4, 5, 6
    capture.guesses["random"] = torch.tensor([[4, 5], [5, 0], [0, 7], [7, 8]])
    assert capture.right("random").tolist() == [[True, True], [True, False], [False, False], [False, False]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.5, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


class Fixed:
    """Guesses from a list, whatever came."""

    feature_layers = (1, 4)

    def __init__(self, name: str, tokens: list[int], start: int) -> None:
        self.name, self._tokens, self._start = name, tokens, start
        self.features: torch.Tensor | None = None

    def propose(self, tokens: list[int], features: torch.Tensor, count: int) -> list[int]:
        assert features.shape[0] == len(tokens) - 1
        self.features = features.clone()
        at = len(tokens) - self._start
        return (self._tokens[at : at + count] + [0] * count)[:count]


def test_capture_equals_plain_forward_passes(tiny: str) -> None:
    """Greedy tokens, queries of true and drafted tokens, keys and features, against one uncached pass per question."""
    from transformers import AutoModelForCausalLM

    prompt, steps, chain = list(range(3, 40)), 6, 3
    target = Target(tiny)
    first = target.decode(prompt, steps, [], chain)
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def look(tokens: list[int]) -> SimpleNamespace:
        """Queries and keys before rotation are compared through what they become: attention weights."""
        out = plain(torch.tensor([tokens]), output_attentions=True, output_hidden_states=True)
        return SimpleNamespace(
            token=int(out.logits[0, -1].argmax()), attention=torch.stack([a[0, :, -1] for a in out.attentions]),
            hidden=out.hidden_states,
        )  # fmt: skip

    def weights(q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """`[L, Hq, tokens]` of `q` `[L, Hq, D]` over `keys` `[L, H, tokens, D]`."""
        group = q.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1)
        return (torch.einsum("lhd,lhnd->lhn", q, keys) * first.scale).softmax(-1)

    tokens = list(prompt)
    for step in range(steps + 1):
        seen = look(tokens)
        # rows of a batch and single ones are summed in another order
        found = weights(first.queries[step], first.keys[:, :, : len(tokens)])
        torch.testing.assert_close(found, seen.attention, rtol=1e-3, atol=1e-4)
        if step < steps:
            assert first.tokens[len(tokens)] == seen.token
            tokens.append(seen.token)
    true = first.tokens
    wrong = [(t + 1) % 97 for t in true]
    sources = [Fixed("right", true, 0), Fixed("wrong", wrong, 0), RandomDraft(97)]
    again = target.decode(prompt, steps, sources, chain)
    assert again.tokens == true, "drafts must not change what is decoded"
    torch.testing.assert_close(again.queries, first.queries, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again.keys, first.keys, rtol=1e-3, atol=1e-3)
    # a right guess has the query of the token it guesses
    for step in range(steps - chain):
        for j in range(chain):
            torch.testing.assert_close(
                again.drafted["right"][step, j], first.queries[step + 2 + j], rtol=1e-3, atol=1e-3
            )
    # a wrong one that of a sequence with that guess in it
    for step in (0, 2):
        length = len(prompt) + step + 1
        drafted = true[:length] + wrong[length : length + 1]
        longer = look(drafted)
        assert again.guesses["wrong"][step, 0] == drafted[-1]
        own = longer.attention[..., -1]  # its weight on itself; the rest are known keys
        rest = weights(again.drafted["wrong"][step, 0], again.keys[:, :, :length])
        torch.testing.assert_close(rest * (1 - own).unsqueeze(-1), longer.attention[..., :-1], rtol=1e-3, atol=1e-3)
    assert again.right("right")[: steps - chain].all()
    assert not again.right("wrong").any()
    features = sources[0].features
    assert isinstance(features, torch.Tensor)
    hidden = look(true[:-1]).hidden
    torch.testing.assert_close(features[-1], torch.cat([hidden[2][0, -1], hidden[5][0, -1]]), rtol=1e-3, atol=1e-2)


def test_a_text_can_be_followed(tiny: str) -> None:
    capture = Target(tiny).decode([1, 2, 3], 4, [], 1, follow=[9, 8, 7, 6])
    assert capture.tokens == [1, 2, 3, 9, 8, 7, 6]


@pytest.mark.parametrize("predictor", ["previous", "none"])
@pytest.mark.parametrize(("slack", "fetch"), [(0.0, 0.25), (0.5, 0.25), (0.5, 1.0)])
def test_residency_is_that_of_the_tier(
    slack: float, fetch: float, predictor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages that a real tier chooses step by step, for the same scores."""
    config = OasisConfig(
        token_budget=64, page_size=16, slack_ratio=slack, fetch_ratio=fetch, miss_policy="skip", predictor=predictor
    )
    scored: list[torch.Tensor] = []  # one per layer and choice

    def record(scores: torch.Tensor, candidates: torch.Tensor, config: OasisConfig) -> torch.Tensor:
        scored.append(scores[0])
        return select_pages(scores, candidates, config)

    monkeypatch.setattr(extend_module, "select_pages", record)
    monkeypatch.setattr(tier_module, "select_pages", record)
    monkeypatch.setattr(selector_module, "select_pages", record)
    prompt, steps = 200, 40
    harness = Harness(config, seed=3)
    tier, layers = harness.tier, harness.geometry.layers
    # the compiled one lists pages in another order, and ties among the least recently used fall differently
    tier.selector = TorchSelector(config, tier.ops, tier.summaries, tier.sets)
    sequence = harness.admit(prompt + steps)
    assert sequence is not None
    harness.extend(sequence, prompt)
    chosen = [tier.chosen[:, sequence.attempt.row].long()]
    for _ in range(steps):
        harness.decode([sequence])
        chosen.append(tier.chosen[:, sequence.attempt.row].long())
    columns = len(sequence.pages)
    scores = [
        torch.stack([torch.nn.functional.pad(x, (0, columns - x.shape[-1]), value=-torch.inf) for x in part])
        for part in zip(*[iter(scored)] * layers, strict=True)
    ]

    residency = Residency(config, layers, harness.geometry.kv_heads, columns)
    residency.settle(scores[0], (prompt - 1) // 16)
    assert torch.equal(residency.chosen, chosen[0])
    for step in range(1, steps + 1):
        position = prompt + step - 1
        residency.recall(position)
        if predictor == "previous":
            wanted = select(scores[step].unsqueeze(0), [position], config)[0]
            residency.refresh(scores[step], wanted, position)
        assert torch.equal(residency.chosen, chosen[step])
    assert residency.fetched == tier.stats.missed - tier.stats.dropped
