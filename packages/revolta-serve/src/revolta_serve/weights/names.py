"""The complete table: which parts of which checkpoint tensors make up every parameter of a rank. Imports no torch.

Checkpoint names are given without their prefix (`model.language_model.` or `model.`). Parameters are fused the way the model
multiplies: rows of several projections stacked, columns or heads cut to the rank's share.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from revolta_serve.model.model_config import ModelConfig

Span = tuple[int, int]
Cut = tuple[str, tuple[int, ...], tuple[Span, ...]]
"""A tensor's name, its shape in the file, and the box taken out of it."""
Kind = Literal["act", "f32", "i64"]
"""How a parameter is kept: in the activation dtype, always in float32, or as int64 constants."""

SCALE_ALIASES = ("{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "attn.{}_scale", "attn._{}_scale", "_{}_scale")
"""Spellings of the K and V cache scales under `self_attn.`, {} being k or v."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a checkpoint tensor and the box of the parameter it fills; both hold the same values in the same order."""

    source: str
    shape: tuple[int, ...]
    """Shape the tensor must have in the file."""
    take: tuple[Span, ...]
    put: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One loaded tensor of a rank."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    sources: tuple[tuple[Piece, ...], ...]
    """Alternative spellings; a checkpoint has exactly one of them."""
    values: tuple[int, ...] | None = None
    """Constants recomputed from the config; a stored copy must agree."""
    optional: bool = False
    positive: bool = False
    """Values must be > 0."""

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def nbytes(self, act: int) -> int:
        """Bytes it takes, `act` being those of an activation value."""
        return self.elements * {"act": act, "f32": 4, "i64": 8}[self.kind]

    @property
    def padded(self) -> bool:
        """True when the sources do not cover the parameter: the rest is zero."""
        return any(sum(math.prod(b - a for a, b in piece.put) for piece in s) < self.elements for s in self.sources)


class _Source:
    """A checkpoint tensor of known shape, and the ways a rank cuts it."""

    def __init__(self, name: str, *shape: int) -> None:
        self.name, self.shape = name, shape

    def cut(self, axis: int = 0, start: int = 0, stop: int | None = None) -> Cut:
        """The box between `start` and `stop` along one axis (clipped to it), whole along the others."""
        size = self.shape[axis] if self.shape else 0
        low, high = min(start, size), min(size if stop is None else stop, size)
        return self.name, self.shape, tuple((low, high) if i == axis else (0, n) for i, n in enumerate(self.shape))

    def share(self, axis: int, rank: int, ranks: int) -> Cut:
        """The rank's equal share along `axis`; the last ranks may get less, or nothing."""
        step = -(-self.shape[axis] // ranks)
        return self.cut(axis, rank * step, (rank + 1) * step)


def _stack(cuts: Iterable[Cut], *rest: int) -> tuple[Piece, ...]:
    """Place cuts one below the other in a parameter whose axes after the first are `rest`."""
    pieces, at = [], 0
    for source, shape, take in cuts:
        count = math.prod(b - a for a, b in take) // math.prod(rest)
        pieces.append(Piece(source, shape, take, ((at, at + count), *((0, n) for n in rest))))
        at += count
    return tuple(pieces)


def _fused(name: str, cuts: Iterable[Cut], *rest: int, kind: Kind = "act", rows: int | None = None) -> Parameter:
    """A parameter of stacked cuts; `rows` makes it taller than they are."""
    pieces = _stack(cuts, *rest)
    return Parameter(name, (pieces[-1].put[0][1] if rows is None else rows, *rest), kind, (pieces,))


def parameters(config: ModelConfig, rank: int = 0, ranks: int = 1) -> Iterator[Parameter]:
    """Yield every parameter of tensor-parallel rank `rank` of `ranks`, in the order of the model.

    Raises ConfigError when the model does not divide over `ranks`.
    """
    config.check_tensor_parallel(ranks)
    table = _Table(config, rank, ranks)
    v, e = config.vocab, config.hidden
    step = -(-v // ranks)
    yield _fused("embed", [_Source("embed_tokens.weight", v, e).share(0, rank, ranks)], e, rows=step)
    for layer, kind in enumerate(config.layer_types):
        if layer in config.ple_layers:
            yield from table.ngram(layer)
        yield from table.hyper(f"layers.{layer}.attn_hyper", f"layers.{layer}.attn_hyper_connection")
        yield from table.gdn(layer) if kind == "gdn" else table.qsa(layer)
        yield from table.hyper(f"layers.{layer}.mlp_hyper", f"layers.{layer}.mlp_hyper_connection")
        yield from table.moe(layer)
    yield from table.hyper("mixer", "hyper_connection_mixer", inject=False)
    yield _fused("lm_head", [_Source("lm_head.weight", v, e).share(0, rank, ranks)], e, rows=step)


@dataclass(frozen=True, slots=True)
class _Table:
    config: ModelConfig
    rank: int
    ranks: int

    def hyper(self, name: str, path: str, inject: bool = True) -> Iterator[Parameter]:
        """Stream mixing: replicated; the projection down and, below it, the injection gate read the same input."""
        c = self.config
        wide = c.streams * c.hidden
        rows = [_Source(f"{path}.input_mix_weight_down.weight", c.hc_rank, wide).cut()]
        if inject:
            rows.append(_Source(f"{path}.block_inject_weight.weight", c.streams, wide).cut())
        yield _fused(f"{name}.norm", [_Source(f"{path}.hc_norm.weight", wide).cut()], c.hidden)
        yield _fused(f"{name}.w_in", rows, wide)
        yield _fused(f"{name}.w_up", [_Source(f"{path}.input_mix_weight_up.weight", wide, c.hc_rank).cut()], c.hc_rank)

    def gdn(self, layer: int) -> Iterator[Parameter]:
        """Linear attention: key heads and the value heads that use them go to the same rank."""
        c, r, n = self.config, self.rank, self.ranks
        path, name = f"layers.{layer}.linear_attn", f"layers.{layer}.gdn"
        keys, values, e = c.gdn_key_heads * c.gdn_key_dim, c.gdn_width, c.hidden

        def channels(source: _Source) -> list[Cut]:
            k, v = keys // n, values // n
            return [source.cut(0, start + r * s, start + (r + 1) * s) for start, s in ((0, k), (keys, k), (2 * keys, v))]

        yield _fused(
            f"{name}.in_proj",
            [
                *channels(_Source(f"{path}.in_proj_qkv.weight", c.gdn_channels, e)),
                _Source(f"{path}.in_proj_z.weight", values, e).share(0, r, n),
                _Source(f"{path}.in_proj_b.weight", c.gdn_value_heads, e).share(0, r, n),
                _Source(f"{path}.in_proj_a.weight", c.gdn_value_heads, e).share(0, r, n),
            ],
            e,
        )
        yield _fused(f"{name}.conv", channels(_Source(f"{path}.conv1d.weight", c.gdn_channels, 1, c.conv_width)), c.conv_width)
        for field in ("A_log", "dt_bias"):
            yield _fused(f"{name}.{field}", [_Source(f"{path}.{field}", c.gdn_value_heads).share(0, r, n)], kind="f32")
        yield _fused(f"{name}.norm", [_Source(f"{path}.norm.weight", c.gdn_value_dim).cut()], kind="f32")
        yield _fused(f"{name}.out_proj", [_Source(f"{path}.out_proj.weight", e, values).share(1, r, n)], values // n)

    def qsa(self, layer: int) -> Iterator[Parameter]:
        """Sparse attention: query heads are split; KV heads too, or repeated when there are more ranks; the indexer is replicated."""
        c, r, n = self.config, self.rank, self.ranks
        path, name = f"layers.{layer}.self_attn", f"layers.{layer}.qsa"
        d, e, width = c.head_dim, c.hidden, c.heads * c.head_dim
        held = max(1, c.kv_heads // n)
        first = r * c.kv_heads // n
        kv = [_Source(f"{path}.{p}_proj.weight", c.kv_heads * d, e).cut(0, first * d, (first + held) * d) for p in "kv"]
        index = _Source(f"{path}.indexer.index_qk_proj.weight", (c.index_heads + 1) * c.index_dim, e).cut()
        yield _fused(f"{name}.in_proj", [_Source(f"{path}.q_proj.weight", 2 * width, e).share(0, r, n), *kv, index], e)
        norms = (("q_norm", "q_norm", d), ("k_norm", "k_norm", d))
        index_norms = (("iq_norm", "indexer.q_layernorm", c.index_dim), ("ik_norm", "indexer.k_layernorm", c.index_dim))
        for field, source, size in norms + index_norms:
            yield _fused(f"{name}.{field}", [_Source(f"{path}.{source}.weight", size).cut()])
        yield _fused(f"{name}.out_proj", [_Source(f"{path}.o_proj.weight", e, width).share(1, r, n)], width // n)
        for which in "kv":
            spellings = tuple((Piece(f"{path}.{alias.format(which, which)}", (), (), ()),) for alias in SCALE_ALIASES)
            yield Parameter(f"{name}.{which}_scale", (), "f32", spellings, optional=True, positive=True)

    def moe(self, layer: int) -> Iterator[Parameter]:
        """Experts: every rank holds its share of each one's width, gate rows above up rows; the router is replicated."""
        c, r, n = self.config, self.rank, self.ranks
        path, name = f"layers.{layer}.mlp", f"layers.{layer}.moe"
        x, e, j = c.experts, c.hidden, c.shared_width
        yield _fused(f"{name}.router", [_Source(f"{path}.gate.weight", x, e).cut()], e)
        yield from self._experts(f"{path}.experts", name)
        shared = [_Source(f"{path}.shared_expert.{p}_proj.weight", j, e).share(0, r, n) for p in ("gate", "up")]
        yield _fused(f"{name}.shared13", shared, e)
        yield _fused(f"{name}.shared2", [_Source(f"{path}.shared_expert.down_proj.weight", e, j).share(1, r, n)], j // n)
        yield _fused(f"{name}.shared_gate", [_Source(f"{path}.shared_expert_gate.weight", 1, e).cut()], e)

    def _experts(self, path: str, name: str) -> Iterator[Parameter]:
        """Banks of all experts, from the fused tensors or from one tensor per expert and projection.

        w13 keeps the order of the file. w2 becomes [E, X, I], all experts side by side in every row (sm70kernels.experts says why),
        so each expert is a piece of its own.
        """
        c, held = self.config, self.config.expert_width // self.ranks
        x, e, i = c.experts, c.hidden, c.expert_width
        mine = (self.rank * held, (self.rank + 1) * held)
        every, wide, gate, up = (0, x), (0, e), (0, held), (held, 2 * held)

        both, bank = f"{path}.gate_up_proj", (x, 2 * i, e)
        fused13 = (
            Piece(both, bank, (every, mine, wide), (every, gate, wide)),
            Piece(both, bank, (every, (i + mine[0], i + mine[1]), wide), (every, up, wide)),
        )
        single13 = tuple(
            Piece(f"{path}.{k}.{p}_proj.weight", (i, e), (mine, wide), ((k, k + 1), put, wide))
            for k in range(x)
            for p, put in (("gate", gate), ("up", up))
        )
        beside = [(wide, (k, k + 1), (0, held)) for k in range(x)]
        fused2 = tuple(Piece(f"{path}.down_proj", (x, e, i), ((k, k + 1), wide, mine), put) for k, put in enumerate(beside))
        single2 = tuple(Piece(f"{path}.{k}.down_proj.weight", (e, i), (wide, mine), put) for k, put in enumerate(beside))
        yield Parameter(f"{name}.w13", (x, 2 * held, e), "act", (fused13, single13))
        yield Parameter(f"{name}.w2", (e, x, held), "act", (fused2, single2))

    def ngram(self, layer: int) -> Iterator[Parameter]:
        """N-gram embedding: table rows are split; hash constants and everything after the look-up are replicated."""
        c = self.config
        path, name = f"layers.{layer}.ple", f"layers.{layer}.ple"
        e, wide, width = c.hidden, c.streams * c.hidden, c.ngram_width
        yield self._table(layer, f"{path}.ple_embedding.ngram_embedding", f"{name}.table", width)
        constants = (
            ("multipliers", "layer_multipliers", c.ngram_multipliers(layer)),
            ("primes", "ngram_heads_vocab_sizes", c.ngram_primes(layer)),
            ("offsets", "ngram_heads_offsets", c.ngram_offsets(layer)),
        )
        for field, source, values in constants:
            pieces = _stack([_Source(f"{path}.ple_embedding.{source}", len(values)).cut()])
            yield Parameter(f"{name}.{field}", (len(values),), "i64", (pieces,), values=values)
        yield _fused(f"{name}.key", [_Source(f"{path}.key_proj.weight", wide, c.ple_dim).cut()], c.ple_dim)
        yield _fused(f"{name}.value", [_Source(f"{path}.value_proj.weight", e, c.ple_dim).cut()], c.ple_dim)
        for norm in ("norm_key", "norm_query", "norm_conv"):
            yield _fused(f"{name}.{norm}", [_Source(f"{path}.{norm}.weight", wide).cut()], e)
        yield _fused(f"{name}.conv", [_Source(f"{path}.conv1d.weight", wide, 1, c.ple_conv_width).cut()], c.ple_conv_width)

    def _table(self, layer: int, path: str, name: str, width: int) -> Parameter:
        """Rows of this rank out of the file's row shards. Shards of other ranks are claimed with an empty cut, so that none may lack."""
        rows = self.config.ngram_rows(layer)
        step, held = -(-rows // self.config.ngram_shards), -(-rows // self.ranks)
        first, last = self.rank * held, min((self.rank + 1) * held, rows)
        cuts = []
        for shard, start in enumerate(range(0, rows, step)):
            low, high = max(first - start, 0), max(last - start, 0)
            cuts.append(_Source(f"{path}.shard_{shard}.weight", min(step, rows - start), width).cut(0, min(low, high), high))
        whole = _Source(f"{path}.weight", rows, width).cut(0, first, last)
        return Parameter(name, (held, width), "act", (_stack(cuts, width), _stack([whole], width)))
