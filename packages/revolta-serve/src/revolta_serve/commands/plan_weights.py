"""What the weights of a rank take, group by group: from the headers of weight files where there are some, else from dimensions.

Dense tensors are kept in the activation type whatever they are stored in (FP8 and MXFP8 projections expand on load), so their bytes
follow from the table of weights/names.py. Expert banks and n-gram tables stay in their packed format. Imports no torch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from revolta_serve.cache.layout import ELEMENT_BYTES
from revolta_serve.commands import plan_drafter, plan_files, plan_vision
from revolta_serve.config import ServeConfig
from revolta_serve.errors import CheckpointError, ConfigError
from revolta_serve.model.fields import Fields, read_json
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.index import CheckpointIndex
from revolta_serve.weights.names import Parameter, parameters

Place = Literal["device", "host"]
Packing = Literal["dense", "int4_g32", "fp8", "nvfp4"]
"""Storage of expert banks (fp8: blocks of 128 x 128) and n-gram tables (fp8: one scale)."""

GROUPS = (
    "embedding", "lm_head", "n-gram tables", "n-gram layers", "GDN", "QSA", "hyper-connections", "experts", "shared experts", "router",
    "vision tower", "MTP", "drafter",
)  # fmt: skip
TILE = 128
"""Rows and columns of a block of FP8 weights that share a scale."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes memory on every rank."""

    name: str
    bytes: int
    """On one rank; ranks that get less have as much reserved."""
    place: Place = "device"
    stored: int = 0
    """Bytes in the checkpoint's files, of all ranks together; 0 when there are no files."""


@dataclass(frozen=True, slots=True)
class Packings:
    """How the packed groups of a checkpoint are stored."""

    experts: Packing
    tables: Packing
    draft_experts: Packing


STATED = {
    "dense": Packings("dense", "dense", "dense"),
    "awq-g32": Packings("int4_g32", "fp8", "fp8"),
    "nvfp4": Packings("nvfp4", "fp8", "fp8"),
    "fp4-local": Packings("nvfp4", "nvfp4", "nvfp4"),
}
"""Formats that can be stated for a checkpoint whose weight files are not there."""


def weights(config: ServeConfig, model: ModelConfig, stated: str, found: plan_files.Survey | None) -> tuple[Part, ...]:
    """The groups of a rank that are not empty, in the order of GROUPS.

    stated: a key of STATED, or "checkpoint" for what the files `found` or, without any, config.json say.
    Raises ConfigError for a format that cannot be cut over the ranks or is not known, CheckpointError for files without what the
    configuration asks for.
    """
    where = Path(config.model.path)
    raw = read_json(where / "config.json")
    packings = STATED.get(stated) or (STATED["dense"] if found else _announced(model, Fields(raw, str(where / "config.json"))))
    ranks, act = config.parallel.tensor, ELEMENT_BYTES[config.model.dtype]
    sizes = dict.fromkeys(GROUPS, 0)
    for parameter in parameters(model, 0, ranks):
        group = group_of(parameter.name)
        if group not in ("experts", "n-gram tables") and not parameter.optional:
            sizes[group] += parameter.nbytes(act)
    sizes["QSA"] += 4 * (found.kv_scales if found else _kv_scales(config) * model.layer_types.count("qsa"))
    banks, tables = (found.packed(name, ranks) if found else None for name in ("experts", "n-gram tables"))
    sizes["experts"] = banks or model.layers * bank_bytes(model, ranks, packings.experts, act)
    sizes["n-gram tables"] = tables or sum(table_bytes(model, layer, ranks, packings.tables, act) for layer in model.ple_layers)
    if config.model.vision:
        shape = plan_vision.read(raw, model, str(where / "config.json"))
        sizes["vision tower"] = plan_vision.vision_bytes(shape, ranks, act)
    if config.speculate.method == "mtp":
        own = found if not config.speculate.drafter or not found else plan_files.survey(CheckpointIndex.open(config.speculate.drafter))
        sizes["MTP"] = _draft_head(config, model, packings, own, act)
    elif config.speculate.method == "dflash":
        sizes["drafter"] = plan_drafter.drafter_bytes(plan_drafter.read(config, model), model, ranks, act)
    return tuple(
        Part(name, size, config.model.ngram_tables if name == "n-gram tables" else "device", found.stored(name) if found else 0)
        for name, size in sizes.items()
        if size
    )


def group_of(parameter: str) -> str:
    """The group of a parameter of weights/names.py."""
    if parameter in ("embed", "lm_head"):
        return "embedding" if parameter == "embed" else "lm_head"
    if parameter.startswith("mixer.") or "_hyper." in parameter:
        return "hyper-connections"
    _, _, module, field = parameter.split(".")
    if module == "moe":
        return "experts" if field in ("w13", "w2") else "router" if field == "router" else "shared experts"
    if module == "ple":
        return "n-gram tables" if field == "table" else "n-gram layers"
    return {"gdn": "GDN", "qsa": "QSA"}[module]


def bank_bytes(model: ModelConfig, ranks: int, packing: Packing, act: int) -> int:
    """Bytes of a rank's share of the routed experts of one layer: gate, up and down projections cut along the inner width.

    int4_g32: 4-bit codes, a float16 scale and a 4-bit zero point for 32 inputs. nvfp4: 4-bit codes, an E4M3 scale for 16 inputs, a
    float32 scale for each projection. fp8: codes, a float32 scale for every 128 x 128 block that the share touches.
    Raises ConfigError when a group of inputs of the down projection would lie on two ranks.
    """
    x, e, held = model.experts, model.hidden, model.expert_width // ranks
    values = 3 * x * held * e
    if packing == "dense":
        return values * act
    if packing == "fp8":
        touched = max(((r + 1) * held - 1) // TILE - r * held // TILE + 1 for r in range(ranks))
        return values + 3 * x * touched * math.ceil(e / TILE) * 4
    group = 32 if packing == "int4_g32" else 16
    if held % group or e % group:
        raise ConfigError(
            f"parallel.tensor={ranks} cuts the experts' width {model.expert_width} into {held}, not a multiple of the {group} inputs "
            f"that share a scale in {packing}; use --tensor-parallel-size {_divided(model.expert_width, group, ranks)}",
            param="parallel.tensor",
        )
    groups = values // group
    return values // 2 + (groups * 2 + groups // 2 if packing == "int4_g32" else groups + 3 * x * 4)


def table_bytes(model: ModelConfig, layer: int, ranks: int, packing: Packing, act: int) -> int:
    """Bytes of a rank's rows of the n-gram table of a layer. fp8: one scale for all. nvfp4: an E4M3 scale for 16 values, one for all."""
    rows, width = -(-model.ngram_rows(layer) // ranks), model.ngram_width
    if packing == "nvfp4":
        return rows * (width // 2 + math.ceil(width / 16)) + 4
    return rows * width + 2 if packing == "fp8" else rows * width * act


def head_parameters(model: ModelConfig, ranks: int) -> Iterator[Parameter]:
    """Parameters of a rank's draft head: a sparse-attention layer with experts and the final mixing, as the model's own."""
    one = replace(model, layers=1, layer_types=("qsa",), ple_layers=())
    yield from (parameter for parameter in parameters(one, 0, ranks) if parameter.name not in ("embed", "lm_head"))


def _draft_head(config: ServeConfig, model: ModelConfig, packings: Packings, found: plan_files.Survey | None, act: int) -> int:
    """Bytes of a rank's draft head: its layer, two norms, two projections of the hidden width; embedding and lm_head are the model's."""
    ranks, packing, banks, scales = config.parallel.tensor, packings.draft_experts, None, _kv_scales(config)
    if found:
        if not found.stored("MTP"):
            raise CheckpointError(
                f"{config.speculate.drafter or config.model.path}: its files hold no draft head (mtp.*), which speculate.method=mtp needs; "
                "name a directory that has one with --set speculate.drafter=DIR, or say --speculation none"
            )
        packing, banks = "dense", found.packed("MTP experts", ranks)
    held = sum(p.nbytes(act) for p in head_parameters(model, ranks) if group_of(p.name) != "experts" and not p.optional)
    inputs = (model.hidden + model.streams * model.hidden + 2 * model.hidden * model.hidden) * act
    return held + inputs + 4 * scales + (banks or bank_bytes(model, ranks, packing, act))


def _kv_scales(config: ServeConfig) -> int:
    """Scales of a layer's keys and values: one each where they are E4M3."""
    return 2 if config.cache.kv_format == "fp8_e4m3" else 0


def _announced(model: ModelConfig, top: Fields) -> Packings:
    """The packings that config.json announces. Raises ConfigError for a method this plan has no formula for."""
    tables: Packing = {None: "dense", "float8_e4m3fn": "fp8", "nvfp4": "nvfp4"}[model.ple_storage]  # type: ignore[assignment]
    if model.quantization is None:
        return Packings("dense", tables, "dense")
    text = top.below("text_config")
    details = (top if top.has("quantization_config") else text).below("quantization_config").raw
    if model.quantization == "awq" and (details.get("bits", 4), details.get("group_size", 32)) == (4, 32):
        return Packings("int4_g32", tables, "dense")
    if model.quantization.startswith("modelopt") and "FP4" in str(details):
        return Packings("nvfp4", "fp8" if model.ple_storage is None else tables, "fp8")
    raise ConfigError(
        f"{top.file}: quantization_config {model.quantization} with {details.get('bits', '?')} bits in groups of "
        f"{details.get('group_size', '?')} is none of {', '.join(STATED)}; state the nearest with --weights, or download the weight files",
        param="quantization_config",
    )


def _divided(width: int, group: int, ranks: int) -> int:
    """The largest divisor of `ranks` that cuts a width into multiples of `group`; 1 if there is none."""
    return max((n for n in range(1, ranks) if ranks % n == 0 and width % (n * group) == 0), default=1)
