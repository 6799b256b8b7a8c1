"""Work space of a step: an estimate from the shapes of the widest pass, term by term. A runner on a device measures it at start.

The passes of a step run one after the other in the same buffers; prefill is the widest one. Streams live through the whole pass; of
the layer kinds the hungriest counts, because only one layer runs at a time.
"""

import math

from revolta_serve.cache.layout import BLOCK, ELEMENT_BYTES, WIDEST, heads_of
from revolta_serve.commands.plan_weights import Part
from revolta_serve.config import MOST_ROWS, ServeConfig
from revolta_serve.model.model_config import ModelConfig

CHUNK = 2048
"""Rows at a time where a layer would otherwise keep ten times the width of a row: outputs of routed experts, gated n-gram values."""

SCORED = 64
"""Rows whose index scores are kept at a time: a tile of prefill rows."""


def work_space(config: ServeConfig, model: ModelConfig) -> tuple[Part, ...]:
    """The terms, in bytes on one rank. The configuration must be resolved."""
    act, ranks, context = ELEMENT_BYTES[config.model.dtype], config.parallel.tensor, config.parallel.decode_context
    rows = math.ceil(config.schedule.max_num_batched_tokens / BLOCK) * BLOCK
    verify, wide = config.schedule.max_num_seqs * config.speculate.width, model.streams * model.hidden
    layers = {"GDN": _gdn(model, rows, ranks, act), "experts": _experts(model, rows, ranks, act), "n-gram": _ngram(model, rows, act)}
    if "qsa" in model.layer_types:
        quantised = config.cache.kv_format in ("fp8_e4m3", "int8")
        layers["QSA"] = _qsa(model, rows, ranks, context, act, config.schedule.max_model_len, quantised)
    widest = max(layers, key=lambda name: layers[name])
    terms = {
        "streams, and normalised": 2 * rows * wide * act,
        "block input, output and gates": rows * (2 * model.hidden + model.hc_rank + model.streams) * act,
        f"widest layer ({widest})": layers[widest],
        "sums over ranks, two buffers": 2 * rows * model.hidden * act if ranks > 1 else 0,
        "logits": verify * (-(-model.vocab // ranks) + model.vocab) * 4,
        "inputs of verified rows": _records(config, model, ranks, act),
        "image and video features": rows * model.hidden * act if config.model.vision else 0,
        "block tables": config.schedule.max_num_seqs * math.ceil(config.schedule.max_model_len / BLOCK) * 4,
    }
    return tuple(Part(name, count) for name, count in terms.items() if count)


def _gdn(m: ModelConfig, rows: int, ranks: int, act: int) -> int:
    """Projected rows, convolved channels, output before and after its norm; per chunk the triangular inverse and two value-wide
    intermediates in float32."""
    channels, values, heads = m.gdn_channels // ranks, m.gdn_width // ranks, m.gdn_value_heads // ranks
    return rows * ((2 * channels + 3 * values + 2 * heads) * act + heads * (BLOCK + 2 * m.gdn_value_dim) * 4)


def _qsa(m: ModelConfig, rows: int, ranks: int, context: int, act: int, longest: int, quantised: bool) -> int:
    """Projected rows; queries of all heads that share a context, their partial outputs in float32, sent and received; scores of a tile
    against every index key, selected tokens; for quantised keys and values, those of one layer and the longest context in the
    activation type."""
    heads, kv, d = m.heads // ranks, heads_of(m, ranks), m.head_dim
    projected = rows * (2 * heads * d + 2 * kv * d + (m.index_heads + 1) * m.index_dim) * act
    attended = rows * context * heads * d * (act + 8 if context > 1 else 2 * act)
    selected = SCORED * math.ceil(longest / m.index_ratio) * 4 + rows * m.selection * 4 * (2 if context > 1 else 1)
    return projected + attended + selected + (math.ceil(longest / context) * kv * d * 2 * act if quantised else 0)


def _experts(m: ModelConfig, rows: int, ranks: int, act: int) -> int:
    """Router logits, choices and weights, inner activations of every choice, outputs of the choices of a chunk, the shared expert."""
    k, held, shared = m.experts_per_token, m.expert_width // ranks, m.shared_width // ranks
    inner = rows * (m.experts * act + k * 8 + k * held * act + 3 * shared * act)
    return inner + min(rows, CHUNK) * k * m.hidden * act


def _ngram(m: ModelConfig, rows: int, act: int) -> int:
    """Looked-up values and their projection; for a chunk the keys, gated values and normalised values of every stream."""
    if not m.ple_layers:
        return 0
    return rows * (m.ple_dim + m.hidden) * act + 3 * min(rows, CHUNK) * m.streams * m.hidden * act


def _records(config: ServeConfig, m: ModelConfig, ranks: int, act: int) -> int:
    """Inputs of the recurrent layers that are run again over the rows that stand: of the widest pass, which needs no drafts, for an
    answer that was interrupted is computed again in rows as many."""
    verify = min(MOST_ROWS, config.schedule.max_num_seqs * WIDEST)
    gdn = m.layer_types.count("gdn") * (m.gdn_channels + 2 * m.gdn_value_heads) // ranks
    return verify * (gdn + len(m.ple_layers) * m.streams * m.hidden) * act
