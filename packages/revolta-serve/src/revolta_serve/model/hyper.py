"""Hyper-connections: gated mixing of S residual streams into one block input, and injection of the block's output into all of them."""

from collections.abc import Mapping

from torch import Tensor

from revolta_serve.model.batch import Kind
from revolta_serve.model.model_config import ModelConfig
from sm70kernels import hyper_inject, hyper_mix, hyper_norm


class HyperConnection:
    """The read side (norm, mix) and the write side (inject) around one block. M rows, S streams, E hidden."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], prefix: str) -> None:
        self.norm = weights[f"{prefix}.norm"]
        self.w_in = weights[f"{prefix}.w_in"]
        self.w_up = weights[f"{prefix}.w_up"]
        self.eps = config.eps

    def normalise(self, h: Tensor) -> Tensor:
        """h act[M, S, E] -> its per-stream normalised form, the input of `mix`."""
        normed: Tensor = hyper_norm(h, self.norm, self.eps)
        return normed

    def mix(self, n: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
        """n act[M, S, E] normalised streams -> block input act[M, E] and injection gates f32[M, S] ([M, 0] for the final mixer)."""
        x, gate = hyper_mix(n, self.w_in, self.w_up, kind)
        return x, gate

    @staticmethod
    def inject(h: Tensor, o: Tensor, gate: Tensor, following: "HyperConnection | None", eps: float) -> Tensor | None:
        """Add block output o act[M, E] to every stream of h in place; return h normalised for the following connection, if any."""
        n: Tensor | None = hyper_inject(h, o, gate, following.norm if following else None, eps)
        return n
