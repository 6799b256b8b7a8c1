"""What the headers of weight files say about memory: stored bytes by group, and the packed groups as a rank will hold them."""

import math
from dataclasses import dataclass, field

from revolta_serve.weights.header import BITS, TensorInfo
from revolta_serve.weights.index import CheckpointIndex

DENSE = ("F64", "F32", "F16", "BF16")
"""Types that are converted to the activation type: a group of nothing else is dense."""

_PLACES = (
    (".ngram_embedding.", "n-gram tables"),
    (".mlp.experts.", "experts"),
    (".mlp.shared_expert", "shared experts"),
    (".mlp.gate.", "router"),
    ("hyper_connection", "hyper-connections"),
    (".ple.", "n-gram layers"),
    (".linear_attn.", "GDN"),
    (".self_attn.", "QSA"),
    ("embed_tokens.", "embedding"),
    ("lm_head.", "lm_head"),
)
"""Part of a tensor's name and the group it then belongs to; the first that fits counts."""

_FIXED, _EXCEPTIONS = ".nvfp4_csf_fixed", ".nvfp4_csf_exceptions"
_UNUSED = ".input_scale"
"""Scales of activations: weight-only products do not read them."""


@dataclass(slots=True)
class Survey:
    """Tensors of a checkpoint by group. Experts of the draft head are a group of their own, `MTP experts`, beside `MTP`."""

    groups: dict[str, dict[str, TensorInfo]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    """Tensors of no group: they take no memory here, and a loader may refuse them."""

    @property
    def kv_scales(self) -> int:
        """Scales of quantised keys and values of the model's layers."""
        return sum(
            name.endswith(("k_scale", "v_scale", "k_proj.output_scale", "v_proj.output_scale")) for name in self.groups.get("QSA", ())
        )

    def stored(self, group: str) -> int:
        """Bytes of a group in the files."""
        names = (group, "MTP experts") if group == "MTP" else (group,)
        return sum(_bytes(info) for name in names for info in self.groups.get(name, {}).values())

    def packed(self, group: str, ranks: int) -> int | None:
        """Bytes of a group on one of `ranks` ranks if it stays in its stored format; None for a group that is dense or absent.

        Scalars are on every rank, everything else is cut. Compressed scales (CSF) are counted as the bytes they expand to, one for
        each scale.
        """
        tensors = self.groups.get(group, {})
        if all(info.dtype in (*DENSE, "I64") for info in tensors.values()):
            return None
        scalars = shared = 0
        for name, info in tensors.items():
            if name.endswith(_FIXED):
                shared += 16 * info.shape[0] * 2 * (info.shape[1] // 16 - 1)
            elif math.prod(info.shape) == 1 and not name.endswith(_UNUSED):
                scalars += _bytes(info)
            elif not name.endswith((_UNUSED, _EXCEPTIONS)):
                shared += _bytes(info)
        return scalars - (-shared // ranks)


def survey(index: CheckpointIndex) -> Survey:
    """Sort the tensors of a checkpoint's files into groups."""
    found = Survey()
    for name, info in index.tensors.items():
        group = _group(name)
        if group:
            found.groups.setdefault(group, {})[name] = info
        else:
            found.unknown.append(name)
    return found


def _group(name: str) -> str:
    if "visual." in name:
        return "vision tower"
    if name.startswith("mtp.") or ".mtp." in name:
        return "MTP experts" if ".mlp.experts." in name else "MTP"
    return next((group for part, group in _PLACES if part in name), "")


def _bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * BITS[info.dtype] // 8
