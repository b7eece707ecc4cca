"""Which ops attend: decided by what the device is, what FlashInfer serves, whether it answers alike, and by time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oasis_sglang.attention.ops import AttentionOps
from oasis_sglang.attention.torch_ops import TorchOps
from oasis_sglang.kernels.attention_shape import AttentionShape
from oasis_sglang.kernels.choose import Choice, Trial, choose_ops
from oasis_sglang.kernels.flashinfer import FlashInferOps, unsupported
from tests.unit import oracle

CPU = torch.device("cpu")
BF16 = torch.bfloat16
SHAPE = AttentionShape(
    query_heads=4, kv_heads=2, head_dim=64, page_size=16, columns=5, tokens=70, batch=3, queries=2, dtype=BF16,
    kv_dtype=BF16,
)  # fmt: skip


class Rival(TorchOps):
    """Stands for FlashInfer's ops; `spoil` changes its answers."""

    def __init__(self, spoil: Callable[[torch.Tensor], torch.Tensor] = lambda out: out) -> None:
        super().__init__()
        self._spoil = spoil

    def attend(self, *args: Any) -> torch.Tensor:
        return self._spoil(super().attend(*args))


def choose(rival: AttentionOps, times: list[float], shape: AttentionShape = SHAPE, **more: Any) -> tuple[Choice, Any]:
    """The choice, and the ops that stand for Triton's; `times` of FlashInfer first."""
    triton, left = TorchOps(), list(times)

    def seconds(run: Callable[[], object]) -> float:
        run()
        return left.pop(0)

    given = {"hip": False, "why_not": lambda: None, "build": lambda *_: rival, "seconds": seconds, **more}
    choice = choose_ops(triton, shape, CPU, **given)
    assert not left or not choice.reason.endswith("with Triton")
    return choice, triton


def refuse(*_: Any) -> Any:
    raise AssertionError("this is not to be tried")


def test_the_faster_one_is_chosen() -> None:
    rival = Rival()
    faster, _ = choose(rival, [80e-6, 160e-6])
    assert faster.ops is rival
    assert faster.reason == "FlashInfer: a layer takes 10.0 µs with FlashInfer, 20.0 µs with Triton"
    assert faster.seconds == (10e-6, 20e-6)
    slower, triton = choose(rival, [160e-6, 80e-6])
    assert slower.ops is triton
    assert slower.reason.startswith("Triton: a layer takes 20.0 µs with FlashInfer")
    equal, triton = choose(rival, [80e-6, 80e-6])
    assert equal.ops is triton


def test_amd_devices_have_triton() -> None:
    choice, triton = choose(Rival(), [], hip=True, why_not=refuse, build=refuse, seconds=refuse)
    assert choice.ops is triton
    assert "AMD" in choice.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 96}, "head_dim=96, it has 64, 128, 256"),
        ({"query_heads": 34}, "17 query heads per KV head, it takes up to 16"),
        ({"queries": 9}, "9 query tokens, it is used for up to 8"),
        ({"dtype": torch.float32, "kv_dtype": torch.float32}, "queries of torch.float32"),
        ({"kv_dtype": torch.float16}, "K and V of torch.float16, it takes torch.bfloat16 and float8_e4m3fn"),
    ],
)
def test_shapes_that_flashinfer_does_not_serve(change: dict[str, Any], reason: str) -> None:
    shape = SHAPE._replace(**change)
    choice, triton = choose(Rival(), [], shape, why_not=refuse, build=refuse, seconds=refuse)
    assert choice.ops is triton
    assert reason in choice.reason
    with pytest.raises(ValueError, match="TritonOps does"):
        FlashInferOps(shape, CPU)


@pytest.mark.parametrize("group", range(1, 17))
@pytest.mark.parametrize("kv", [BF16, torch.float8_e4m3fn])
def test_shapes_that_it_serves(group: int, kv: torch.dtype) -> None:
    for dim in (64, 128, 256):
        assert unsupported(SHAPE._replace(query_heads=2 * group, head_dim=dim, kv_dtype=kv)) is None


def test_flashinfer_is_not_installed() -> None:
    choice, triton = choose(Rival(), [], why_not=lambda: "FlashInfer cannot be imported (x)", build=refuse)
    assert choice.ops is triton
    assert choice.reason == "Triton: FlashInfer cannot be imported (x)"


def test_flashinfer_fails(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no nvcc")

    for where in ({"build": broken, "seconds": refuse}, {"seconds": broken}):
        choice, triton = choose(Rival(), [], **where)
        assert choice.ops is triton
        assert choice.reason == "Triton: FlashInfer failed (RuntimeError: no nvcc)"
        assert "FlashInfer failed at" in caplog.text
        caplog.clear()


def test_one_line_says_which_and_why(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever compares two servers finds in the log what attends in each."""
    caplog.set_level("INFO")
    for given, line in (
        ({"hip": True}, "attention by Triton: the device is AMD's"),
        ({"times": [80e-6, 160e-6]}, "attention by FlashInfer: a layer takes 10.0 µs with FlashInfer, 20.0 µs with"),
    ):
        choose(Rival(), **{"times": [], **given})
        assert sum(line in x for x in caplog.messages) == 1


@pytest.mark.parametrize(
    "spoil",
    [lambda out: out * 1.1, lambda out: out.masked_fill(out == out.amax(), torch.nan), lambda out: out + (out == 0)],
    ids=["scale", "nan", "empty"],
)
def test_other_answers_are_not_chosen(
    spoil: Callable[[torch.Tensor], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    choice, triton = choose(Rival(spoil), [], seconds=refuse)
    assert choice.ops is triton
    assert choice.reason == "Triton: FlashInfer answers otherwise"
    assert "differs from Triton's" in caplog.text


@pytest.mark.parametrize("kv", [BF16, torch.float8_e4m3fn])
def test_the_trial_is_a_step_with_an_answer(kv: torch.dtype) -> None:
    """Lengths in a page, a chain, an empty sequence, pages of every layer that are its own; float64 agrees."""
    trial = Trial.draw(SHAPE._replace(kv_dtype=kv), CPU)
    tokens = trial.layout.tokens.tolist()
    assert tokens[-1] == 0
    assert all(54 <= x <= 70 for x in tokens[:-1])
    assert len({k.data_ptr() for k, _ in trial.pools}) == len(trial.pools)
    assert bool(trial.q[-1].isnan().all())
    trial = trial._replace(pools=[(k.to(BF16), v.to(BF16)) for k, v in trial.pools])
    out, (k, v) = trial.run(TorchOps()), trial.pools[-1]
    for j in range(2):
        seen = tokens[0] - 1 + j
        keys, values = (
            torch.stack([x[trial.table[0, head]].reshape(-1, 64)[:seen] for head in range(2)]).double() for x in (k, v)
        )
        want = oracle.attention(trial.q[0, j].double(), keys, values, trial.scale)
        torch.testing.assert_close(out[0, j].double(), want, rtol=2e-2, atol=2e-2)
    assert not bool(out[-1].any())
