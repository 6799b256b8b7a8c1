"""A plan as tables for a terminal."""

from collections.abc import Sequence

from rich.table import Table

from revolta_serve.cache.capacity import size
from revolta_serve.cache.layout import BLOCK
from revolta_serve.commands.plan_account import Plan
from revolta_serve.commands.plan_predecessor import Row
from revolta_serve.commands.plan_text import EXPLAINED, title


def tables(plan: Plan) -> list[Table]:
    """The same account, for a terminal."""
    parts = Table("part", "where", "bytes of a rank", "", title=title(plan), title_justify="left")
    for column in parts.columns[2:]:
        column.justify = "right"

    def row(name: str, place: str, count: int) -> None:
        parts.add_row(name, place, f"{count:,}", size(count))

    for part in plan.weights:
        row(part.name, part.place, part.bytes)
    parts.add_section()
    for part in plan.work:
        row(part.name, "device, estimated", part.bytes)
    row("reserve for graphs", "device", plan.reserve)
    parts.add_section()
    row(f"{plan.capacity.num_blocks:,} blocks of {BLOCK} tokens", "device", plan.capacity.kv_bytes)
    row(f"{plan.capacity.num_slots:,} state slots", "device", plan.capacity.state_bytes)
    if plan.left is not None:
        row("left", "device", plan.left)
    planes = Table("plane", "of a", "layers", "shape", "bytes", title="pools, plane by plane", title_justify="left")
    for kind, held in (("block", plan.shape.block), ("slot", plan.shape.slot)):
        for plane in held:
            planes.add_row(plane.name, kind, str(plane.layers), " x ".join(map(str, plane.shape)), f"{plane.bytes:,}")
    return [parts, planes]


def comparison_table(rows: Sequence[Row]) -> Table:
    """Both layouts for the same bytes, for a terminal."""
    table = Table(
        "configuration", "bytes a rank", "budget", "blocks a request", "blocks", "tokens", "requests", "beside running", "our tokens",
        "slots", "requests", title="predecessor, and ours for the same bytes", title_justify="left",
        caption=EXPLAINED, caption_justify="left",
    )  # fmt: skip
    for row in rows:
        theirs, ours = row.theirs, row.ours
        groups = "+".join(str(count) for count in theirs.groups.values() if count)
        table.add_row(
            row.name, f"{row.memory_bytes:,}", row.source, f"{theirs.blocks_per_request} = {groups}", f"{theirs.num_blocks:,}",
            f"{theirs.tokens:,}", f"{theirs.concurrency:.2f}", f"{theirs.beside(row.requests):,}", f"{ours.tokens:,}",
            str(ours.num_slots), f"{ours.concurrency:.2f}",
        )  # fmt: skip
    return table
