"""Counters of one server in Prometheus form, in a registry of their own. Every name starts with revolta:."""

from collections.abc import Callable, Iterable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from revolta_serve.types import EngineStatus

CONTENT_TYPE = CONTENT_TYPE_LATEST
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5)
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """Everything /metrics shows. The engine's own counts are read from `status` when they are asked for."""

    def __init__(self, model: str, status: Callable[[], EngineStatus]) -> None:
        """`model` is the model_name label of every sample."""
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model, status))
        self._label = {"model_name": model}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"revolta:{name}", text, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"revolta:{name}", text, ("model_name",), registry=self.registry, buckets=tuple(buckets))

        self._success = counter("request_success", "Ended choices by how they ended.", "finished_reason")
        self._disconnects = counter("client_disconnects", "Requests whose client left before the answer was complete.")
        self._errors = counter("http_errors", "Responses with a status of 400 and above.", "route", "status")
        self._cached = counter("prompt_tokens_cached", "Prompt tokens whose computation was reused.")
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", TOKENS)
        self._generated = histogram("request_generation_tokens", "Tokens of an ended choice.", TOKENS)
        self._choices = histogram("request_params_n", "Choices asked for.", (1, 2, 4, 8, 16, 32, 64, 128))
        self._max_tokens = histogram("request_params_max_tokens", "Tokens a choice may have.", TOKENS)
        self._first = histogram("time_to_first_token_seconds", "From the request to the first event of a choice.", SECONDS)
        self._gap = histogram("inter_token_latency_seconds", "Between two events of a choice.", GAPS)
        self._whole = histogram("e2e_request_latency_seconds", "From the request to the end of a choice.", SECONDS)
        # Counts whose labels are known start at zero: a sample that appears with its first event hides that event from rates.
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(**self._label, finished_reason=reason)
        self._disconnects.labels(**self._label)
        self._cached.labels(**self._label)

    def request(self, prompt_tokens: int, n: int, max_tokens: int) -> None:
        """A prompt was submitted, with n choices."""
        self._prompt.labels(**self._label).observe(prompt_tokens)
        self._choices.labels(**self._label).observe(n)
        self._max_tokens.labels(**self._label).observe(max_tokens)

    def first_event(self, seconds: float) -> None:
        """A choice began to answer."""
        self._first.labels(**self._label).observe(seconds)

    def next_event(self, seconds: float) -> None:
        """A choice went on after `seconds`."""
        self._gap.labels(**self._label).observe(seconds)

    def ended(self, reason: str, generated: int, cached: int, seconds: float) -> None:
        """A choice ended: reason stop, length, abort or error."""
        self._success.labels(**self._label, finished_reason=reason).inc()
        self._generated.labels(**self._label).observe(generated)
        self._cached.labels(**self._label).inc(cached)
        self._whole.labels(**self._label).observe(seconds)

    def disconnected(self) -> None:
        """A client left early."""
        self._disconnects.labels(**self._label).inc()

    def http_error(self, route: str, status: int) -> None:
        """A response with an error status; `route` is one of the server's own paths."""
        self._errors.labels(**self._label, route=route, status=str(status)).inc()

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's latest counts as metrics."""

    def __init__(self, model: str, status: Callable[[], EngineStatus]) -> None:
        self._model, self._status = model, status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        usage = status.blocks_used / status.blocks_total if status.blocks_total else 0.0
        yield self._gauge("num_requests_running", "Requests that are being computed.", status.running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", status.waiting)
        yield self._gauge("num_requests_stalled", "Running requests that wait for a block an older one may need.", status.stalled)
        yield self._gauge("kv_cache_usage_perc", "Part of the token blocks in use, 0 to 1.", usage)
        yield self._gauge("kv_blocks_used", "Token blocks in use.", status.blocks_used)
        yield self._gauge("kv_blocks", "Token blocks.", status.blocks_total)
        yield self._gauge("state_slots_used", "State slots in use.", status.slots_used)
        yield self._gauge("state_slots", "State slots.", status.slots_total)
        yield self._counter("engine_steps", "Steps computed.", status.steps)
        yield self._counter("prompt_tokens", "Prompt tokens computed.", status.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", status.generated_tokens)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"revolta:{name}", text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"revolta:{name}", text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family
