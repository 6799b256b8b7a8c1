"""ple_replay: shift every n-gram layer's convolution history by its request's accepted rows, in all layers, in place.

The history is the last HL = (KW-1) * dilation normalised values of that layer's streams, oldest first. After n rows it is the last
HL of (old history, first n rows): a move, no arithmetic. That after `snapshot_at` rows is stored to `snapshot_slot` as well.
"""

from torch import Tensor

from sm70kernels import slots
from sm70kernels import window as windows
from sm70kernels.op import EXACT, Dim, Exact, Op


def reference(history: Tensor, x: Tensor, slot: Tensor, accepted: Tensor, snapshot_slot: Tensor, snapshot_at: Tensor) -> None:
    """Advance history [L, SL, HL, C] over the recorded rows x [L, N, T, C]; the vectors are i32 [N].

    A request with slot -1 or accepted 0 stores nothing; a snapshot needs snapshot_slot >= 0 and snapshot_at in 1 .. accepted.
    """
    windows.replay(history, x, slot, accepted, snapshot_slot, snapshot_at)


ple_replay = Op(
    "ple_replay",
    reference=reference,
    launch=None,
    determinism=EXACT,
    tolerance=Exact(),
    args=dict(
        history="act[L,SL,HL,C] inout",
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
        HL=Dim(1, 64, test=(1, 9)),
        C=Dim(1, 65536, test=(1, 40)),
    ),
    inputs=slots.commit(),
)
