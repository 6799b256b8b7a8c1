"""gdn_prefill: the gated delta rule over prompts, in chunks of 64 tokens aligned to absolute positions.

With G the running sum of g inside a chunk, D_ij = exp(G_i - G_j) for i >= j and 0 otherwise, k and q rows of K and Q:

    A = strictly lower part of diag(beta) K K^T * D
    (I + A) [U | W] = [diag(beta) V | diag(beta e^G) K]          forward substitution
    N = U - W S^T;   O = diag(e^G) Q S^T + (Q K^T * D) N;   S <- e^{G_C} S + N^T diag(e^{G_C - G}) K

This equals gdn_step's recurrence (Yang et al. 2024, section 3.3). The last chunk is padded with g = 0, beta = 0, q = k = v = 0.
Sequences and chunks run one at a time, on constant shapes: where a prompt was cut and who shares the call cannot change a bit.
The state at the end of a full chunk can be kept on the way (sm70kernels.snapshots).
"""

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from sm70kernels import delta, inputs, slots, snapshots
from sm70kernels import rows as arithmetic
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec

CHUNK = 64

_NO_DECAY_LEFT = -128.0
"""exp of anything below -104 is 0 in float32, so a floor on g changes no result; it keeps g = -inf out of differences."""


def _chunk(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return (o [HV, 64, V], next state [HV, V, K]) of one chunk: q, k [HK, 64, K], v [HV, 64, V], g and beta [HV, 64]."""
    key_heads = k.shape[0]
    value_heads, _, value_dim = v.shape
    # Running sums in double: after a strong decay the small differences of later tokens would drown in float32.
    total = g.clamp(min=_NO_DECAY_LEFT).double().cumsum(-1)
    apart = (total[:, :, None] - total[:, None, :]).float()
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    decay = arithmetic.exp(apart.masked_fill_(future, -torch.inf))
    since_start = arithmetic.exp(total.float())[:, :, None]
    to_end = arithmetic.exp((total[:, -1:] - total).float())[:, :, None]

    group = value_heads // key_heads
    gram = torch.bmm(k, k.mT).repeat_interleave(group, 0)
    attention = torch.bmm(q, k.mT).repeat_interleave(group, 0) * decay
    q, k = q.repeat_interleave(group, 0), k.repeat_interleave(group, 0)
    beta = beta[:, :, None]
    right = torch.cat([v * beta, k * (beta * since_start)], -1)
    solved = torch.linalg.solve_triangular(gram * decay * beta, right, upper=False, unitriangular=True)
    u, w = solved[..., :value_dim], solved[..., value_dim:].contiguous()
    new = u - torch.bmm(w, state.mT)
    o = torch.bmm(q, state.mT) * since_start + torch.bmm(attention, new)
    return o, state * since_start[:, -1:] + torch.bmm(new.mT, k * to_end)


def _sequence(
    qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, wanted: Collection[int]
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Return (o [R, HV, V] float32, last state, the states after the `wanted` row counts) of one sequence of R > 0 rows.

    It starts from `state` [HV, V, K]; the wanted row counts are ends of full chunks.
    """
    count, (value_heads, value_dim, key_dim) = qkv.shape[0], state.shape
    qkv, a, b = (arithmetic.pad_rows(x, CHUNK) for x in (qkv, a, b))
    parts = (*delta.heads(qkv, value_heads, value_dim, key_dim), *delta.gates(a, b, A_log, dt_bias))
    # [chunks, heads, 64, ..]: every chunk is contiguous, aligned alike and of one shape, wherever it lies in the prompt.
    q, k, v, g, beta = (torch.from_numpy(x).view(-1, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous() for x in parts)
    # Rows that do not exist neither decay the state nor write to it.
    for x in (g, beta):
        x[-1, :, (count - 1) % CHUNK + 1 :] = 0.0
    outputs, found = [], {}
    for number, chunk in enumerate(zip(q, k, v, g, beta, strict=True), 1):
        o, state = _chunk(*chunk, state)
        outputs.append(o.transpose(0, 1))
        if number * CHUNK in wanted:
            found[number * CHUNK] = state
    return torch.cat(outputs)[:count], state, found


def _kept(keep_slot: Tensor, keep_at: Tensor, slot: list[int], rows: list[int]) -> list[snapshots.Kept]:
    kept = snapshots.kept(keep_slot, keep_at, slot, rows)
    for one in kept:
        if one.at % CHUNK:
            raise ValueError(
                f"gdn_prefill: keep_at of sequence {one.i}: {one.at} of {rows[one.i]} rows for slot {one.slot}, but a state exists only "
                f"at the end of a chunk of {CHUNK}; keep it after {one.at // CHUNK * CHUNK} rows, or end the slice after {one.at}"
            )
    return kept


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slot: Tensor,
    start: Tensor,
    rows: Tensor,
    fresh: Tensor,
    keep_slot: Tensor,
    keep_at: Tensor,
) -> Tensor:
    """Return o [M, HV, V] in qkv's dtype; state f32 [SL, HV, V, K] takes each sequence's last state, in place.

    qkv [M, 2 HK K + HV V] is (q | k | v) after the convolution, a and b [M, HV] raw, A_log and dt_bias f32 [HV]; slot, start, rows
    and fresh i32 [N]: sequence i owns rows start[i] .. start[i] + rows[i] - 1, the first of them at an absolute position that is a
    multiple of 64, and starts from state[slot[i]], or from zero when fresh[i] is 1. slot -1 is inactive; rows that belong to
    nobody give 0. A sequence without rows leaves its state as it is. keep_slot and keep_at i32 [N, KS] are the pairs of
    sm70kernels.snapshots. Raises ValueError, before anything is stored, for a keep_at in 1 .. rows[i] that is not a multiple of 64.
    """
    value_heads, value_dim = state.shape[1:3]
    output = torch.zeros(qkv.shape[0], value_heads, value_dim, dtype=qkv.dtype)
    running_slots, counts = slot.tolist(), rows.tolist()
    kept = _kept(keep_slot, keep_at, running_slots, counts)
    for i, (held, first, count, new) in enumerate(zip(running_slots, start.tolist(), counts, fresh.tolist(), strict=True)):
        if held < 0 or count == 0:
            continue
        running = torch.zeros(state.shape[1:]) if new else state[held].clone()
        mine = slice(first, first + count)
        wanted = [one for one in kept if one.i == i]
        o, last, found = _sequence(qkv[mine], a[mine], b[mine], A_log, dt_bias, running, {one.at for one in wanted})
        for one in wanted:
            state[one.slot] = found[one.at]
        state[held] = last
        output[mine] = o.to(qkv.dtype)
    return output


gdn_prefill = Op(
    "gdn_prefill",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        qkv="act[M,C]",
        a="act[M,HV] strided",
        b="act[M,HV] strided",
        A_log="f32[HV]",
        dt_bias="f32[HV]",
        state="f32[SL,HV,V,K] inout",
        slot="i32[N]",
        start="i32[N]",
        rows="i32[N]",
        fresh="i32[N]",
        keep_slot="i32[N,KS]",
        keep_at="i32[N,KS]",
        o="act[M,HV,V] out",
    ),
    dims=dict(
        M=Dim(0, 8192, test=(0, 200)),
        N=Dim(0, 64, test=(0, 3)),
        KS=Dim(0, 16, test=(0, 2)),
        SL=Dim(1, 1 << 20, test=("N*(KS+1)+1", "N*(KS+1)+2")),
        HK=Spec(16, 8, 4, test=(1, 2), infer="(C-HV*V)//(2*K)"),
        HV=Spec(48, 24, 12, test=(2, 4)),
        V=Spec(128, test=(8, 32)),
        K=Spec(128, test=(16, 32)),
        C=Derived("2*HK*K+HV*V"),
    ),
    inputs=dict(
        a=inputs.normal(2.0),
        A_log=inputs.uniform(-2.0, 2.5),
        slot=slots.running,
        start=slots.start(CHUNK),
        rows=slots.rows,
        fresh=inputs.integers(0, 1),
        keep_slot=slots.snapshot,
        keep_at=slots.ascending(CHUNK),
    ),
)
