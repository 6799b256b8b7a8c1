"""Qwen3.8 Flash-Next: the text model on one page.

M rows (tokens), S residual streams, E hidden, V vocabulary. A rank holds its share of heads, expert widths, n-gram rows and
vocabulary; norms, routers, hyper-connections and index keys are on every rank.

Seams: image and video features overwrite rows of the embedding before the streams are made (`embed`); a drafter reads the streams
before the final mixer (`Hidden.streams`) or after chosen layers (`tap`).
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from revolta_serve.errors import EngineError
from revolta_serve.model.batch import Batch
from revolta_serve.model.gdn import GatedDeltaNet
from revolta_serve.model.hyper import HyperConnection
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.model.moe import MixtureOfExperts
from revolta_serve.model.ple import NgramEmbedding
from revolta_serve.model.pools import Pools
from revolta_serve.model.qsa import SparseAttention
from revolta_serve.model.record import by_request
from revolta_serve.parallel.groups import Groups
from sm70kernels import conv_replay, embed_gather, gdn_replay, lm_head_logits, ple_replay

StreamTap = Callable[[int, Tensor], None]
"""Called after each layer with its index and the streams act[M, S, E], which the next layer overwrites."""


class Hidden(NamedTuple):
    """Result of a pass: `mixed` act[M, E] feeds the head, `streams` act[M, S, E] is what drafters see."""

    mixed: Tensor
    streams: Tensor


class Layer:
    """[n-gram] -> mix -> GDN or QSA -> inject -> mix -> experts -> inject."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], layer: int, groups: Groups) -> None:
        self.ple = NgramEmbedding(config, weights, layer, groups) if layer in config.ple_layers else None
        self.attn_hyper = HyperConnection(config, weights, f"layers.{layer}.attn_hyper")
        self.mlp_hyper = HyperConnection(config, weights, f"layers.{layer}.mlp_hyper")
        block = GatedDeltaNet if config.layer_types[layer] == "gdn" else SparseAttention
        self.block = block(config, weights, layer, groups)
        self.moe = MixtureOfExperts(config, weights, layer, groups)


class FlashNext:
    """The decoder stack of one rank."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], groups: Groups) -> None:
        self.config, self.groups = config, groups
        self.embedding, self.lm_head = weights["embed"], weights["lm_head"]
        self.layers = [Layer(config, weights, i, groups) for i in range(config.layers)]
        self.mixer = HyperConnection(config, weights, "mixer")
        nets = [layer.block for layer in self.layers if isinstance(layer.block, GatedDeltaNet)]
        # f32[L, HV] of all delta-rule layers: a commit runs over all of them at once.
        self.gates = tuple(torch.stack(values) for values in zip(*((net.a_log, net.dt_bias) for net in nets), strict=True))

    def forward(self, batch: Batch, pools: Pools, tap: StreamTap | None = None) -> Hidden:
        """Run the rows of one batch; writes K, V, index keys and (if batch.write) recurrent states into the pools."""
        h = self.embed(batch)
        n: Tensor | None = None
        for i, layer in enumerate(self.layers):
            if layer.ple is not None:
                layer.ple(h, batch, pools)
            x, gate = layer.attn_hyper.mix(layer.attn_hyper.normalise(h) if n is None else n, batch.kind)
            n = HyperConnection.inject(h, layer.block(x, batch, pools), gate, layer.mlp_hyper, self.config.eps)
            assert n is not None
            x, gate = layer.mlp_hyper.mix(n, batch.kind)
            n = HyperConnection.inject(h, layer.moe(x, batch.kind), gate, self._reader_after(i), self.config.eps)
            if tap is not None:
                tap(i, h)
        mixed, _ = self.mixer.mix(self.mixer.normalise(h) if n is None else n, batch.kind)
        return Hidden(mixed, h)

    def commit(self, batch: Batch, accepted: Tensor, pools: Pools) -> None:
        """Advance the states of a verify pass over the first `accepted` rows of each request, i32[N], in all layers at once.

        The bits are those of as many one-row passes. Keeps the batch's snapshots (KS = 1) on the way, where their row is accepted.
        """
        record = batch.record
        if record is None:
            raise EngineError("this pass has advanced its states itself and has nothing to commit; lay it out with a record")
        vectors = (batch.slot, accepted, batch.keep_slot.select(1, 0), batch.keep_at.select(1, 0))
        n = accepted.shape[0]
        if record.qkv:
            conv_replay(pools.conv, by_request(record.conv, n), *vectors)
            gdn_replay(pools.gdn, *(by_request(rows, n) for rows in (record.qkv, record.a, record.b)), *self.gates, *vectors)
        if record.ple:
            ple_replay(pools.ple, by_request(record.ple, n), *vectors)

    def embed(self, batch: Batch) -> Tensor:
        """Token embeddings act[M, E], copied into every stream: act[M, S, E]."""
        start = self.groups.tensor.rank * self.embedding.shape[0]
        e = self.groups.tensor.sum(embed_gather(batch.ids, self.embedding, start))
        return torch.stack((e,) * self.config.streams, 1)

    def logits(self, x: Tensor) -> Tensor:
        """x act[R, E] -> f32[R, V], the shards of all ranks side by side."""
        mine: Tensor = lm_head_logits(x, self.lm_head)
        if self.groups.tensor.size > 1:
            mine = self.groups.tensor.gather(mine).transpose(0, 1).flatten(1)
        return mine[:, : self.config.vocab].contiguous()

    def _reader_after(self, layer: int) -> HyperConnection | None:
        """The connection that reads the streams after this layer, if nothing changes them in between."""
        if layer + 1 == len(self.layers):
            return self.mixer
        following = self.layers[layer + 1]
        return None if following.ple is not None else following.attn_hyper
