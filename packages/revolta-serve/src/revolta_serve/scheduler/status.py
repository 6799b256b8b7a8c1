"""The scheduler's counts and gauges, as the rest of the server sees them."""

from collections.abc import Collection
from dataclasses import asdict, dataclass

from revolta_serve.scheduler.request import Request
from revolta_serve.scheduler.storage import Storage
from revolta_serve.scheduler.waiting import Waiting
from revolta_serve.types import EngineStatus

LEFT_OUT = 20
"""Steps in a row without a row after which a running request shows as stalled."""


@dataclass(slots=True)
class Counts:
    """What has happened since the start; EngineStatus says what each is."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    replayed_tokens: int = 0
    preemptions: int = 0
    preemptions_in_prefill: int = 0
    corrupted: int = 0


def status(storage: Storage, waiting: Waiting, running: Collection[Request], counts: Counts) -> EngineStatus:
    """A look at a scheduler's parts."""
    cache = storage.cache
    return EngineStatus(
        running=len(running),
        waiting=len(waiting),
        waiting_for_prefix=sum(storage.is_coming(request.waits_for) for request in waiting) if len(waiting) else 0,
        stalled=sum(request.skipped >= LEFT_OUT for request in running),
        blocks_used=cache.num_held,
        blocks_cached=cache.index.num_loose,
        blocks_total=cache.blocks.size,
        slots_used=cache.slots.size - cache.slots.num_free - len(cache.snapshots),
        slots_cached=len(cache.snapshots),
        slots_total=cache.slots.size,
        prefix_queries=storage.prefix_queries,
        prefix_hits=storage.prefix_hits,
        generated_hits=storage.generated_hits,
        misses=dict(storage.misses),
        rolling_lost=storage.rolling_lost,
        snapshots_stored=storage.snapshots_stored,
        snapshots_skipped=storage.snapshots_skipped,
        snapshots_evicted=cache.snapshots_evicted,
        blocks_evicted=cache.blocks_evicted,
        blocks_deduplicated=cache.blocks_deduplicated,
        block_ages=cache.times.ages() if cache.times else {},
        **asdict(counts),
    )
