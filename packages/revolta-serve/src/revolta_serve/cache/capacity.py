"""How many token blocks and state slots fit: one pure function of dimensions, formats and bytes, the same for plan and server."""

import math
from dataclasses import dataclass

from revolta_serve.cache.layout import BLOCK, Format, Layout, layout
from revolta_serve.config import ServeConfig
from revolta_serve.errors import ConfigError
from revolta_serve.model.model_config import ModelConfig

USUAL_TOKENS = 8192
"""Context that every running request but one can have beside one of max_model_len when no memory size is given."""

SLOT_SHARE = 0.15
"""Part of the bytes given to slots beyond the running ones: they hold the states that later requests resume from."""


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
        return self.num_blocks / math.ceil(self.max_model_len / BLOCK)

    def describe(self) -> str:
        """Two lines for the start of a server.

        What is left beside one request of max_model_len matters as much as how many fit: requests without a limit share it while the
        oldest of them may still grow to that length.
        """
        beside = self.tokens - math.ceil(self.max_model_len / BLOCK) * BLOCK
        return (
            f"cache: {self.num_blocks:,} blocks of {BLOCK} tokens = {self.tokens:,} tokens ({_size(self.kv_bytes)}), "
            f"{self.num_slots:,} state slots of {_size(self.slot_bytes)} ({_size(self.state_bytes)}) on each rank\n"
            f"cache: {self.concurrency:.2f} requests of {self.max_model_len:,} tokens at the same time, "
            f"or one of them and {beside:,} tokens of others"
        )


def capacity(config: ServeConfig, model: ModelConfig) -> Capacity:
    """The pools of a resolved configuration.

    Raises ConfigError when they cannot hold one request of max_model_len or the states of max_num_seqs requests.
    """
    dtype: Format = config.model.dtype
    shape = layout(model, tensor=config.parallel.tensor, context=config.parallel.decode_context, dtype=dtype, kv=dtype)
    return plan(
        shape,
        max_num_seqs=config.schedule.max_num_seqs,
        max_model_len=config.schedule.max_model_len,
        memory_bytes=config.cache.memory_bytes,
        num_blocks=config.cache.num_blocks,
        num_slots=config.cache.num_slots,
    )


def plan(
    shape: Layout, *, max_num_seqs: int, max_model_len: int, memory_bytes: int = 0, num_blocks: int = 0, num_slots: int = 0
) -> Capacity:
    """Divide memory_bytes between blocks and slots; 0 stands for a number to be found.

    Slots default to 2·max_num_seqs + floor(0.15 · bytes / slot bytes). When that leaves too few blocks for one request of
    max_model_len, slots shrink, but never below max_num_seqs. Without memory_bytes the bytes are those of num_blocks or, without
    that too, of enough blocks for one request of max_model_len and max_num_seqs - 1 of min(max_model_len, 8192) tokens.
    """
    block, slot = shape.block_bytes, shape.slot_bytes
    longest = math.ceil(max_model_len / BLOCK)
    if not memory_bytes or not block:  # a model without attention layers has blocks of no bytes: as many as could be used
        wanted = num_blocks or longest + (max_num_seqs - 1) * math.ceil(min(max_model_len, USUAL_TOKENS) / BLOCK)
        slots = num_slots or _default_slots(_bytes_for(wanted * block, slot, max_num_seqs), slot, max_num_seqs)
        return _checked(Capacity(wanted, slots, block, slot, max_model_len), longest)
    slots = num_slots or max(max_num_seqs, min(_default_slots(memory_bytes, slot, max_num_seqs), (memory_bytes - longest * block) // slot))
    blocks = (memory_bytes - slots * slot) // block
    if blocks < longest:
        tokens = max(0, blocks) * BLOCK
        raise ConfigError(
            f"cache.memory_bytes={memory_bytes:,} holds {tokens:,} tokens beside {slots} state slots, less than "
            f"schedule.max_model_len={max_model_len:,}; use at least {longest * block + slots * slot:,} bytes"
            + (f" or max_model_len={tokens}" if tokens >= 2 else "")
        )
    return Capacity(blocks, slots, block, slot, max_model_len)


def _default_slots(memory: int, slot: int, max_num_seqs: int) -> int:
    return 2 * max_num_seqs + math.floor(SLOT_SHARE * memory / slot)


def _bytes_for(blocks: int, slot: int, max_num_seqs: int) -> int:
    """The budget of which `blocks` bytes remain after the default number of slots."""
    return math.ceil((blocks + 2 * max_num_seqs * slot) / (1 - SLOT_SHARE))


def _checked(result: Capacity, longest: int) -> Capacity:
    if result.num_blocks < longest:
        raise ConfigError(
            f"cache.num_blocks={result.num_blocks} holds {result.tokens} tokens, less than schedule.max_model_len={result.max_model_len}; "
            f"use at least {longest} blocks or max_model_len={result.tokens}"
        )
    return result


def _size(count: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
