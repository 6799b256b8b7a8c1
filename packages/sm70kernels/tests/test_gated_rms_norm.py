import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sm70kernels.backends import calls
from sm70kernels.ops.gated_rms_norm import gated_rms_norm
from sm70kernels.testing import conforms, poison, rounds_as_stated, rows_independent, same_bits
from sm70kernels.yardstick import expect, judge


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


def large(o: Tensor, z: Tensor, weight: Tensor, eps: float, activation: str, h: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    gate = torch.sigmoid(z) if activation == "sigmoid" else z * torch.sigmoid(z)
    return h(o / (o.square().mean(-1, keepdim=True) + eps).sqrt()) * weight * gate


test_matches_naive = conforms(gated_rms_norm, naive, examples=12, large=large)
test_rows = rows_independent(gated_rms_norm)
test_rounding_points = rounds_as_stated(gated_rms_norm, naive, dict(M=20))


@pytest.mark.parametrize("run", calls(gated_rms_norm))
def test_rounds_the_normalised_value_before_the_weight(run: Callable[..., Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    o = torch.randn(20, 4, 64, generator=generator).half()
    weight = 1.0 + torch.rand(64, generator=generator)
    normed = o.double() * (o.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    out = run(o=o, z=torch.full_like(o, 100.0), weight=weight, eps=1e-6, activation="sigmoid")
    twice, once = (normed.half().double() * weight.double()).half(), (normed * weight.double()).half()
    # The kernel's reciprocal square root may move a value that lies on a border of float16.
    assert (out == twice).double().mean() > 0.998
    assert (out == once).double().mean() < 0.9


@pytest.mark.parametrize("run", calls(gated_rms_norm))
@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_infinite_gates_reach_their_limits_and_nan_stays_in_its_place(run: Callable[..., Tensor], activation: str) -> None:
    z = torch.tensor([torch.inf, -torch.inf, 6e4, -6e4, torch.nan, 0.0, -0.0, -200.0]).half().expand(5, 1, 8).contiguous()
    out = run(o=torch.ones(5, 1, 8).half(), z=z, weight=torch.ones(8), eps=1e-12, activation=activation)
    expected = [1.0, 0.0, 1.0, 0.0, None, 0.5, 0.5, 0.0] if activation == "sigmoid" else [math.inf, 0, 60000.0, 0, None, 0, 0, 0]
    for row in out[:, 0].tolist():
        assert [None if math.isnan(value) else value for value in row] == expected


@pytest.mark.parametrize("run", calls(gated_rms_norm))
def test_a_gate_inside_a_wider_projection_is_read_in_place(run: Callable[..., Tensor]) -> None:
    o, weight = torch.randn(7, 4, 64).half(), torch.randn(64)
    z = torch.randn(7, 4, 64).half()
    fused = poison(torch.empty(7, 16 + 4 * 64 + 8).half())
    inside = fused[:, 16 : 16 + 256].unflatten(1, (4, 64))
    inside.copy_(z)
    spread = poison(torch.empty(7, 4, 72).half())[:, :, 8:]
    spread.copy_(z)
    rest = dict(o=o, weight=weight, eps=1e-6, activation="silu")
    assert same_bits(run(z=inside, **rest), run(z=z, **rest))
    assert same_bits(run(z=spread, **rest), run(z=z, **rest))


@pytest.mark.parametrize("run", calls(gated_rms_norm))
def test_bad_heads_stay_alone_and_zero_heads_stay_zero(run: Callable[..., Tensor]) -> None:
    o, rest = torch.randn(3, 4, 64).half(), dict(z=torch.randn(3, 4, 64).half(), weight=torch.randn(64), eps=1e-6, activation="sigmoid")
    clean = run(o=o, **rest)
    bad = o.clone()
    bad[1, 2, 5], bad[2, 0, 63], bad[0, 1] = math.inf, math.nan, 0.0
    got = run(o=bad, **rest)
    assert got[1, 2].isnan().any()
    assert got[2, 0].isnan().all()
    assert not got[0, 1].any()
    for m, j in ((1, 2), (2, 0), (0, 1)):
        got[m, j] = clean[m, j]
    assert same_bits(got, clean)


@pytest.mark.parametrize("heads", [48, 12])
@pytest.mark.parametrize("config", gated_rms_norm.configs)
def test_the_kernel_at_the_model_s_heads(heads: int, config: int) -> None:
    arguments = gated_rms_norm.make(dict(M=5, HV=heads, V=128), seed=heads, dtype=torch.float16)
    arguments["z"] = arguments["z"].contiguous().clone()  # whole sectors
    out, (counters,) = gated_rms_norm.emulate(**arguments, config=config, order=5)
    judge(gated_rms_norm, expect(gated_rms_norm, large, arguments, torch.float16), {"out": out})
    assert counters.global_bytes_read == 2 * 5 * heads * 128 * 2 + 128 * 4
    assert counters.global_bytes_written == 5 * heads * 128 * 2
    activations = [site for site in counters.sites if site.line.startswith("vector.cuh")]
    assert activations
    assert all(site.sectors == site.minimum_sectors for site in activations)


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
