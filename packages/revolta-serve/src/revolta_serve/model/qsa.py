"""Sparse attention layer (QSA): an indexer scores pooled key blocks, attention reads the best of them and the open tail."""

from collections.abc import Mapping

import torch
from torch import Tensor

from revolta_serve.model.batch import Batch
from revolta_serve.model.linear import project
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.model.pools import Pools
from revolta_serve.parallel.groups import Groups
from sm70kernels import (
    attention_merge,
    kv_store,
    prefill_attention,
    qsa_attention,
    qsa_compress,
    qsa_localize,
    qsa_prefill,
    qsa_prepare,
    qsa_score,
    qsa_select,
)


class SparseAttention:
    """Query heads of this rank; K and V of this rank's heads and, under context sharding, of this rank's tokens."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], layer: int, groups: Groups) -> None:
        prefix = f"layers.{layer}.qsa"
        self.in_proj = weights[f"{prefix}.in_proj"]
        self.q_norm, self.k_norm = weights[f"{prefix}.q_norm"], weights[f"{prefix}.k_norm"]
        self.iq_norm, self.ik_norm = weights[f"{prefix}.iq_norm"], weights[f"{prefix}.ik_norm"]
        self.out_proj = weights[f"{prefix}.out_proj"]
        self.group, self.context = groups.tensor, groups.context
        self.index = config.layer_types[:layer].count("qsa")
        self.kv_heads = max(1, config.kv_heads // groups.tensor.size)
        channels = 2 * self.out_proj.shape[1] + 2 * self.kv_heads * config.head_dim
        self.widths = (channels, self.in_proj.shape[0] - channels)
        self.scale, self.eps = config.head_dim**-0.5, config.eps
        self.topk, self.ratio = config.index_topk, config.index_ratio
        self.limit = config.dense_positions

    def __call__(self, x: Tensor, batch: Batch, pools: Pools) -> Tensor:
        """x act[M, E] -> act[M, E]; stores the rows' K, V and index keys first, so that a row reads what the cache holds."""
        i = self.index
        qkvg, iqk = project(x, self.in_proj, batch.kind).split_with_sizes(self.widths, 1)
        q, gate, k, v, iq, ik = qsa_prepare(
            qkvg,
            iqk,
            batch.cos,
            batch.sin,
            self.q_norm,
            self.k_norm,
            self.iq_norm,
            self.eps,
            self.kv_heads,
        )
        kv_store(k, v, batch.kv_index, pools.layers.k[i], pools.layers.v[i])
        qsa_compress(
            ik,
            batch.position,
            batch.row_slot,
            batch.first,
            batch.key_index,
            batch.block_cos,
            batch.block_sin,
            self.ik_norm,
            self.eps,
            self.ratio,
            pools.layers.ring[i],
            pools.layers.keys[i],
        )
        o = self._attend(q, gate, self._select(iq, batch, pools), batch, pools)
        return self.group.sum(project(o.flatten(1), self.out_proj, batch.kind))

    def _select(self, iq: Tensor, batch: Batch, pools: Pools) -> Tensor | None:
        """Token ids each row attends to, i32[M, W]; None for a prefill pass in which every row is dense."""
        if batch.sparse:
            scores = qsa_score(iq, pools.layers.keys[self.index], batch.block_table, batch.request, batch.visible)
        elif batch.kind == "decode":
            # No row has more blocks than it may select: any scores give the same selection.
            scores = torch.zeros(iq.shape[0], self.topk)
        else:
            return None
        selected: Tensor = qsa_select(scores, batch.visible, batch.position, self.topk, self.ratio)
        return selected

    def _attend(self, q: Tensor, gate: Tensor, sel: Tensor | None, batch: Batch, pools: Pools) -> Tensor:
        """Attention of q act[M, HQ, D] over the stored K and V, gated: act[M, HQ, D]."""
        ranks = self.context.size
        if ranks == 1:
            return self._attend_here(q, gate, sel, batch, pools)[0]
        heads = q.shape[1]
        mine = self.context.rank * heads
        q = self.context.gather(q).transpose(0, 1).flatten(1, 2)
        local = None if sel is None else qsa_localize(sel, self.context.rank, ranks)
        parts, lse = (self.context.gather(t) for t in self._attend_here(q, None, local, batch, pools))
        parts, lse = parts[:, :, mine : mine + heads].contiguous(), lse[:, :, mine : mine + heads].contiguous()
        merged: Tensor = attention_merge(parts, lse, gate, "f16" if gate.dtype == torch.float16 else "f32")
        return merged

    def _attend_here(self, q: Tensor, gate: Tensor | None, sel: Tensor | None, batch: Batch, pools: Pools) -> tuple[Tensor, Tensor]:
        """Attention over the tokens this rank holds: (out, lse); out is a float32 partial result if gate is None."""
        k, v, table, partial = pools.layers.k[self.index], pools.layers.v[self.index], batch.block_table, gate is None
        if batch.kind == "decode":
            out, lse = qsa_attention(q, sel, k, v, table, batch.request, self.scale, gate, partial)
            return out, lse
        out = torch.zeros(q.shape, dtype=torch.float32 if partial else q.dtype)
        lse = torch.full(q.shape[:2], -torch.inf)
        rank, ranks = self.context.rank, self.context.size
        prefill_attention(
            q, batch.position, batch.request, k, v, table, self.scale, self.limit, rank, ranks, gate, partial, out, lse
        )
        if sel is not None:
            qsa_prefill(q, sel, batch.position, batch.request, k, v, table, self.scale, self.limit, gate, partial, out, lse)
        return out, lse
