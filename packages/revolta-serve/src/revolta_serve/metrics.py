"""Counters of one server in Prometheus form, in a registry of their own. Every name starts with revolta:."""

from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest

from revolta_serve.engine_metrics import EngineCollector
from revolta_serve.model.model_config import GRID
from revolta_serve.types import EngineStatus, FinishReason, RequestRecord, StepCost

CONTENT_TYPE = CONTENT_TYPE_LATEST
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)
SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)
GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
STEP_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5)
GAP_MS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 1e3)
STEP_KINDS = ("prefill", "decode", "mixed")
REUSES = ("hit", "partial", "none")
"""All of a prompt that could be reused was, some of it, or nothing."""

UNTIMED_ROUTES = frozenset({"/metrics", "/health"})
"""Asked for by machines, all the time."""


class Metrics:
    """Everything /metrics shows. The engine's own counts are read from `status` when they are asked for."""

    def __init__(self, model: str, status: Callable[[], EngineStatus], info: Mapping[str, str], routes: Iterable[str]) -> None:
        """model: the model_name label of every sample. info: how the cache is configured. routes: the paths that requests can take."""
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model, status, info))
        self._model = model
        seconds, tokens = SECONDS, TOKENS
        self._success = self._counter("request_success", "Ended choices by how they ended.", "finished_reason")
        self._disconnects = self._counter("client_disconnects", "Requests whose client left before the answer was complete.")
        self._errors = self._counter("http_errors", "Responses with a status of 400 and above.", "route", "status")
        self._responses = self._counter("http_requests", "Responses by route and status.", "route", "status")
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens of ended choices whose computation was reused.")
        self._reuses = self._counter("prefix_cache_requests", "Ended requests that ran, by how much of their prompt was reused.", "result")
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt.", tokens)
        self._generated = self._histogram("request_generation_tokens", "Tokens of an ended choice.", tokens)
        self._longest = self._histogram("request_max_num_generation_tokens", "Tokens of the longest choice of an ended request.", tokens)
        self._computed = self._histogram("request_prefill_kv_computed_tokens", "Prompt tokens that had to be computed.", tokens)
        self._choices = self._histogram("request_params_n", "Choices asked for.", CHOICES)
        self._max_tokens = self._histogram("request_params_max_tokens", "Tokens a choice may have.", tokens)
        self._first = self._histogram("time_to_first_token_seconds", "From the request to the first event of a choice.", seconds)
        self._gap = self._histogram("inter_token_latency_seconds", "Between two events of a choice.", GAPS)
        self._each = self._histogram("request_time_per_output_token_seconds", "Mean time of a token after the first one.", GAPS)
        self._whole = self._histogram("e2e_request_latency_seconds", "From the request to the end of a choice.", seconds)
        self._queue = self._histogram("request_queue_time_seconds", "In the engine's queue.", seconds)
        self._prefill = self._histogram("request_prefill_time_seconds", "From the first step to the first token.", seconds)
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.", seconds)
        self._inference = self._histogram("request_inference_time_seconds", "From the first step to the last token.", seconds)
        self._rows = self._histogram("iteration_tokens_total", "Rows of a step.", STEP_TOKENS)
        self._step = self._histogram("step_time_ms", "Milliseconds of a step in the model.", STEP_MS, "kind")
        self._host = self._histogram("host_gap_ms", "Milliseconds between two steps while there is work.", GAP_MS)
        self._latency = self._histogram("http_request_duration_seconds", "From a request to the end of its response.", seconds, "route")
        # Samples whose labels are known start at zero: one that appears with its first event hides that event from rates.
        for reason in get_args(FinishReason):
            self._success.labels(model, reason)
        for result in REUSES:
            self._reuses.labels(model, result)
        for kind in STEP_KINDS:
            self._step.labels(model, kind)
        for route in sorted({*routes, "unknown"}):
            self._errors.labels(model, route, "500")
            if route not in UNTIMED_ROUTES:
                self._responses.labels(model, route, "200")
                self._latency.labels(model, route)

    def request(self, prompt_tokens: int, n: int, max_tokens: int) -> None:
        """A prompt was submitted, with n choices."""
        self._prompt.labels(self._model).observe(prompt_tokens)
        self._choices.labels(self._model).observe(n)
        self._max_tokens.labels(self._model).observe(max_tokens)

    def first_event(self, seconds: float) -> None:
        """A choice began to answer."""
        self._first.labels(self._model).observe(seconds)

    def next_event(self, seconds: float) -> None:
        """A choice went on after `seconds`."""
        self._gap.labels(self._model).observe(seconds)

    def ended(self, reason: str, generated: int, cached: int, seconds: float) -> None:
        """A choice ended: reason as in FinishReason."""
        self._success.labels(self._model, reason).inc()
        self._generated.labels(self._model).observe(generated)
        self._cached.labels(self._model).inc(cached)
        self._whole.labels(self._model).observe(seconds)

    def longest(self, generated: int) -> None:
        """All choices of a request have ended, the longest with so many tokens."""
        self._longest.labels(self._model).observe(generated)

    def record(self, record: RequestRecord) -> None:
        """A request that the engine had started ended; once for each choice that it made."""
        reusable = (record.prompt_tokens - 1) // GRID * GRID  # one token at least is left to compute
        result = "none" if not record.cached_tokens else "hit" if record.cached_tokens == reusable else "partial"
        self._reuses.labels(self._model, result).inc()
        self._computed.labels(self._model).observe(record.prompt_tokens - record.cached_tokens)
        self._queue.labels(self._model).observe(record.queue_seconds)
        self._prefill.labels(self._model).observe(record.prefill_seconds)
        self._decode.labels(self._model).observe(record.decode_seconds)
        self._inference.labels(self._model).observe(record.prefill_seconds + record.decode_seconds)
        if record.generated_tokens > 1:
            self._each.labels(self._model).observe(record.decode_seconds / (record.generated_tokens - 1))

    def step(self, cost: StepCost) -> None:
        """The engine computed a step."""
        kind = "mixed" if cost.decode_rows and cost.prefill_rows else "decode" if cost.decode_rows else "prefill"
        self._rows.labels(self._model).observe(cost.decode_rows + cost.prefill_rows)
        self._step.labels(self._model, kind).observe(1000 * cost.seconds)
        self._host.labels(self._model).observe(1000 * cost.host_seconds)

    def disconnected(self) -> None:
        """A client left early."""
        self._disconnects.labels(self._model).inc()

    def http_error(self, route: str, status: int) -> None:
        """A response with an error status began; `route` is one of the server's own paths, or unknown."""
        self._errors.labels(self._model, route, str(status)).inc()

    def http_response(self, route: str, status: int, seconds: float) -> None:
        """A response ended `seconds` after its request."""
        if route not in UNTIMED_ROUTES:
            self._responses.labels(self._model, route, str(status)).inc()
            self._latency.labels(self._model, route).observe(seconds)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        made = Counter(f"revolta:{name}", text, ("model_name", *labels), registry=self.registry)
        if not labels:
            made.labels(self._model)
        return made

    def _histogram(self, name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
        made = Histogram(f"revolta:{name}", text, ("model_name", *labels), registry=self.registry, buckets=tuple(buckets))
        if not labels:
            made.labels(self._model)
        return made
