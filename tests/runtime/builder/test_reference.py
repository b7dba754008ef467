"""Products that are computed in float32 in torch's place, against float64."""

import pytest
import torch
from torch import nn

from runtime.builder import reference
from runtime.builder.reference import WideProducts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
def test_linear_layers_and_products_are_rounded_once(dtype, has_bias, monkeypatch):
    monkeypatch.setattr(reference, "_WIDENED_AT_ONCE", 4 * 96)  # four outputs at a time, the last piece is shorter
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(96, 50, bias=has_bias).to(dtype)
    x = torch.randn(2, 7, 96, generator=generator).to(dtype)
    with torch.inference_mode(), WideProducts():
        outputs, scores = layer(x), torch.matmul(x, x.mT)
    with torch.inference_mode():
        bias = layer.bias.double() if has_bias else None
        exact = nn.functional.linear(x.double(), layer.weight.double(), bias)
        exact_scores = torch.matmul(x.double(), x.double().mT)
    assert outputs.dtype == scores.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(outputs.double(), exact, rtol=1.01 * rounding, atol=1e-5)
    torch.testing.assert_close(scores.double(), exact_scores, rtol=1.01 * rounding, atol=1e-5)


def test_other_products_are_left_to_torch():
    x, weight, no_rows = torch.ones(3, 8), torch.ones(5, 8), torch.empty(0, 8, dtype=torch.bfloat16)
    with WideProducts():
        assert torch.equal(nn.functional.linear(x, weight), x @ weight.mT)
        assert nn.functional.linear(no_rows, weight.bfloat16()).shape == (0, 5)
        assert torch.equal(torch.matmul(x[0], weight.mT), nn.functional.linear(x[0], weight))
        assert nn.functional.linear(x[0].bfloat16(), weight.bfloat16()).shape == (5,)
