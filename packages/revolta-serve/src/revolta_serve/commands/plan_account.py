"""Where the memory of a rank goes: weights, work space, graphs, both pools, and what is left. One account for plan and server."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

from revolta_serve.cache.capacity import Capacity, capacity, pool_layout
from revolta_serve.cache.layout import BLOCK, Layout, Window, blocks_for
from revolta_serve.commands import plan_drafter, plan_files
from revolta_serve.commands.plan_weights import Part, weights
from revolta_serve.commands.plan_work import work_space
from revolta_serve.config import ServeConfig, positions
from revolta_serve.errors import ConfigError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.index import CheckpointIndex

PACK = "weights in a packed format, more ranks (--tensor-parallel-size), fewer --max-num-seqs"
"""Ways out when not even two tokens fit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The account of one rank; all ranks have the same. Bytes unless said otherwise."""

    config: ServeConfig
    """Resolved: max_model_len and, where a device or a budget is stated, cache.memory_bytes are numbers."""
    weights: tuple[Part, ...]
    work: tuple[Part, ...]
    shape: Layout
    window: Window | None
    capacity: Capacity
    unknown: tuple[str, ...]
    """Tensors of the files that belong to no part of the model: they are not counted, and a loader may refuse them."""
    largest: int
    """Tokens of the longest context for which one request fits beside max_num_seqs slots, up to what the checkpoint can address."""

    @property
    def bounded(self) -> bool:
        """Whether bytes or blocks say how large the cache is; else it follows from max_model_len."""
        return bool(self.config.cache.memory_bytes or self.config.cache.num_blocks)

    @property
    def device_weights(self) -> int:
        """Weights that lie with the pools."""
        return sum(part.bytes for part in self.weights if part.place == "device")

    @property
    def host_weights(self) -> int:
        """Weights in pinned host memory."""
        return sum(part.bytes for part in self.weights if part.place == "host")

    @property
    def work_bytes(self) -> int:
        """Work space, estimated."""
        return sum(part.bytes for part in self.work)

    @property
    def reserve(self) -> int:
        """Kept for CUDA graphs."""
        return self.config.cache.reserve_bytes

    @property
    def pool_bytes(self) -> int:
        """Both pools."""
        return self.capacity.kv_bytes + self.capacity.state_bytes

    @property
    def used(self) -> int:
        """Everything on the device."""
        return self.device_weights + self.work_bytes + self.reserve + self.pool_bytes

    @property
    def planned(self) -> int:
        """The part of the device that may be used; 0 without a device."""
        return planned_bytes(self.config)

    @property
    def left(self) -> int | None:
        """What neither pool could use of the planned bytes, or of those given for the pools; None where nothing limits them."""
        if self.planned:
            return self.planned - self.used
        return self.config.cache.memory_bytes - self.pool_bytes if self.config.cache.memory_bytes else None


def planned_bytes(config: ServeConfig) -> int:
    """Bytes of a device that may be used."""
    return math.floor(config.cache.device_bytes * config.cache.utilization)


def account(config: ServeConfig, model: ModelConfig, *, stated: str = "checkpoint", index: CheckpointIndex | None = None) -> Plan:
    """Plan a configuration for a checkpoint directory; nothing is loaded.

    stated: see plan_weights.weights. index: of its weight files, if they are there; without them dimensions and formats are counted.
    Raises ConfigError or CheckpointError for what cannot be, naming what is needed, what there is, and the way out.
    """
    config = config.resolve(model)
    window = plan_drafter.read(config, model).window if config.speculate.method == "dflash" else None
    found = plan_files.survey(index) if index is not None and stated == "checkpoint" else None
    parts = weights(config, model, stated, found)
    shape = pool_layout(config, model, window)
    room = _Room(config, model, parts, shape)
    length = config.schedule.max_model_len
    largest = room.largest(positions(model))
    if not room.fits(length):
        raise room.refusal(largest)
    given = room.bytes(length)
    if given is not None:
        config = replace(config, cache=replace(config.cache, memory_bytes=given))
    unknown = tuple(found.unknown) if found else ()
    plan = Plan(config, parts, work_space(config, model), shape, window, capacity(config, model, window), unknown, largest)
    if plan.planned and plan.used > plan.planned:
        others = plan.used - plan.pool_bytes
        raise ConfigError(
            f"pools of {plan.pool_bytes:,} bytes beside {others:,} of weights, work space and graphs are more than the {plan.planned:,} "
            f"planned of each device; use --kv-cache-memory-bytes {max(0, plan.planned - others)} or less, or neither it nor num_blocks"
        )
    return plan


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes for the pools as a function of max_model_len: work space grows with it."""

    config: ServeConfig
    model: ModelConfig
    weights: tuple[Part, ...]
    shape: Layout

    def bytes(self, length: int) -> int | None:
        """Bytes for both pools; None where their size follows from numbers of blocks."""
        if self.config.cache.memory_bytes:
            return self.config.cache.memory_bytes
        if self.config.cache.num_blocks or not planned_bytes(self.config):
            return None
        return planned_bytes(self.config) - self.others(length)

    def others(self, length: int) -> int:
        """Bytes of a device that go to weights, work space and graphs."""
        changed = replace(self.config, schedule=replace(self.config.schedule, max_model_len=length))
        held = (part for part in (*self.weights, *work_space(changed, self.model)) if part.place == "device")
        return sum(part.bytes for part in held) + self.config.cache.reserve_bytes

    @property
    def slots(self) -> int:
        """The fewest slots."""
        return self.config.cache.num_slots or self.config.schedule.max_num_seqs

    def need(self, length: int) -> int:
        """Bytes of the blocks of one request of so many tokens, and of the fewest slots."""
        return blocks_for(length) * self.shape.block_bytes + self.slots * self.shape.slot_bytes

    def fits(self, length: int) -> bool:
        """Whether one request of so many tokens has room."""
        room = self.bytes(length)
        if room is None:
            return blocks_for(length) <= (self.config.cache.num_blocks or blocks_for(length))
        return self.need(length) <= room

    def largest(self, limit: int) -> int:
        """The longest length that fits, at most `limit`; 0 if not even one token does. What fits shrinks as the length grows."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle - 1)
        return low

    def refusal(self, largest: int) -> ConfigError:
        """What to say when max_model_len does not fit."""
        length, blocks = self.config.schedule.max_model_len, self.config.cache.num_blocks
        room = self.bytes(length)
        if room is None:
            return ConfigError(
                f"schedule.max_model_len={length:,} takes {blocks_for(length)} blocks of {BLOCK} tokens, cache.num_blocks={blocks} are "
                f"there; use --max-model-len {largest} or less, or more blocks"
            )
        shorter = f"--max-model-len {largest} or less" if largest >= 2 else ""
        if self.config.cache.memory_bytes:
            given = "are given with --kv-cache-memory-bytes"
            way = " or ".join(filter(None, (f"at least {self.need(length)}", shorter)))
        else:
            given, way = self._remains(length), shorter or PACK
        return ConfigError(
            f"one request of schedule.max_model_len={length:,} and {self.slots} state slots take {self.need(length):,} bytes of each rank, "
            f"{max(0, room):,} {given}; use {way}"
        )

    def _remains(self, length: int) -> str:
        return (
            f"remain of the {planned_bytes(self.config):,} planned ({self.config.cache.utilization:.0%} of "
            f"{self.config.cache.device_bytes:,}) beside {self.others(length):,} of weights, work space and graphs"
        )


def files(directory: str) -> CheckpointIndex | None:
    """The index of the weight files of a checkpoint directory, None if there are none. Raises CheckpointError for an incomplete set."""
    return CheckpointIndex.open(directory) if any(Path(directory).glob("*.safetensors")) else None
