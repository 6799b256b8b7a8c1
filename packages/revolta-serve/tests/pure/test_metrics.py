"""Metrics as Prometheus reads them: the names are frozen, everything is there before the first request, nothing is left out."""

import pytest
from msgspec.structs import fields, replace
from prometheus_client.parser import text_string_to_metric_families

from revolta_serve.metrics import Metrics
from revolta_serve.types import BLOCK_AGES, BlockAges, EngineStatus, RequestRecord, StepCost

ROUTES = ("/v1/completions", "/metrics", "/health")
GAUGES = {
    "cache_config_info",
    "engine_paused",
    "kv_blocks",
    "kv_blocks_cached",
    "kv_blocks_used",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "resident_memory_bytes",
    "scheduler_stalled_requests",
    "state_slots",
    "state_slots_cached",
    "state_slots_used",
}
COUNTERS = {
    "client_disconnects",
    "corrupted_requests",
    "engine_host_seconds",
    "engine_step_seconds",
    "engine_steps",
    "generation_tokens",
    "http_errors",
    "http_requests",
    "kv_blocks_deduplicated",
    "kv_blocks_evicted",
    "num_preemptions",
    "num_preemptions_in_prefill",
    "prefix_cache_generated_hits",
    "prefix_cache_hits",
    "prefix_cache_misses",
    "prefix_cache_queries",
    "prefix_cache_requests",
    "prompt_tokens",
    "prompt_tokens_by_source",
    "prompt_tokens_cached",
    "replayed_tokens",
    "request_success",
    "rolling_snapshots_lost",
    "snapshots_evicted",
    "snapshots_skipped",
    "snapshots_stored",
}
HISTOGRAMS = {
    "e2e_request_latency_seconds",
    "host_gap_ms",
    "http_request_duration_seconds",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_inference_time_seconds",
    "request_max_num_generation_tokens",
    "request_params_max_tokens",
    "request_params_n",
    "request_prefill_kv_computed_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_time_per_output_token_seconds",
    "step_time_ms",
    "time_to_first_token_seconds",
}
LABELS = {
    "request_success": {"finished_reason": {"stop", "length", "repetition", "abort", "error"}},
    "prefix_cache_misses": {"reason": {"none", "short", "disabled", "cold", "evicted", "no_snapshot", "generated_off"}},
    "prefix_cache_requests": {"result": {"hit", "partial", "none"}},
    "num_requests_waiting_by_reason": {"reason": {"capacity", "prefix", "paused"}},
    "prompt_tokens_by_source": {"source": {"compute", "local_cache"}},
    "step_time_ms": {"kind": {"prefill", "decode", "mixed"}},
    "resident_memory_bytes": {"process": {"api", "engine"}},
    "http_requests": {"route": {"/v1/completions", "unknown"}, "status": {"200"}},
    "http_request_duration_seconds": {"route": {"/v1/completions", "unknown"}},
    "http_errors": {"route": {*ROUTES, "unknown"}, "status": {"500"}},
}
"""Every value of every label but model_name."""
RECORD = RequestRecord(
    prompt_tokens=700,
    generated_tokens=5,
    cached_tokens=640,
    seamless=True,
    miss="none",
    queue_seconds=0.25,
    prefill_seconds=0.5,
    decode_seconds=8.0,
    preemptions=0,
    slices=1,
)


def made(status=None):
    return Metrics("tiny", lambda: status or EngineStatus(), {"prefix": "true"}, ROUTES)


def families(metrics):
    """By name without the prefix; those that tell when a sample was made are left out."""
    found = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    assert all(name.startswith("revolta:") for name in found)
    return {name.removeprefix("revolta:"): family for name, family in found.items() if not name.endswith("_created")}


def samples(metrics):
    """(name of the sample without the prefix, values of labels but the model's, sorted) -> value."""
    found = {}
    for family in families(metrics).values():
        for sample in family.samples:
            labels = sorted(value for label, value in sample.labels.items() if label != "model_name")
            found[(sample.name.removeprefix("revolta:"), *labels)] = sample.value
    return found


def test_the_names_are_frozen():
    by_type = {kind: set() for kind in ("gauge", "counter", "histogram")}
    for name, family in families(made()).items():
        by_type[family.type].add(name)
        assert family.documentation.endswith("."), name
    # Adding one is a decision, taking one away breaks somebody's dashboard.
    assert by_type == {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}


def test_every_metric_is_there_at_zero_before_the_first_request():
    for name, family in families(made()).items():
        assert family.samples, f"{name} has no sample"
        if name == "cache_config_info":
            assert [sample.value for sample in family.samples] == [1]
            continue
        wanted = [sample for sample in family.samples if not sample.name.endswith("_created")]
        zero = [sample for sample in wanted if not (name == "resident_memory_bytes" and sample.labels["process"] == "api")]
        assert all(sample.value == 0 for sample in zero), name
        if family.type == "counter":
            assert {sample.name for sample in wanted} == {f"revolta:{name}_total"}
        for sample in wanted:
            assert sample.labels["model_name"] == "tiny"
        labels = {label: {sample.labels[label] for sample in wanted} for label in wanted[0].labels if label not in ("model_name", "le")}
        assert labels == LABELS.get(name, {}), name


NO_NUMBERS = ("paused", "misses", "block_ages")
"""Fields of a status that have tests of their own."""


def test_ages_of_blocks_show_where_they_are_known():
    counts = (1, 2, *[0] * (len(BLOCK_AGES) - 2), 4)
    ages = {name: BlockAges(counts=counts, seconds=9.5) for name in ("lifetime", "idle_before_evict", "reuse_gap")}
    metrics = made(EngineStatus(block_ages=ages))
    shown = samples(metrics)
    for name in ages:
        metric = f"kv_block_{name}_seconds"
        assert families(metrics)[metric].type == "histogram"
        assert (shown[f"{metric}_count",], shown[f"{metric}_sum",]) == (7, 9.5)
        assert [shown[f"{metric}_bucket", bound] for bound in ("0.1", "0.5", "86400", "+Inf")] == [1, 3, 3, 7]


def test_every_field_of_the_status_shows_somewhere():
    """Of a status with another number in every field, each number is found."""
    whole = {field.name: 1000 + number for number, field in enumerate(fields(EngineStatus)) if field.name not in NO_NUMBERS}
    shown = samples(made(EngineStatus(**whole, misses={"cold": 5000, "evicted": 5001})))
    assert {*whole.values(), 5000, 5001} <= set(shown.values())
    assert shown["prompt_tokens_total",] == shown["prompt_tokens_by_source_total", "compute"] == whole["prompt_tokens"]
    assert shown["prefix_cache_hits_total",] == shown["prompt_tokens_by_source_total", "local_cache"] == whole["prefix_hits"]
    assert shown["prefix_cache_misses_total", "cold"] == 5000
    assert shown["resident_memory_bytes", "engine"] == whole["rss_bytes"]
    assert shown["resident_memory_bytes", "api"] > 1 << 20
    assert shown["engine_paused",] == 0
    assert shown["kv_cache_usage_perc",] == whole["blocks_used"] / whole["blocks_total"]
    pools = {"num_blocks": str(whole["blocks_total"]), "num_slots": str(whole["slots_total"])}
    info = families(made(EngineStatus(**whole)))["cache_config_info"].samples[0]
    assert info.labels == {"model_name": "tiny", "prefix": "true", **pools}


@pytest.mark.parametrize(("paused", "expected"), [(False, (5, 2, 0)), (True, (0, 0, 7))])
def test_whoever_waits_has_one_reason(paused, expected):
    shown = samples(made(EngineStatus(waiting=7, waiting_for_prefix=2, paused=paused)))
    assert tuple(shown["num_requests_waiting_by_reason", reason] for reason in ("capacity", "prefix", "paused")) == expected
    assert shown["engine_paused",] == paused


def test_a_record_is_observed():
    metrics = made()
    metrics.record(RECORD)
    shown = samples(metrics)
    for name, value in {
        "request_prefill_kv_computed_tokens": 60,
        "request_queue_time_seconds": 0.25,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 8.0,
        "request_inference_time_seconds": 8.5,
        "request_time_per_output_token_seconds": 2.0,
    }.items():
        assert (shown[f"{name}_sum",], shown[f"{name}_count",]) == (value, 1), name


@pytest.mark.parametrize(
    ("prompt", "cached", "result"),
    [(700, 640, "hit"), (641, 640, "hit"), (640, 576, "hit"), (705, 640, "partial"), (700, 0, "none"), (9, 0, "none")],
)
def test_a_request_counts_by_what_it_reused(prompt, cached, result):
    metrics = made()
    metrics.record(replace(RECORD, prompt_tokens=prompt, cached_tokens=cached))
    shown = samples(metrics)
    assert {name: shown["prefix_cache_requests_total", name] for name in ("hit", "partial", "none")} == {
        "hit": 0,
        "partial": 0,
        "none": 0,
        result: 1,
    }


def test_one_token_has_no_time_per_further_token():
    metrics = made()
    metrics.record(replace(RECORD, generated_tokens=1))
    assert samples(metrics)["request_time_per_output_token_seconds_count",] == 0
    assert samples(metrics)["request_decode_time_seconds_count",] == 1


@pytest.mark.parametrize(("decode", "prefill", "kind"), [(3, 0, "decode"), (0, 128, "prefill"), (3, 128, "mixed")])
def test_a_step_is_observed_by_its_kind(decode, prefill, kind):
    metrics = made()
    metrics.step(StepCost(decode_rows=decode, prefill_rows=prefill, seconds=0.25, host_seconds=0.001))
    shown = samples(metrics)
    assert shown["iteration_tokens_total_sum",] == decode + prefill
    assert {name: shown["step_time_ms_sum", name] for name in ("decode", "prefill", "mixed")} == {
        "decode": 0,
        "prefill": 0,
        "mixed": 0,
        kind: 250,
    }
    assert (shown["host_gap_ms_sum",], shown["host_gap_ms_count",]) == (1.0, 1)


def test_an_ended_choice_and_its_events_are_observed():
    metrics = made()
    metrics.request(10, 2, 30)
    metrics.first_event(0.5)
    metrics.next_event(0.25)
    metrics.next_event(0.25)
    metrics.ended("repetition", 7, 4, 2.0)
    metrics.longest(7)
    metrics.disconnected()
    shown = samples(metrics)
    for name, value in {
        "request_prompt_tokens_sum": 10,
        "request_params_n_sum": 2,
        "request_params_max_tokens_sum": 30,
        "client_disconnects_total": 1,
        "time_to_first_token_seconds_sum": 0.5,
        "inter_token_latency_seconds_count": 2,
        "request_generation_tokens_sum": 7,
        "request_max_num_generation_tokens_sum": 7,
        "prompt_tokens_cached_total": 4,
        "e2e_request_latency_seconds_sum": 2.0,
    }.items():
        assert shown[name,] == value, name
    assert shown["request_success_total", "repetition"] == 1
    assert shown["request_success_total", "stop"] == 0


def test_responses_are_counted_by_route_and_those_of_machines_are_not():
    metrics = made()
    metrics.http_response("/v1/completions", 200, 2.0)
    metrics.http_response("/v1/completions", 429, 1.0)
    metrics.http_error("/metrics", 500)
    for route in ("/metrics", "/health"):
        metrics.http_response(route, 200, 3.0)
    shown = samples(metrics)
    assert shown["http_requests_total", "/v1/completions", "200"] == 1
    assert shown["http_requests_total", "/v1/completions", "429"] == 1
    assert shown["http_request_duration_seconds_sum", "/v1/completions"] == 3.0
    assert shown["http_errors_total", "/metrics", "500"] == 1
    assert not any(
        name.startswith(("http_requests", "http_request_duration")) and {"/metrics", "/health"} & set(rest) for name, *rest in shown
    )
