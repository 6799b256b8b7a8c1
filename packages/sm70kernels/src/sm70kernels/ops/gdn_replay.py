"""gdn_replay: advance each request's recurrent state over its accepted rows, in all layers, in place.

Verification leaves the state where it was and keeps its inputs; this runs the same recurrence (gdn_step's code, hence its bits)
over the first `accepted` of them and stores the result. The state after `snapshot_at` rows is stored to `snapshot_slot` as well.
"""

import numpy as np
import torch
from torch import Tensor

from sm70kernels import delta, inputs, slots
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(
    state: Tensor,
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    slot: Tensor,
    accepted: Tensor,
    snapshot_slot: Tensor,
    snapshot_at: Tensor,
) -> None:
    """Advance state f32 [L, SL, HV, V, K] from the recorded qkv [L, N, T, C], a and b [L, N, T, HV]; A_log, dt_bias f32 [L, HV].

    slot, accepted, snapshot_slot and snapshot_at are i32 [N]. A request with slot -1 or accepted 0 stores nothing. A snapshot is
    stored when snapshot_slot >= 0 and snapshot_at lies in 1 .. accepted. Raises ValueError when a request accepts more than T rows.
    """
    vectors = (slot.tolist(), accepted.tolist(), snapshot_slot.tolist(), snapshot_at.tolist())
    requests = [(i, s, n, t, m) for i, (s, n, t, m) in enumerate(zip(*vectors, strict=True)) if s >= 0 and n > 0]
    if not requests:
        return
    value_heads, value_dim, key_dim = state.shape[2:]
    steps = max(n for _, _, n, _, _ in requests)
    if steps > qkv.shape[2]:
        raise ValueError(f"gdn_replay: accepted {steps} of T={qkv.shape[2]} recorded rows; a step accepts at most the rows it verified")
    active = torch.tensor([i for i, _, _, _, _ in requests])
    qkv, a, b = (x[:, :, :steps].index_select(1, active) for x in (qkv, a, b))
    q, k, v = delta.heads(qkv, value_heads, value_dim, key_dim)
    g, beta = delta.gates(a, b, A_log, dt_bias)
    for layer, pool in enumerate(state.numpy()):
        recurrence = delta.Rows(q[layer], k[layer], v[layer], g[layer], beta[layer])
        running = pool[[s for _, s, _, _, _ in requests]]
        # Rows after a request's last accepted one are computed too, but nothing reads what they leave in `running`.
        for t in range(1, steps + 1):
            recurrence.advance(t - 1, running)
            delta.store(pool, running, [s if n == t else -1 for _, s, n, _, _ in requests])
            delta.store(pool, running, [target if m == t <= n else -1 for _, _, n, target, m in requests])


gdn_replay = Op(
    "gdn_replay",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        state="f32[L,SL,HV,V,K] inout",
        qkv="act[L,N,T,C]",
        a="act[L,N,T,HV]",
        b="act[L,N,T,HV]",
        A_log="f32[L,HV]",
        dt_bias="f32[L,HV]",
        slot="i32[N]",
        accepted="i32[N]",
        snapshot_slot="i32[N]",
        snapshot_at="i32[N]",
    ),
    dims=dict(
        L=Dim(1, 64, test=(1, 3)),
        N=Dim(0, 64, test=(0, 4)),
        T=Dim(1, 8, test=(1, 4)),
        SL=Dim(1, 1 << 20, test=("max(1,2*N)", "2*N+2")),
        HK=Spec(16, 8, 4, test=(1, 2), infer="(C-HV*V)//(2*K)"),
        HV=Spec(48, 24, 12, test=(2, 4)),
        V=Spec(128, test=(8, 32)),
        K=Spec(128, test=(16, 32)),
        C=Derived("2*HK*K+HV*V"),
    ),
    inputs=dict(a=inputs.normal(2.0), A_log=inputs.uniform(-2.0, 2.5), **slots.commit()),
)
