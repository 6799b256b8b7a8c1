"""N-gram embedding: hashed bigrams and longer, looked up, gated by the streams and convolved over a dilated history."""

from collections.abc import Mapping

from torch import Tensor

from revolta_serve.model.batch import Batch
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.model.pools import Pools
from revolta_serve.parallel.groups import Groups
from sm70kernels import ple_apply, ple_gather, ple_hash


class NgramEmbedding:
    """Table rows are sharded over the tensor group; everything after the look-up is replicated."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], layer: int, groups: Groups) -> None:
        prefix = f"layers.{layer}.ple"
        self.table = weights[f"{prefix}.table"]
        self.multipliers, self.primes, self.offsets = (weights[f"{prefix}.{n}"] for n in ("multipliers", "primes", "offsets"))
        self.weights = tuple(weights[f"{prefix}.{n}"] for n in ("key", "value", "norm_key", "norm_query", "norm_conv", "conv"))
        self.index = config.ple_layers.index(layer)
        self.dilation, self.eos, self.eps = config.ngram, config.eos, config.eps
        self.group = groups.tensor
        self.row_start = groups.tensor.rank * self.table.shape[0]

    def __call__(self, h: Tensor, batch: Batch, pools: Pools) -> None:
        """Add the n-gram term to the streams h act[M, S, E] in place; advances the history of every sequence, or records what would."""
        rows = ple_hash(batch.context, self.multipliers, self.primes, self.offsets, self.eos)
        e = self.group.sum(ple_gather(rows, self.table, self.row_start))
        history = pools.layers.ple[self.index]
        sequences, keep = (batch.slot, batch.start, batch.rows, batch.fresh), (batch.keep_slot, batch.keep_at)
        c = ple_apply(h, e, *self.weights, self.dilation, history, *sequences, *keep, batch.kind, batch.write, self.eps)
        if batch.record is not None:
            batch.record.ple.append(c)
