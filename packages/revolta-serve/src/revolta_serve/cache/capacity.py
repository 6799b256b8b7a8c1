"""How many token blocks and state slots fit: one pure function of dimensions, formats and bytes, the same for plan and server."""

from dataclasses import dataclass

from revolta_serve.cache.layout import BLOCK, Format, Layout, Window, blocks_for, layout
from revolta_serve.config import ServeConfig
from revolta_serve.errors import ConfigError
from revolta_serve.model.model_config import ModelConfig

USUAL_TOKENS = 8192
"""Context that every running request but one can have beside one of max_model_len when no memory size is given."""

SLOT_PERCENT = 15
"""Part of the bytes set aside for slots beyond the running ones: they hold the states that later requests resume from."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Both pools of one rank. Every rank has the same numbers of blocks and slots."""

    num_blocks: int
    num_slots: int
    block_bytes: int
    slot_bytes: int
    max_model_len: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of all token blocks on a rank."""
        return self.num_blocks * self.block_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of all state slots on a rank."""
        return self.num_slots * self.slot_bytes

    @property
    def tokens(self) -> int:
        """Tokens of context the blocks hold; ranks that share a context hold them together."""
        return self.num_blocks * BLOCK

    @property
    def concurrency(self) -> float:
        """Requests of max_model_len tokens that fit at the same time."""
        return self.num_blocks / blocks_for(self.max_model_len)

    def describe(self) -> str:
        """Two lines for the start of a server.

        What is left beside one request of max_model_len matters as much as how many fit: requests without a limit share it while the
        oldest of them may still grow to that length.
        """
        beside = self.tokens - blocks_for(self.max_model_len) * BLOCK
        return (
            f"cache: {self.num_blocks:,} blocks of {BLOCK} tokens = {self.tokens:,} tokens ({size(self.kv_bytes)}), "
            f"{self.num_slots:,} state slots of {size(self.slot_bytes)} ({size(self.state_bytes)}) on each rank\n"
            f"cache: {self.concurrency:.2f} requests of {self.max_model_len:,} tokens at the same time, "
            f"or one of them and {beside:,} tokens of others"
        )


def pool_layout(config: ServeConfig, model: ModelConfig, window: Window | None = None) -> Layout:
    """What a block and a slot of this configuration hold. window: of the drafter when config.speculate asks for one with a window."""
    dtype: Format = config.model.dtype
    kv: Format = dtype if config.cache.kv_format == "auto" else config.cache.kv_format
    return layout(
        model,
        tensor=config.parallel.tensor,
        context=config.parallel.decode_context,
        dtype=dtype,
        kv=kv,
        index=config.cache.index_ranks,
        mtp=kv if config.speculate.method == "mtp" else None,
        window=window,
    )


def capacity(config: ServeConfig, model: ModelConfig, window: Window | None = None) -> Capacity:
    """The pools of a resolved configuration.

    Raises ConfigError when they cannot hold one request of max_model_len or the states of max_num_seqs requests.
    """
    return divide(
        pool_layout(config, model, window),
        max_num_seqs=config.schedule.max_num_seqs,
        max_model_len=config.schedule.max_model_len,
        memory_bytes=config.cache.memory_bytes,
        num_blocks=config.cache.num_blocks,
        num_slots=config.cache.num_slots,
    )


def divide(
    shape: Layout, *, max_num_seqs: int, max_model_len: int, memory_bytes: int = 0, num_blocks: int = 0, num_slots: int = 0
) -> Capacity:
    """Divide memory_bytes between blocks and slots; 0 stands for a number to be found.

    Slots default to 2·max_num_seqs + floor(0.15 · bytes / slot bytes). Blocks take nothing of those 15%, not even what is left of a
    slot, so that more bytes never mean fewer tokens. When that leaves too few blocks for one request of max_model_len, slots shrink,
    but never below max_num_seqs. Without memory_bytes the bytes are those of num_blocks or, without that too, of enough blocks for
    one request of max_model_len and max_num_seqs - 1 of min(max_model_len, 8192) tokens.
    Raises ConfigError, naming what is there, what is needed and the way out, when one request of max_model_len does not fit.
    """
    block, slot = shape.block_bytes, shape.slot_bytes
    longest, running = blocks_for(max_model_len), 2 * max_num_seqs * slot
    if not memory_bytes or not block:  # a model without attention layers has blocks of no bytes: as many as could be used
        wanted = num_blocks or longest + (max_num_seqs - 1) * blocks_for(min(max_model_len, USUAL_TOKENS))
        total = -(-(wanted * block + running) * 100 // (100 - SLOT_PERCENT))
        slots = num_slots or 2 * max_num_seqs + total * SLOT_PERCENT // 100 // slot
        return _checked(Capacity(wanted, slots, block, slot, max_model_len), longest)
    if num_slots:
        slots, blocks = num_slots, (memory_bytes - num_slots * slot) // block
    else:
        share = memory_bytes * SLOT_PERCENT // 100
        slots, blocks = 2 * max_num_seqs + share // slot, (memory_bytes - running - share) // block
        if blocks < longest:
            slots = max(max_num_seqs, min(slots, (memory_bytes - longest * block) // slot))
            blocks = min(longest, (memory_bytes - slots * slot) // block)
    if blocks < longest:
        tokens = max(0, blocks) * BLOCK
        raise ConfigError(
            f"{memory_bytes:,} bytes for the pools of a rank hold {tokens:,} tokens beside {slots} state slots of {slot:,} bytes, less "
            f"than schedule.max_model_len={max_model_len:,}, which needs {longest * block + slots * slot:,} bytes; "
            + (f"use --max-model-len {tokens} or less, or more bytes" if tokens >= 2 else "use more bytes")
        )
    return Capacity(blocks, slots, block, slot, max_model_len)


def _checked(result: Capacity, longest: int) -> Capacity:
    if result.num_blocks < longest:
        raise ConfigError(
            f"cache.num_blocks={result.num_blocks} holds {result.tokens:,} tokens, less than schedule.max_model_len="
            f"{result.max_model_len:,}; use at least {longest} blocks or --max-model-len {result.tokens}"
        )
    return result


def size(count: int) -> str:
    """Bytes for a reader: in the largest binary unit of which there is at least one."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
