"""Gated DeltaNet layer: short convolution, gated delta rule, gated norm."""

from collections.abc import Mapping

from torch import Tensor

from revolta_serve.model.batch import Batch
from revolta_serve.model.linear import project
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.model.pools import Pools
from revolta_serve.parallel.groups import Groups
from sm70kernels import gated_rms_norm, gdn_conv, gdn_prefill, gdn_step


class GatedDeltaNet:
    """Heads of this rank only. HV value heads of V, HK key heads of K; C = 2·HK·K + HV·V convolved channels (q | k | v)."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], layer: int, groups: Groups) -> None:
        prefix = f"layers.{layer}.gdn"
        self.in_proj = weights[f"{prefix}.in_proj"]
        self.conv = weights[f"{prefix}.conv"]
        self.a_log = weights[f"{prefix}.A_log"]
        self.dt_bias = weights[f"{prefix}.dt_bias"]
        self.norm = weights[f"{prefix}.norm"]
        self.out_proj = weights[f"{prefix}.out_proj"]
        self.group = groups.tensor
        self.index = config.layer_types[:layer].count("gdn")
        self.gate, self.eps = config.output_gate, config.eps
        self.heads, self.value_dim = self.a_log.shape[0], config.gdn_value_dim
        self.channels = self.conv.shape[0]

    def __call__(self, x: Tensor, batch: Batch, pools: Pools) -> Tensor:
        """x act[M, E] -> act[M, E]; advances the convolution window and the state of every sequence, or records what would."""
        heads, channels = self.heads, self.channels
        values = heads * self.value_dim
        qkv, z, b, a = project(x, self.in_proj, batch.kind).split_with_sizes((channels, values, heads, heads), 1)
        sequences, keep = (batch.slot, batch.start, batch.rows, batch.fresh), (batch.keep_slot, batch.keep_at)
        y = gdn_conv(qkv, self.conv, pools.layers.conv[self.index], *sequences, *keep, batch.kind, batch.write)
        state = pools.layers.gdn[self.index]
        if batch.kind == "decode":
            n = batch.slot.shape[0]
            inputs = (y.view(n, -1, channels), a.view(n, -1, heads), b.view(n, -1, heads))
            o = gdn_step(*inputs, self.a_log, self.dt_bias, state, batch.slot, batch.rows, batch.write).flatten(0, 1)
        else:
            o = gdn_prefill(y, a, b, self.a_log, self.dt_bias, state, *sequences, *keep)
        if batch.record is not None:
            batch.record.conv.append(qkv)
            batch.record.qkv.append(y)
            batch.record.a.append(a)
            batch.record.b.append(b)
        o = gated_rms_norm(o, z.unflatten(1, (heads, self.value_dim)), self.norm, self.eps, self.gate)
        return self.group.sum(project(o.flatten(1), self.out_proj, batch.kind))
