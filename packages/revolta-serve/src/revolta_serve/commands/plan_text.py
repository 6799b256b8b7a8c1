"""A plan in lines, which a server prints at start too, and as JSON with the same numbers."""

from collections.abc import Iterable, Sequence
from typing import Any

from revolta_serve.cache.capacity import size
from revolta_serve.cache.layout import BLOCK, Plane
from revolta_serve.commands.plan_account import Plan
from revolta_serve.commands.plan_predecessor import Row
from revolta_serve.commands.plan_weights import Part
from revolta_serve.weights.index import some

EXPLAINED = (
    "The predecessor's tokens are the requests of full length that fit, states included, times their length; ours are the tokens of all "
    "blocks, beside slots for the states. What its blocks hold beside running requests is the same count as ours."
)


def lines(plan: Plan) -> list[str]:
    """The account of a rank, a line for each part of the memory."""
    capacity, host = plan.capacity, [part for part in plan.weights if part.place == "host"]
    text = [
        f"plan: {title(plan)}",
        f"plan: weights {size(plan.device_weights)}: {_listed(part for part in plan.weights if part.place == 'device')}",
        f"plan: work space {size(plan.work_bytes)}, estimated: {_listed(plan.work)}",
    ]
    if host:
        text.insert(2, f"plan: in host memory {size(plan.host_weights)}: {_listed(host)}")
    if plan.reserve:
        text.append(f"plan: reserve for graphs {size(plan.reserve)}")
    text += [
        f"cache: a block is {size(capacity.block_bytes)}: {_planes(plan.shape.block)}",
        f"cache: a slot is {size(capacity.slot_bytes)}: {_planes(plan.shape.slot)}",
        *capacity.describe().splitlines(),
        f"cache: the longest context that fits is {plan.largest:,} tokens" + ("" if plan.bounded else ", with a cache of that size"),
    ]
    if plan.planned:
        text.append(_device(plan))
    if plan.unknown:
        text.append(f"plan: not counted, of no known part: {some(list(plan.unknown))}")
    return text


def comparison_lines(rows: Sequence[Row]) -> list[str]:
    """Both layouts for the same bytes, three lines a configuration."""
    text = [EXPLAINED] if rows else []
    for row in rows:
        theirs, ours = row.theirs, row.ours
        groups = " + ".join(f"{count} {name}" for name, count in theirs.groups.items() if count)
        text += [
            f"{row.name}: {row.memory_bytes:,} bytes a rank ({row.source}), {theirs.max_model_len:,} tokens a request",
            f"  predecessor: {theirs.tokens:,} tokens, {theirs.concurrency:.2f} requests; {theirs.num_blocks:,} blocks of {theirs.span:,} "
            f"tokens, {theirs.blocks_per_request} a request = {groups}; {theirs.beside(row.requests):,} tokens beside {row.requests} "
            "running requests",
            f"  ours: {ours.tokens:,} tokens beside {ours.num_slots} slots, {ours.concurrency:.2f} requests; {ours.num_blocks:,} blocks of "
            f"{BLOCK} tokens",
        ]
    return text


def as_json(plan: Plan) -> dict[str, Any]:
    """Every number of the account, in bytes of one rank unless the name says otherwise."""
    config, capacity = plan.config, plan.capacity
    return {
        "model": config.model.path,
        "ranks": config.parallel.tensor,
        "context_ranks": config.parallel.decode_context,
        "index_ranks": config.cache.index_ranks,
        "dtype": config.model.dtype,
        "kv_format": config.cache.kv_format,
        "speculation": config.speculate.method,
        "drafts": config.speculate.width - 1,
        "max_num_seqs": config.schedule.max_num_seqs,
        "max_model_len": config.schedule.max_model_len,
        "device": {
            "bytes": config.cache.device_bytes,
            "utilization": config.cache.utilization,
            "planned_bytes": plan.planned,
            "used_bytes": plan.used,
            "left_bytes": plan.left,
        },
        "weights": [
            {"part": part.name, "bytes": part.bytes, "place": part.place, "stored_bytes_of_all_ranks": part.stored} for part in plan.weights
        ],
        "work_space_estimated": [{"part": part.name, "bytes": part.bytes} for part in plan.work],
        "graph_reserve_bytes": plan.reserve,
        "pool_budget_bytes": config.cache.memory_bytes,
        "blocks": {
            "tokens_each": BLOCK,
            "count": capacity.num_blocks,
            "bytes_each": capacity.block_bytes,
            "bytes": capacity.kv_bytes,
            "planes": [_plane_json(plane) for plane in plan.shape.block],
        },
        "slots": {
            "count": capacity.num_slots,
            "bytes_each": capacity.slot_bytes,
            "bytes": capacity.state_bytes,
            "planes": [_plane_json(plane) for plane in plan.shape.slot],
        },
        "tokens": capacity.tokens,
        "concurrency": capacity.concurrency,
        "largest_context": plan.largest,
        "tensors_not_counted": list(plan.unknown),
    }


def title(plan: Plan) -> str:
    """What is planned: ranks, formats, drafts."""
    config = plan.config
    model, parallel, cache, speculate = config.model, config.parallel, config.cache, config.speculate
    words = [f"{config.served_names[0]}, {parallel.tensor} rank{'s' if parallel.tensor > 1 else ''}"]
    if parallel.decode_context > 1:
        words.append(f"{parallel.decode_context} of them share a context")
    words.append(f"{model.dtype}, keys and values {model.dtype if cache.kv_format == 'auto' else cache.kv_format}")
    if cache.index_ranks > 1:
        words.append(f"index keys shared by {cache.index_ranks}")
    words.append("no drafts" if speculate.method == "none" else f"{speculate.method} with {speculate.drafts} drafts")
    return ", ".join(words)


def _device(plan: Plan) -> str:
    cache = plan.config.cache
    return (
        f"plan: device {size(cache.device_bytes)}, planned {cache.utilization:.1%} = {size(plan.planned)}: used {size(plan.used)}, "
        f"left {size(plan.left or 0)}; {size(cache.device_bytes - plan.planned)} for the driver and its libraries"
    )


def _listed(parts: Iterable[Part]) -> str:
    return ", ".join(f"{part.name} {size(part.bytes)}" for part in sorted(parts, key=lambda part: -part.bytes))


def _planes(planes: Iterable[Plane]) -> str:
    return ", ".join(f"{plane.name} {plane.bytes:,}" for plane in planes) + " bytes"


def _plane_json(plane: Plane) -> dict[str, Any]:
    return {
        "name": plane.name,
        "layers": plane.layers,
        "shape": list(plane.shape),
        "element_bytes": plane.element,
        "bytes": plane.bytes,
    }
