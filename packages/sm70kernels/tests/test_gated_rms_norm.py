import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels.ops.gated_rms_norm import gated_rms_norm
from sm70kernels.testing import conforms, rounds_as_stated, rows_independent


def naive(o: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str, h: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    out = torch.empty_like(o)
    for m in range(o.shape[0]):
        for j in range(o.shape[1]):
            mean = sum(float(x) ** 2 for x in o[m, j]) / o.shape[2]
            normed = h(o[m, j] / math.sqrt(mean + eps))
            for c in range(o.shape[2]):
                gate = 1 / (1 + math.exp(-float(z[m, j, c])))
                out[m, j, c] = normed[c] * weight[c] * (gate if activation == "sigmoid" else float(z[m, j, c]) * gate)
    return out


test_matches_naive = conforms(gated_rms_norm, naive, examples=12)
test_rows = rows_independent(gated_rms_norm)
test_rounding_points = rounds_as_stated(gated_rms_norm, naive, dict(M=20))


def test_rounds_the_normalised_value_before_the_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(20, 4, 40, generator=generator).half()
    weight = 1.0 + torch.rand(40, generator=generator)
    normed = o.double() * (o.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    out = gated_rms_norm(o, torch.full_like(o, 100.0), weight, 1e-6, "sigmoid")
    assert torch.equal(out, (normed.half().double() * weight.double()).half())
    assert not torch.equal(out, (normed * weight.double()).half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_infinite_gates_and_zero_heads(dtype: torch.dtype) -> None:
    o = torch.ones(2, 1, 4, dtype=dtype)
    o[1] = 0.0
    z = torch.tensor([torch.inf, -torch.inf, 6e4, -6e4], dtype=dtype).expand(2, 1, 4).contiguous()
    weight = torch.ones(4)
    assert gated_rms_norm(o, z, weight, 1e-12, "sigmoid")[0, 0].tolist() == [1.0, 0.0, 1.0, 0.0]
    silu = gated_rms_norm(o, z, weight, 1e-12, "silu")[0, 0]
    assert silu[0] == torch.inf
    assert silu[1] == 0.0
    assert silu[3] == 0.0
    assert silu[2] == torch.tensor(6e4, dtype=dtype)
    assert not gated_rms_norm(o, z, weight, 1e-6, "sigmoid")[1].any()
