"""conv_replay: shift every gdn_conv window by its request's accepted rows, in all layers, in place.

The window after n rows is the last KW-1 of (old window, first n inputs): a move of recorded inputs, no arithmetic. The window after
`snapshot_at` rows is stored to `snapshot_slot` as well.
"""

from torch import Tensor

from sm70kernels import slots
from sm70kernels import window as windows
from sm70kernels.op import EXACT, Dim, Exact, Op


def reference(window: Tensor, x: Tensor, slot: Tensor, accepted: Tensor, snapshot_slot: Tensor, snapshot_at: Tensor) -> None:
    """Advance window [L, SL, KW-1, C] over the recorded inputs x [L, N, T, C]; the vectors are i32 [N].

    A request with slot -1 or accepted 0 stores nothing; a snapshot needs snapshot_slot >= 0 and snapshot_at in 1 .. accepted.
    """
    windows.replay(window, x, slot, accepted, snapshot_slot, snapshot_at)


conv_replay = Op(
    "conv_replay",
    reference=reference,
    launch=None,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(
        window="act[L,SL,KW1,C] inout",
        x="act[L,N,T,C]",
        slot="i32[N]",
        accepted="i32[N]",
        snapshot_slot="i32[N]",
        snapshot_at="i32[N]",
    ),
    dims=dict(
        L=Dim(1, 64, test=(1, 3)),
        N=Dim(0, 64, test=(0, 4)),
        T=Dim(1, 8, test=(1, 5)),
        SL=Dim(1, 1 << 20, test=("max(1,2*N)", "2*N+2")),
        KW1=Dim(1, 16, test=(1, 3)),
        C=Dim(1, 65536, test=(1, 40)),
    ),
    inputs=slots.commit(),
)
