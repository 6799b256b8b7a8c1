"""gdn_step: the gated delta rule, token by token, over the T decode or verify rows of each request.

    S <- exp(g_t) S;   u = beta_t (v_t - S k_t);   S <- S + u k_t^T;   o_t = act( S q_t )

q and k are l2-normalised and q is scaled by K^-1/2; g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b). Everything but o is
float32. With `write` the state after a request's last valid row replaces the stored one; without, the stored one stays and
gdn_replay advances it later over the rows that were accepted.
"""

import numpy as np
from torch import Tensor

from sm70kernels import delta, inputs, slots
from sm70kernels import rows as arithmetic
from sm70kernels.op import INV, Derived, Dim, Op, Ratio, Spec


@np.errstate(all="ignore")  # infinities and NaN are data
def reference(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slot: Tensor,
    rows: Tensor,
    write: bool,
) -> Tensor:
    """Return o [N, T, HV, V] in qkv's dtype; state f32 [SL, HV, V, K] is written in place when `write`.

    qkv [N, T, 2 HK K + HV V] is (q | k | v) after the convolution, a and b [N, T, HV] raw, A_log and dt_bias f32 [HV], slot and
    rows i32 [N]. Rows from rows[i] on, and all rows of a request with slot -1, give 0 and leave no trace in the state.
    """
    requests, width, _ = qkv.shape
    _, value_heads, value_dim, key_dim = state.shape
    held = slot.tolist()
    owned = [n if s >= 0 else 0 for s, n in zip(held, rows.tolist(), strict=True)]
    if 0 in owned or requests == 0:
        # Padding is most of a small batch: nobody's state is not worth the arithmetic.
        o = qkv.new_zeros(requests, width, value_heads, value_dim)
        if some := arithmetic.active(owned):
            o[some] = reference(qkv[some], a[some], b[some], A_log, dt_bias, state, slot[some], rows[some], write)
        return o
    q, k, v = delta.heads(qkv, value_heads, value_dim, key_dim)
    g, beta = delta.gates(a, b, A_log, dt_bias)
    recurrence = delta.Rows(q, k, v, g, beta)
    pool = state.numpy()
    running = pool.take([max(s, 0) for s in held], 0)
    outputs = []
    for t in range(width):
        recurrence.advance(t, running)
        outputs.append(recurrence.read(t, running))
        if write:
            delta.store(pool, running, [s if n == t + 1 else -1 for s, n in zip(held, owned, strict=True)])
    y = outputs[0] if width == 1 else np.stack(outputs, 1)
    y = y.reshape(requests, width, value_heads, value_dim)
    if min(owned) < width:
        y[np.arange(width) >= np.array(owned)[:, None]] = 0.0
    return arithmetic.tensor(y, qkv.dtype)


gdn_step = Op(
    "gdn_step",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        qkv="act[N,T,C]",
        a="act[N,T,HV] strided",
        b="act[N,T,HV] strided",
        A_log="f32[HV]",
        dt_bias="f32[HV]",
        state="f32[SL,HV,V,K] inout",
        slot="i32[N]",
        rows="i32[N]",
        write="bool",
        o="act[N,T,HV,V] out",
    ),
    dims=dict(
        N=Dim(0, 64, test=(0, 5)),
        T=Dim(1, 8, test=(1, 4)),
        SL=Dim(1, 1 << 20, test=(5, 8)),
        HK=Spec(16, 8, 4, test=(1, 2), infer="(C-HV*V)//(2*K)"),
        HV=Spec(48, 24, 12, test=(2, 4)),
        V=Spec(128, test=(8, 32)),
        K=Spec(128, test=(16, 32)),
        C=Derived("2*HK*K+HV*V"),
    ),
    inputs=dict(a=inputs.normal(2.0), A_log=inputs.uniform(-2.0, 2.5), slot=slots.running, rows=inputs.integers(0, "T")),
)
