"""Mixture of experts: top-k of many small gated units, and one shared unit for every token."""

from collections.abc import Mapping

from torch import Tensor

from revolta_serve.model.batch import Kind
from revolta_serve.model.linear import project
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.parallel.groups import Groups
from sm70kernels import moe_gemm, moe_qpn, moe_route


class MixtureOfExperts:
    """The router is replicated; every expert is sliced over the tensor group along its inner width."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], layer: int, groups: Groups) -> None:
        prefix = f"layers.{layer}.moe"
        self.router = weights[f"{prefix}.router"]
        names = ("w13", "w2", "shared13", "shared2", "shared_gate")
        self.bank = tuple(weights[f"{prefix}.{name}"] for name in names)
        self.topk = config.experts_per_token
        self.group = groups.tensor

    def __call__(self, x: Tensor, kind: Kind) -> Tensor:
        """x act[M, E] -> act[M, E]: experts weighted by the softmax over the kept router logits, plus the gated shared expert."""
        ids, weights = moe_route(project(x, self.router, kind), self.topk)
        experts = moe_qpn if kind == "decode" else moe_gemm
        return self.group.sum(experts(x, ids, weights, *self.bank))
