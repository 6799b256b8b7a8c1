"""Dense projections: one entry, two routes by slice kind."""

from torch import Tensor

from revolta_serve.model.batch import Kind
from sm70kernels import linear_prefill, linear_skinny


def project(x: Tensor, weight: Tensor, kind: Kind) -> Tensor:
    """x act[M, K] · weight act[N, K]ᵀ -> act[M, N] by the decode or the prefill route."""
    return linear_skinny(x, weight) if kind == "decode" else linear_prefill(x, weight)
