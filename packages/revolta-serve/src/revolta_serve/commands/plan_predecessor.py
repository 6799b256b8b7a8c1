"""`plan --layout predecessor`: the same bytes divided by the predecessor's rules and by ours.

Its published figures come without the bytes behind them. A budget that makes the rules yield a published figure is *fitted*: any number
within one of its blocks does. Rows of one checkpoint and drafter share a budget where one number fits them all.
"""

from dataclasses import dataclass
from typing import Any, Literal

from revolta_serve.cache.capacity import Capacity, divide
from revolta_serve.cache.layout import Format, Window, layout
from revolta_serve.cache.predecessor import PredecessorCapacity, Setup, predecessor
from revolta_serve.commands.plan_account import Plan
from revolta_serve.model.model_config import ModelConfig

Source = Literal["planned", "fitted"]

LENGTH, SEQUENCES, TENSOR, CONTEXT = 524_288, 8, 4, 2
"""max_model_len, running requests, ranks and ranks of a context of every published figure."""

DIMENSIONS = {"layers": 48, "hidden": 2560, "vocab": 248_320, "experts": 512}
"""What the model of the published figures is told by."""

DRAFTER = Window(layers=5, reach=2048, rows=8, kv_heads=8, head_dim=128)
"""Layers, reach and rows are published; heads are those of the drafter's sibling. A rank's keys and values of a token and layer may be
anything over 512 and up to 1024 bytes without a change to any figure."""


@dataclass(frozen=True, slots=True)
class Published:
    """A configuration with a published figure, and the fitted budget of a rank."""

    name: str
    memory_bytes: int
    kv: Format
    head: Format | None = None
    """Storage of the draft head's keys and values; None: the block drafter drafts."""
    replay: bool = False
    ngram_states: bool = False

    def setup(self) -> Setup:
        """As the predecessor ran it: four drafts of the draft head, or seven of the block drafter."""
        drafts, window = (7, DRAFTER) if self.head is None else (4, None)
        return Setup(
            tensor=TENSOR, context=CONTEXT, kv=self.kv, drafts=drafts, head=self.head, window=window, replay=self.replay,
            ngram_states=self.ngram_states,
        )  # fmt: skip


PUBLISHED = (
    Published("AWQ, E4M3, MTP4, 0.1.0", 5_729_300_000, "fp8_e4m3", "fp8_e4m3", ngram_states=True),
    Published("AWQ, E4M3, MTP4, 0.1.0, NVLink", 5_524_000_000, "fp8_e4m3", "fp8_e4m3", ngram_states=True),
    Published("AWQ, E4M3, MTP4", 5_729_300_000, "fp8_e4m3", "fp8_e4m3"),
    Published("AWQ, FP16, MTP4", 5_734_000_000, "float16", "float16"),
    Published("AWQ, INT8, MTP4", 5_729_300_000, "int8", "int8"),
    Published("NVFP4, E4M3, MTP4", 6_208_000_000, "fp8_e4m3", "fp8_e4m3"),
    Published("FP4-Local, E4M3, MTP4, FP16 draft", 7_320_000_000, "fp8_e4m3", "float16"),
    Published("FP4-Local, E4M3, MTP4", 7_320_000_000, "fp8_e4m3", "fp8_e4m3"),
    Published("AWQ, E4M3, MTP4, n-gram tables on disk", 5_330_000_000, "fp8_e4m3", "fp8_e4m3"),
    Published("AWQ, E4M3, DFlash2, 0.1.2", 6_003_000_000, "fp8_e4m3"),
    Published("AWQ, E4M3, DFlash2, 0.1.2, small graph reserve", 6_840_000_000, "fp8_e4m3"),
    Published("AWQ, FP16, DFlash2", 6_030_000_000, "float16"),
    Published("NVFP4, E4M3, DFlash2", 6_329_000_000, "fp8_e4m3"),
    Published("FP4-Local, E4M3, DFlash2", 6_316_000_000, "fp8_e4m3"),
    Published("AWQ, E4M3, DFlash2, 0.1.3", 6_527_000_000, "fp8_e4m3"),
    Published("AWQ, E4M3, DFlash2, replay", 6_508_000_000, "fp8_e4m3", replay=True),
    Published("AWQ, E4M3, DFlash2, 0.1.2 and replay", 5_984_000_000, "fp8_e4m3", replay=True),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One budget, divided twice."""

    name: str
    memory_bytes: int
    source: Source
    requests: int
    """Requests that run at the same time."""
    theirs: PredecessorCapacity
    ours: Capacity

    def as_json(self) -> dict[str, Any]:
        """Every number of the row."""
        theirs, ours = self.theirs, self.ours
        return {
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "budget": self.source,
            "running_requests": self.requests,
            "max_model_len": theirs.max_model_len,
            "predecessor": {
                "span": theirs.span,
                "page_bytes": theirs.page,
                "block_bytes": theirs.block_bytes,
                "groups": theirs.groups,
                "blocks_per_request": theirs.blocks_per_request,
                "num_blocks": theirs.num_blocks,
                "tokens": theirs.tokens,
                "concurrency": theirs.concurrency,
                "tokens_beside_running_requests": theirs.beside(self.requests),
            },
            "ours": {
                "num_blocks": ours.num_blocks,
                "block_bytes": ours.block_bytes,
                "tokens": ours.tokens,
                "slots": ours.num_slots,
                "slot_bytes": ours.slot_bytes,
                "concurrency": ours.concurrency,
            },
        }


def compare(plan: Plan, model: ModelConfig) -> list[Row]:
    """The planned configuration at its own bytes and, if the model is the one they were published for, every published one."""
    config = plan.config
    dtype: Format = config.model.dtype
    kv: Format = dtype if config.cache.kv_format == "auto" else config.cache.kv_format
    drafting = config.speculate.method != "none"
    setup = Setup(
        tensor=config.parallel.tensor, context=config.parallel.decode_context, kv=kv, drafts=config.speculate.drafts if drafting else 0,
        head=kv if config.speculate.method == "mtp" else None, window=plan.window, step_tokens=config.schedule.max_num_batched_tokens,
    )  # fmt: skip
    length, budget = config.schedule.max_model_len, config.cache.memory_bytes or plan.pool_bytes
    theirs = predecessor(model, setup, max_model_len=length, memory_bytes=budget)
    rows = [Row("this plan", budget, "planned", config.schedule.max_num_seqs, theirs, plan.capacity)]
    if all(getattr(model, name) == size for name, size in DIMENSIONS.items()):
        rows += [_row(published, model, config.cache.index_ranks) for published in PUBLISHED]
    return rows


def _row(published: Published, model: ModelConfig, index: int) -> Row:
    setup, budget = published.setup(), published.memory_bytes
    theirs = predecessor(model, setup, max_model_len=LENGTH, memory_bytes=budget)
    shape = layout(
        model, tensor=TENSOR, context=CONTEXT, dtype="float16", kv=setup.kv, index=index, mtp=setup.head, window=setup.window
    )  # fmt: skip
    ours = divide(shape, max_num_seqs=SEQUENCES, max_model_len=LENGTH, memory_bytes=budget)
    return Row(published.name, budget, "fitted", SEQUENCES, theirs, ours)
