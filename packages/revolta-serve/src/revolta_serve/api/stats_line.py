"""A line about a busy engine every few seconds, one more when it falls idle, and then silence."""

import asyncio
import logging
import time
from collections.abc import Callable

from revolta_serve.types import EngineStatus

log = logging.getLogger(__name__)


class StatsLine:
    """Compares two looks at the engine."""

    def __init__(self, status: EngineStatus, now: float) -> None:
        """The first look, at `now` seconds of any clock."""
        self._before, self._at = status, now
        self._busy = False

    def line(self, status: EngineStatus, now: float) -> tuple[str, dict[str, object]] | None:
        """The line about the time since the last call, and its values by name; None when nothing went on and that was said before."""
        before, seconds = self._before, max(now - self._at, 1e-9)
        self._before, self._at = status, now
        computed, cached = status.prompt_tokens - before.prompt_tokens, status.prefix_hits - before.prefix_hits
        generated = status.generated_tokens - before.generated_tokens
        busy = bool(status.running or status.waiting or computed or cached or generated)
        said, self._busy = self._busy, busy
        if not busy and not said:
            return None
        queries = status.prefix_queries - before.prefix_queries
        hit = f"{100 * cached / queries:.1f}%" if queries else "none asked"
        preemptions = status.preemptions - before.preemptions
        state = "paused" if status.paused else "busy" if busy else "idle"
        text = (
            f"{state}: prompt {computed / seconds:.1f} tokens/s computed, {cached / seconds:.1f} cached; "
            f"generation {generated / seconds:.1f} tokens/s; running {status.running}, waiting {status.waiting}; "
            f"blocks {_use(status.blocks_used, status.blocks_cached, status.blocks_total)}; "
            f"slots {_use(status.slots_used, status.slots_cached, status.slots_total)}; prefix hits {hit}; preemptions {preemptions}"
        )
        return text, {
            "state": state,
            "seconds": seconds,
            "prompt_tokens": computed,
            "cached_tokens": cached,
            "generated_tokens": generated,
            "running": status.running,
            "waiting": status.waiting,
            "blocks_used": status.blocks_used,
            "blocks_cached": status.blocks_cached,
            "blocks_total": status.blocks_total,
            "slots_used": status.slots_used,
            "slots_cached": status.slots_cached,
            "slots_total": status.slots_total,
            "prefix_queries": queries,
            "preemptions": preemptions,
        }


async def log_stats(status: Callable[[], EngineStatus], interval: float) -> None:
    """Log the line every `interval` seconds until cancelled."""
    stats = StatsLine(status(), time.monotonic())
    while True:
        await asyncio.sleep(interval)
        said = stats.line(status(), time.monotonic())
        if said is not None:
            text, values = said
            log.info(text, extra={"fields": values})


def _use(used: int, cached: int, total: int) -> str:
    return f"{used} + {cached} cached of {total} ({100 * used / total if total else 0:.0f}%)"
