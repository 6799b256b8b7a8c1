"""The engine's counts as metrics: what /metrics shows of an EngineStatus, read when it is asked for."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from revolta_serve.memory import resident_bytes
from revolta_serve.types import BLOCK_AGES, BlockAges, EngineStatus, MissReason

GAUGES: tuple[tuple[str, str, str], ...] = (
    ("num_requests_running", "Requests that are being computed.", "running"),
    ("num_requests_waiting", "Requests in the queue.", "waiting"),
    ("scheduler_stalled_requests", "Running requests that have been left out of many steps in a row.", "stalled"),
    ("engine_paused", "1 while no request may start, else 0.", "paused"),
    ("kv_blocks", "Token blocks.", "blocks_total"),
    ("kv_blocks_used", "Token blocks that running requests hold.", "blocks_used"),
    ("kv_blocks_cached", "Token blocks nobody holds whose content can be reused.", "blocks_cached"),
    ("state_slots", "State slots.", "slots_total"),
    ("state_slots_used", "State slots of running requests, their rolling snapshots included.", "slots_used"),
    ("state_slots_cached", "State slots that hold snapshots.", "slots_cached"),
)
"""(name, help, field of EngineStatus)."""

COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("engine_steps", "Steps computed.", "steps"),
    ("engine_step_seconds", "Seconds of steps in the model.", "step_seconds"),
    ("engine_host_seconds", "Seconds between steps while there was work.", "host_seconds"),
    ("prompt_tokens", "Prompt rows computed, recomputation included.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generated_tokens"),
    ("replayed_tokens", "Answer rows computed again after a preemption.", "replayed_tokens"),
    ("prefix_cache_queries", "Prompt tokens of started requests that looked for reusable work.", "prefix_queries"),
    ("prefix_cache_hits", "Prompt tokens whose computation was reused.", "prefix_hits"),
    ("prefix_cache_generated_hits", "Requests that reused states over generated text.", "generated_hits"),
    ("num_preemptions", "Running requests that had to give up what they held.", "preemptions"),
    ("num_preemptions_in_prefill", "Those of them whose prompt was not computed yet.", "preemptions_in_prefill"),
    ("rolling_snapshots_lost", "Preempted requests whose rolling snapshot was evicted before they resumed.", "rolling_lost"),
    ("snapshots_stored", "State snapshots stored.", "snapshots_stored"),
    ("snapshots_skipped", "State snapshots that found no slot.", "snapshots_skipped"),
    ("snapshots_evicted", "State snapshots evicted.", "snapshots_evicted"),
    ("kv_blocks_evicted", "Cached token blocks evicted.", "blocks_evicted"),
    ("kv_blocks_deduplicated", "Token blocks freed because their content was there already.", "blocks_deduplicated"),
    ("corrupted_requests", "Requests that ended because no token could be drawn.", "corrupted"),
)

AGES = {
    "lifetime": "From when a cached block was computed to its eviction.",
    "idle_before_evict": "From when a cached block was last reused, or computed, to its eviction.",
    "reuse_gap": "Between two uses of a cached block.",
}


class EngineCollector(Collector):
    """Metrics from the latest EngineStatus, and the resident memory of both processes."""

    def __init__(self, model: str, status: Callable[[], EngineStatus], info: Mapping[str, str]) -> None:
        """model: the model_name label of every sample. info: labels of cache_config_info beside the sizes of the pools."""
        self._model, self._status, self._info = model, status, dict(info)

    def collect(self) -> Iterator[Metric]:
        """Every metric; those with labels have all their values, at 0 until something happens."""
        status = self._status()
        for name, text, field in GAUGES:
            yield self._gauge(name, text, [((), getattr(status, field))])
        usage = status.blocks_used / status.blocks_total if status.blocks_total else 0.0
        yield self._gauge("kv_cache_usage_perc", "Part of the token blocks that running requests hold, 0 to 1.", [((), usage)])
        text = "Requests in the queue by what they wait for: room, work that a running request is about to do, the end of a pause."
        yield self._gauge("num_requests_waiting_by_reason", text, waiting_by_reason(status), "reason")
        memory = [(("api",), resident_bytes()), (("engine",), status.rss_bytes)]
        yield self._gauge("resident_memory_bytes", "Resident memory by process.", memory, "process")
        info = {**self._info, "num_blocks": str(status.blocks_total), "num_slots": str(status.slots_total)}
        yield self._gauge("cache_config_info", "How the cache is configured, in labels.", [(tuple(info.values()), 1)], *info)
        for name, text, field in COUNTERS:
            yield self._counter(name, text, [((), getattr(status, field))])
        sources = [(("compute",), status.prompt_tokens), (("local_cache",), status.prefix_hits)]
        yield self._counter("prompt_tokens_by_source", "Prompt tokens by where their state came from.", sources, "source")
        for name, ages in status.block_ages.items():
            yield self._ages(name, ages)
        misses = [((reason,), status.misses.get(reason, 0)) for reason in get_args(MissReason)]
        yield self._counter("prefix_cache_misses", "Started requests by what they missed.", misses, "reason")

    def _ages(self, name: str, ages: BlockAges) -> Metric:
        bounds = [*map(str, BLOCK_AGES), "+Inf"]
        family = HistogramMetricFamily(f"revolta:kv_block_{name}_seconds", AGES[name], labels=("model_name",))
        family.add_metric((self._model,), list(zip(bounds, accumulate(ages.counts), strict=True)), ages.seconds)
        return family

    def _gauge(self, name: str, text: str, samples: Iterable[tuple[tuple[str, ...], float]], *labels: str) -> Metric:
        family = GaugeMetricFamily(f"revolta:{name}", text, labels=("model_name", *labels))
        for values, value in samples:
            family.add_metric((self._model, *values), float(value))
        return family

    def _counter(self, name: str, text: str, samples: Iterable[tuple[tuple[str, ...], float]], *labels: str) -> Metric:
        family = CounterMetricFamily(f"revolta:{name}", text, labels=("model_name", *labels))
        for values, value in samples:
            family.add_metric((self._model, *values), float(value))
        return family


def waiting_by_reason(status: EngineStatus) -> list[tuple[tuple[str, ...], int]]:
    """((reason,), requests): during a pause that is the reason of all."""
    paused = status.waiting if status.paused else 0
    prefix = 0 if status.paused else status.waiting_for_prefix
    return [(("capacity",), status.waiting - prefix - paused), (("prefix",), prefix), (("paused",), paused)]
