"""Linear layers of the CPU platform: right for any number of rows, the same bits in any batch of a few."""

from __future__ import annotations

import types

import pytest
import torch
import torch.nn.functional as F

from oasis_sglang.native.build import load_library

pytest.importorskip("sglang")
if load_library() is None:
    pytest.skip("there is no C++ compiler here", allow_module_level=True)

from oasis_sglang.platform import linear as vector


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    library = load_library()
    assert library is not None
    return vector.linear(library, x, weight, bias)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize(("outputs", "inner"), [(1, 32), (7, 64), (577, 576), (64, 1536)])
def test_equals_a_float64_product(rows: int, outputs: int, inner: int) -> None:
    x, weight, bias = values(rows, inner), values(outputs, inner, seed=1), values(outputs, seed=2)
    expected = x.double() @ weight.double().T
    # one rounding to bfloat16 (2^-8) of sums whose terms are of size one
    tolerance = {"rtol": 2**-8, "atol": 2**-10 * inner**0.5}
    torch.testing.assert_close(product(x, weight).double(), expected, **tolerance)
    torch.testing.assert_close(product(x, weight, bias).double(), expected + bias.double(), rtol=2**-7, atol=0.05)


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, weight = values(16, 576), values(200, 576, seed=1)
    whole = product(x, weight)
    for rows in range(1, 17):
        assert torch.equal(product(x[:rows], weight), whole[:rows])
    assert torch.equal(product(x[::2], weight), whole[::2])  # rows that are not adjacent in memory


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (values(17, 64), values(8, 64)),
        (values(0, 64), values(8, 64)),
        (values(2, 33), values(8, 33)),
        (values(2, 64).float(), values(8, 64).float()),
        (values(2, 3, 64), values(8, 64)),
        (values(2, 64), values(64, 8).T),
    ],
    ids=["many rows", "no rows", "odd width", "float32", "three dimensions", "transposed weight"],
)
def test_everything_else_is_f_linear(x: torch.Tensor, weight: torch.Tensor) -> None:
    assert torch.equal(product(x, weight), F.linear(x, weight))


@pytest.mark.parametrize("rows", [vector.MANY_ROWS - 1, vector.MANY_ROWS, vector.MANY_ROWS + 77])
def test_many_rows_are_within_one_rounding(rows: int) -> None:
    x, weight, bias = values(rows, 96), values(40, 96, seed=1), values(40, seed=2)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(product(x, weight, bias).double(), expected, rtol=2**-7, atol=2**-6)


def test_infinities_and_nan_pass_through() -> None:
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0], weight = torch.inf, torch.ones(3, 32, dtype=torch.bfloat16)
    weight[1, 0] = 0
    assert product(x, weight)[0, 0] == torch.inf
    assert product(x, weight)[0, 1].isnan()


def test_install_takes_plain_bfloat16_layers_only() -> None:
    """A layer with its own kernel, another dtype, or an LM head whose precision was changed keeps what it has."""
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod

    if vector.fast_library() is None:
        pytest.skip("this processor has no bfloat16 products")

    class Own(UnquantizedLinearMethod):
        pass

    def layer(dtype: torch.dtype, method: object) -> torch.nn.Module:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(torch.zeros(4, 32, dtype=dtype))
        module.quant_method = method
        return module

    def model(**processor: object) -> torch.nn.Module:
        built = torch.nn.Module()
        built.plain = layer(torch.bfloat16, UnquantizedLinearMethod())
        built.wide = layer(torch.float32, UnquantizedLinearMethod())
        built.own = layer(torch.bfloat16, Own())
        built.lm_head = layer(torch.bfloat16, UnquantizedEmbeddingMethod())
        built.logits_processor = types.SimpleNamespace(**processor)
        return built

    first = model()
    assert vector.install(first) == 2
    assert isinstance(first.plain.quant_method, vector.VectorLinearMethod)
    assert isinstance(first.lm_head.quant_method, vector.VectorEmbeddingMethod)
    assert type(first.wide.quant_method) is UnquantizedLinearMethod
    assert type(first.own.quant_method) is Own
    assert vector.install(model(use_fp32_lm_head=True)) == 1
