"""prefill_attention: dense causal attention of the prefill rows whose selection would be every token.

    out[m, h] = softmax_t(scale * q[m, h] . k[t, h // G]) . v[t, h // G]      t <= position[m], t % world == rank, G = HQ / HK

Only rows with 0 <= position < limit are computed; the others are left as they are (qsa_prefill has them). Whether a row is dense
depends on its absolute position alone. Local column c is token c * world + rank and lies in block block_table[request, c // P] at
offset c % P. Columns are read in fixed blocks of 64 from column 0, merged in ascending order (sm70kernels.softmax). Rows come in
tiles of 64 that belong to one request each. LSE is base 2. With a gate, out = h(f32(h(out)) * sigmoid(f32(gate))). A row without
local tokens: out 0, LSE -inf (kernels.md C4).
"""

import torch
from torch import Tensor

from sm70kernels import attention, inputs, paging, rows, softmax
from sm70kernels.op import INV, Dim, Op, Ratio, Spec


def reference(
    q: Tensor,
    position: Tensor,
    request: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    scale: float,
    limit: int,
    rank: int,
    world: int,
    gate: Tensor | None,
    partial: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write the dense rows of out act[M, HQ, D] (float32 and not gated if partial) and of lse f32[M, HQ] in place.

    q act[M, HQ, D]; position, request i32[M] (position -1: padding row); caches act[B, P, HK, D]; block_table i32[N, PT].
    Raises ValueError if a tile has dense rows of two requests, a gate comes with partial=True, out has the wrong dtype, or rank
    is not one of world.
    """
    attention.check_partial("prefill_attention", gate, partial)
    attention.check_out("prefill_attention", out, q.dtype, partial)
    if not 0 <= rank < world:
        raise ValueError(f"prefill_attention: rank {rank} is not one of {world} ranks (0 .. {world - 1})")
    tile = rows.TILE["prefill"]
    reach = torch.where(position < limit, position, -1)
    for at in range(0, q.shape[0], tile):
        dense = (reach[at : at + tile] >= 0).nonzero().view(-1)
        if dense.numel() == 0:
            continue
        index = at + dense
        owners = sorted(set(request[index].tolist()))
        if len(owners) > 1:
            raise ValueError(
                f"prefill_attention: rows {at} to {at + tile - 1} share a tile but belong to requests {owners}; "
                f"pad each request to a multiple of {tile} rows"
            )
        where = torch.full((tile,), -1, dtype=torch.int32)
        where[: len(reach[at : at + tile])] = reach[at : at + tile]
        table = paging.tables(block_table, request[index[:1]].numpy())
        o, e = softmax.causal(rows.pad_rows(q[at : at + tile], tile), where, table, k_cache, v_cache, scale, rank, world)
        o = o[dense]
        out[index] = o if partial else attention.gated(o, None if gate is None else gate[index], out.dtype)
        lse[index] = e[dense]


def _position(draw: inputs.Draw) -> Tensor:
    """Consecutive positions in each tile of 64 rows, from a random start; some tiles end in padding."""
    tiles = []
    for _ in range(0, draw.shape[0], 64):
        tile = torch.arange(64) + draw.integer(0, 90)
        tile[draw.integer(32, 64) :] = -1
        tiles.append(tile)
    return torch.cat([torch.zeros(0), *tiles])[: draw.shape[0]].to(draw.dtype)


def _request(draw: inputs.Draw) -> Tensor:
    """One request a tile."""
    tiles = torch.randint(0, draw.dims["N"], (-(-draw.shape[0] // 64),), generator=draw.generator)
    return tiles.repeat_interleave(64)[: draw.shape[0]].to(draw.dtype)


prefill_attention = Op(
    "prefill_attention",
    reference=reference,
    launch=None,
    determinism=INV,
    tolerance=Ratio(2.0),
    args=dict(
        q="act[M,HQ,D]",
        position="i32[M]",
        request="i32[M]",
        k_cache="act[B,P,HK,D]",
        v_cache="act[B,P,HK,D]",
        block_table="i32[N,PT]",
        scale="float",
        limit="int",
        rank="int",
        world="int",
        gate="act[M,HQ,D] optional",
        partial="bool",
        out="act|f32[M,HQ,D] inout",
        lse="f32[M,HQ] inout",
    ),
    dims=dict(
        M=Dim(0, 8192, test=(0, 130)),
        HQ=Spec(6, 12, 24, test=(2, 4)),
        HK=Spec(1, 2),
        D=Spec(256, test=(20, 32)),
        B=Dim(1, 1 << 24, test=(1, 20)),
        P=Dim(1, 4096, test=(32, 64)),
        N=Dim(1, 8192, test=(1, 3)),
        PT=Dim(1, 1 << 20, test=(5, 6)),
    ),
    inputs=dict(
        position=_position,
        request=_request,
        block_table=inputs.integers(0, "B-1"),
        scale=inputs.value(0.2),
        limit=inputs.integers(0, 160),
        rank=inputs.integers(0, 2),
        world=lambda draw: int(draw.made["rank"]) + draw.integer(1, 2),
        partial=attention.draw_partial,
        out=attention.draw_out,
    ),
)
