"""moe_qpn: the routed experts and the shared expert of decode and verify rows, in 16-row tiles per expert.

    y_r = W2_e · (silu(gate_e x) ⊙ (up_e x)),  e = ids[m, r]
    out = Σ_r weight_r · y_r + sigmoid(w_g · x) · shared(x)

The routes of a row are added in slot order; an id outside 0..X-1 contributes nothing; a duplicate id is a route of its own.
Rounding points are those of :mod:`sm70kernels.experts`, the same in both expert ops.

The experts come as dense matrices w13 and w2, which have a reference only, or as packed banks of 4-bit or 8-bit weights, made by `pack13`
and sm70kernels.banks.pack: packed13 holds for every expert a bank of [2I, E] whose rows are gate and up of a unit side by side, packed2
one of [E, I]. `format`, `width` (I) and `phase` (where in its first block of 128 the slice of W2's k begins; fp8 only) belong to those. The
kernel's shared expert is float16 and as wide as the others.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from sm70kernels import inputs, rows
from sm70kernels.banks import CLASSES, FORMATS, Weights, bank_bytes, dequantise, pack
from sm70kernels.banks_inputs import fitting_format, random_weights
from sm70kernels.banks_weights import take_rows
from sm70kernels.cuda import Kernel
from sm70kernels.experts import moe, swiglu
from sm70kernels.op import INV, ContractError, Derived, Dim, Op, Ratio, Spec
from sm70kernels.rows import Floats
from sm70kernels.streams import fold, rounded


def pack13(weights: Weights) -> Tensor:
    """Pack W13 [2I, E] of one expert, gate rows and then up rows, so that gate and up of a unit are columns side by side: u8 [bytes]."""
    both = len(weights.codes)
    return pack(take_rows(weights, torch.arange(both).view(2, both // 2).T.flatten()))


def reference(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor | None,
    w2: Tensor | None,
    shared13: Tensor | None,
    shared2: Tensor | None,
    shared_gate: Tensor | None,
    format: str | None,
    width: int | None,
    phase: int | None,
    packed13: Tensor | None,
    packed2: Tensor | None,
) -> Tensor:
    """Return out act [M, E].

    x act [M, E]; ids i32 [M, K]; weights f32 [M, K]; w13 [X, 2I, E] (gate rows, then up rows) and w2 [E, X, I], or packed13 and packed2
    u8 [X, bytes] with format, width and phase; of the shared expert shared13 act [2J, E], shared2 act [E, J] and shared_gate act [1, E],
    all None without one.
    """
    shared = None if shared13 is None or shared2 is None or shared_gate is None else (shared13, shared2, shared_gate)
    if w13 is not None and w2 is not None and packed13 is None:
        return moe(x, ids, weights, w13, w2, shared, rows.TILE["decode"])
    hidden = x.shape[1]
    bank13, bank2, form, inner, first = _packed(hidden, packed13, packed2, format, width, phase, w13)

    def expert(e: int) -> tuple[Floats, Floats]:
        side_by_side = dequantise(bank13[e], form, 2 * inner, hidden)
        return torch.cat([side_by_side[0::2], side_by_side[1::2]]).numpy(), dequantise(bank2[e], form, hidden, inner, first).numpy()

    routed = _routed(rows.floats(x), ids, weights, len(bank13), expert, x.dtype)
    if shared is not None:
        both, down, gate = map(rows.floats, shared)
        routed += _shared(rows.floats(x), both, down, gate, x.dtype)
    return rows.tensor(routed, x.dtype)


@np.errstate(all="ignore")  # infinities and NaN are data
def _routed(
    x: Floats, ids: Tensor, weights: Tensor, count: int, expert: Callable[[int], tuple[Floats, Floats]], act: torch.dtype
) -> Floats:
    """The weighted sum of the routes [M, E]; each chosen expert is unpacked once and runs on its routes."""
    chosen, tile = ids.numpy(), rows.TILE["decode"]
    y = np.zeros((*chosen.shape, x.shape[1]), np.float32)
    valid = (chosen >= 0) & (chosen < count)
    for e in np.unique(chosen[valid]).tolist():
        both, down = expert(e)
        m, slot = np.nonzero(chosen == e)
        a = swiglu(rows.multiply(np.ascontiguousarray(x[m]), both, tile), act)
        y[m, slot] = rounded(rows.multiply(a, down, tile), act)
    parts = weights.numpy()[..., None] * y
    parts[~valid] = 0.0
    return rounded(fold(parts), act)


@np.errstate(all="ignore")
def _shared(x: Floats, both: Floats, down: Floats, gate: Floats, act: torch.dtype) -> Floats:
    """The shared expert of every row, gated: [M, E]."""
    tile = rows.TILE["decode"]
    y = rounded(rows.multiply(swiglu(rows.multiply(x, both, tile), act), down, tile), act)
    return rounded(y * rows.logistic(rounded(rows.multiply(x, gate, tile), act)), act)


PLAN, GATED, DOWN, FOLD = (Kernel("moe_qpn", entry) for entry in ("moe_plan", "moe_gated", "moe_down", "moe_fold"))


def launch(
    config: int,
    d: Mapping[str, int],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor | None,
    w2: Tensor | None,
    shared13: Tensor | None,
    shared2: Tensor | None,
    shared_gate: Tensor | None,
    format: str | None,
    width: int | None,
    phase: int | None,
    packed13: Tensor | None,
    packed2: Tensor | None,
    plan: Tensor,
    gated: Tensor,
    y: Tensor,
    out: Tensor,
) -> None:
    """`config` warps share the k of a tile of the first product. Blocks are launched for as many packs as there can be; the rest return."""
    bank13, bank2, form, inner, first = _packed(d["E"], packed13, packed2, format, width, phase, w13)
    if d.get("J", inner) != inner:
        raise ContractError(f"moe_qpn: shared2 axis 1: the kernel's shared expert is as wide as the others, I={inner}, got J={d['J']}")
    defines: dict[str, int | str] = dict(X=d["X"], E=d["E"], I=inner, PHASE=first, FORMAT=CLASSES[form], WARPS_K=config)
    m, slots = d["M"], d["K"]
    packs = m * slots + (-(-m // 8) if shared13 is not None else 0)
    PLAN(defines, min(m, 1), -(-d["X"] // 32) * 32, ids, plan, m * slots)
    GATED(defines, (2 * inner // 32, packs), 32 * config, x, bank13, shared13, plan, gated, m, slots, bank13.stride(0))
    DOWN(defines, (-(-d["E"] // 128), packs), 128, gated, bank2, shared2, plan, y, m, slots, bank2.stride(0))
    FOLD(defines, (m, -(-d["E"] // 512)), 64, x, ids, weights, y, shared_gate, out, m, slots)


def _packed(
    hidden: int,
    packed13: Tensor | None,
    packed2: Tensor | None,
    format: str | None,
    width: int | None,
    phase: int | None,
    w13: Tensor | None,
) -> tuple[Tensor, Tensor, str, int, int]:
    """Return packed13, packed2, format, width and phase of a call that has them and nothing else; ContractError for any other."""
    if packed13 is None or packed2 is None:
        raise ContractError("moe_qpn: packed13: the kernel takes packed banks only; pack w13 and w2, or call with CPU tensors")
    if w13 is not None:
        raise ContractError("moe_qpn: w13: given beside packed13; pass one of them")
    if format is None or width is None:
        raise ContractError(f"moe_qpn: packed banks need format and width, got {format} and {width}")
    first = phase or 0
    if first and format != "fp8":
        raise ContractError(f"moe_qpn: phase: {format} has no blocks of k for a slice to begin in, got {first}; pass 0")
    for name, bank, n, k, at in (("packed13", packed13, 2 * width, hidden, 0), ("packed2", packed2, hidden, width, first)):
        expected = bank_bytes(format, n, k, at)
        if bank.shape[1] != expected:
            raise ContractError(f"moe_qpn: {name} axis 1: {format} [{n}, {k}] takes {expected} bytes, got {bank.shape[1]}")
    return packed13, packed2, format, width, first


def _is_packed(dims: Mapping[str, int]) -> bool:
    """Inputs are packed at the sizes that the kernel has, dense at the others."""
    return dims["E"] % 32 == 0 and dims["I"] % 32 == 0


def _banks(draw: inputs.Draw) -> Tensor:
    """Random banks; beyond 8 experts they repeat."""
    first, hidden, inner = draw.name == "packed13", draw.dims["E"], draw.dims["I"]
    n, k, phase = (2 * inner, hidden, 0) if first else (hidden, inner, draw.dims["PHASE"])
    count = min(draw.dims["X"], 8)
    made = [(pack13 if first else pack)(random_weights(draw, draw.made["format"], n, k, phase)) for _ in range(count)]
    return torch.stack([made[e % count] for e in range(draw.dims["X"])])


def _if_packed(maker: inputs.Maker) -> inputs.Maker:
    return lambda draw: maker(draw) if _is_packed(draw.dims) else None


def _shape(format: str, m: int, phase: int = 0) -> dict[str, int]:
    sizes = dict(M=m, K=10, X=512, E=2560, I=160, J=160, PHASE=phase)
    return sizes | dict(B13=bank_bytes(format, 320, 2560), B2=bank_bytes(format, 2560, 160, phase))


moe_qpn = Op(
    "moe_qpn",
    reference=reference,
    launch=launch,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        x="act[M,E] aligned",
        ids="i32[M,K]",
        weights="f32[M,K]",
        w13="bank[X,I2,E] optional",
        w2="bank[E,X,I] when=w13",
        shared13="act[J2,E] optional aligned",
        shared2="act[E,J] when=shared13 aligned",
        shared_gate="act[1,E] when=shared13 aligned",
        format=f"enum {'|'.join(FORMATS)} optional",
        width="dim I optional",
        phase="dim PHASE optional",
        packed13="u8[X,B13] optional aligned",
        packed2="u8[X,B2] when=packed13 aligned",
        plan="i32[P] scratch",
        gated="f16[R,I] scratch aligned",
        y="f16[R,E] scratch aligned",
        out="act[M,E] out aligned",
    ),
    dims=dict(
        M=Dim(0, 64, test=(0, 20)),
        K=Dim(1, 64, test=(1, 6)),
        X=Spec(512, test=(4, 8)),
        E=Spec(2560, test=(24, 40), kernel=(64, 96)),
        I=Spec(160, 320, 640, test=(8, 20), kernel=(32,)),
        I2=Derived("2*I"),
        J=Spec(160, 320, 640, test=(8, 20), kernel=(32,)),
        J2=Derived("2*J"),
        PHASE=Spec(0, 32, 64, 96, test=(0,), kernel=(0, 96)),
        B13=Dim(0, 1 << 40, test=(0, 0), infer="0"),
        B2=Dim(0, 1 << 40, test=(0, 0), infer="0"),
        P=Derived("1+4*M*K"),
        R=Derived("M*K+M"),
    ),
    inputs=dict(
        ids=inputs.integers(-1, "X"),
        weights=inputs.uniform(0.0, 1.0),
        w13=lambda draw: None if _is_packed(draw.dims) else inputs.normal(0.2)(draw),
        w2=inputs.normal(0.2),
        shared13=inputs.optional(inputs.normal(0.2)),
        shared2=inputs.normal(0.2),
        shared_gate=inputs.normal(0.2),
        format=_if_packed(lambda draw: fitting_format(draw, 2 * draw.dims["I"], draw.dims["E"], "B13")),
        width=_if_packed(lambda draw: draw.dims["I"]),
        phase=lambda draw: draw.dims["PHASE"] if draw.made["format"] == "fp8" else None,
        packed13=_if_packed(_banks),
        packed2=_banks,
    ),
    configs=(8, 4),
    flops=lambda d: 6 * d["M"] * d["E"] * (d["K"] * d["I"] + d["J"]),
    shapes=[
        *(_shape("int4", m) for m in (1, 5, 40, 64)),
        *(_shape(format, 5) for format in ("nvfp4", "int8")),
        *(_shape("fp8", 5, phase) for phase in (0, 32, 64, 96)),  # the four ranks' slices of W2
    ],
)
