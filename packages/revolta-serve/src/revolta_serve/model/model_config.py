"""What config.json says about the model, checked once so that nothing downstream has to doubt it. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from revolta_serve.errors import ConfigError
from revolta_serve.model import ngram_hash
from revolta_serve.model.fields import Fields, read_json
from revolta_serve.model.rope_config import RopeConfig

LayerType = Literal["gdn", "qsa"]

GRID = 64
"""Positions per token block. Index blocks must not straddle it."""

_MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next", "qwen3_8_flash_next_text")
_LAYER_TYPES: dict[str, LayerType] = {
    "linear_attention": "gdn",
    "full_attention": "qsa",
    "qwen_sparse_attention": "qsa",
    "indexed_attention": "qsa",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of the text model, unsharded. Every invariant the code relies on holds."""

    hidden: int
    layers: int
    vocab: int
    max_positions: int
    eps: float
    layer_types: tuple[LayerType, ...]
    dtype: str
    """float32, float16 or bfloat16: what the checkpoint says it is stored in."""

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeConfig
    index_heads: int
    index_dim: int
    index_topk: int
    """Blocks selected per query."""
    index_ratio: int
    """Tokens per index block."""

    gdn_key_heads: int
    gdn_value_heads: int
    gdn_key_dim: int
    gdn_value_dim: int
    conv_width: int
    output_gate: Literal["sigmoid", "silu"]

    streams: int
    hc_rank: int

    experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int

    ple_layers: tuple[int, ...]
    """0-based decoder layers with an n-gram embedding, ascending; the file counts from 1."""
    ple_dim: int
    ple_conv_width: int
    ngram: int
    """Longest n-gram; also the dilation of the convolution."""
    ngram_heads: int
    """Hash heads per n-gram order."""
    ngram_base: int
    ngram_divisor: int
    ngram_shards: int
    seed: int
    eos: int
    """The id that ends an n-gram segment: the text config's first eos id, whatever else stops an answer."""
    eos_ids: tuple[int, ...]

    image_token: int | None
    video_token: int | None
    vision_start: int | None
    vision_end: int | None
    has_vision: bool
    quantization: str | None
    """quant_method of the checkpoint, or None for a plain one."""
    ple_storage: str | None
    """Storage of the n-gram table when it is not the checkpoint's dtype: float8_e4m3fn or nvfp4."""

    @classmethod
    def load(cls, directory: str | Path) -> "ModelConfig":
        """Read and check `directory`/config.json. Raises ConfigError naming file, field, value and what is legal."""
        path = Path(directory) / "config.json"
        return cls.from_dict(read_json(path), file=str(path))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], *, file: str = "config.json") -> "ModelConfig":
        """Check the object of a config.json: the model's, with a `text_config`, or a text model's own."""
        top = Fields(raw, file)
        top.choice("model_type", _MODEL_TYPES)
        text = top.below("text_config") if top.has("text_config") else top
        text.choice("model_type", _MODEL_TYPES, "qwen4_exp_text")
        if top.flag("tie_word_embeddings", False) or text.flag("tie_word_embeddings", False):
            raise top.error("tie_word_embeddings", "false (this architecture has an lm_head of its own)")
        if text.flag("attention_bias", False):
            raise text.error("attention_bias", "false (no projection of this architecture has a bias)")
        if not text.flag("norm_topk_prob", True):
            raise text.error("norm_topk_prob", "true (the weights of the chosen experts add up to 1)")
        act = text.choice("hidden_act", ("silu",), "silu")

        layers = text.integer("num_hidden_layers")
        types = _layer_types(text, layers)
        hidden, vocab = text.integer("hidden_size"), text.integer("vocab_size", low=2)
        heads, kv_heads, head_dim = (text.integer(n) for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        if heads % kv_heads:
            raise text.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
        key_heads, value_heads = text.integer("linear_num_key_heads"), text.integer("linear_num_value_heads")
        if value_heads % key_heads:
            raise text.error("linear_num_value_heads", f"a multiple of linear_num_key_heads {key_heads}")
        max_positions = text.integer("max_position_embeddings")
        rope = RopeConfig.read(text, head_dim, max_positions)
        index_heads, index_dim, topk, ratio = _indexer(text, "qsa" in types, rope.dims)
        experts = text.integer("num_experts")
        eos_ids = text.integers("eos_token_id", high=vocab - 1)
        if not eos_ids:
            raise text.error("eos_token_id", "an id or a list of ids (the first marks the segments of the n-gram hash)")
        ple_layers = _ple_layers(text, types)
        ngram, ngram_heads = text.integer("ngram_size", low=2, default=3), text.integer("heads_per_ngram", default=8)
        ple_dim = text.integer("ple_embed_dim", default=hidden)
        if ple_layers and ple_dim % ((ngram - 1) * ngram_heads):
            raise text.error("ple_embed_dim", f"a multiple of (ngram_size - 1) * heads_per_ngram = {(ngram - 1) * ngram_heads}")

        def token(name: str) -> int | None:
            return top.integer(name, low=0, high=vocab - 1) if top.has(name) else None

        return cls(
            hidden=hidden, layers=layers, vocab=vocab, max_positions=max_positions, layer_types=types,
            eps=text.number("rms_norm_eps", "a number > 0", low=1e-30, default=1e-6), dtype=_dtype(top, text),
            heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=rope,
            index_heads=index_heads, index_dim=index_dim, index_topk=topk, index_ratio=ratio,
            gdn_key_heads=key_heads, gdn_value_heads=value_heads,
            gdn_key_dim=text.integer("linear_key_head_dim"), gdn_value_dim=text.integer("linear_value_head_dim"),
            conv_width=text.integer("linear_conv_kernel_dim", low=2, default=4),
            output_gate="sigmoid" if text.choice("output_gate_type", ("sigmoid", "silu"), act) == "sigmoid" else "silu",
            streams=text.integer("hc_count", low=2, default=4), hc_rank=text.integer("hc_lowrank", default=320),
            experts=experts, experts_per_token=text.integer("num_experts_per_tok", high=experts),
            expert_width=text.integer("moe_intermediate_size"), shared_width=text.integer("shared_expert_intermediate_size"),
            ple_layers=ple_layers, ple_dim=ple_dim, ple_conv_width=text.integer("ple_conv_kernel_size", low=2, default=4),
            ngram=ngram, ngram_heads=ngram_heads, ngram_base=text.integer("ngram_vocab_size_base", low=2, default=20_000_000),
            ngram_divisor=text.integer("make_ngram_vocab_size_divisible_by", default=128),
            ngram_shards=text.integer("split_ngram_parts", default=512), seed=text.integer("seed", low=0, default=1234),
            eos=eos_ids[0], eos_ids=eos_ids, image_token=token("image_token_id"), video_token=token("video_token_id"),
            vision_start=token("vision_start_token_id"), vision_end=token("vision_end_token_id"),
            has_vision=top.has("vision_config"), quantization=_quantization(top, text),
            ple_storage=text.choice("ple_embedding_dtype", ("float8_e4m3fn", "nvfp4")) if text.has("ple_embedding_dtype") else None,
        )  # fmt: skip

    @property
    def gdn_channels(self) -> int:
        """Convolved channels of a GDN layer: q, k and v of all heads."""
        return 2 * self.gdn_key_heads * self.gdn_key_dim + self.gdn_value_heads * self.gdn_value_dim

    @property
    def gdn_width(self) -> int:
        """Output channels of a GDN layer before its output projection."""
        return self.gdn_value_heads * self.gdn_value_dim

    @property
    def dense_positions(self) -> int:
        """Positions below this see everything before them: all their complete index blocks fit the selection."""
        return self.selection

    @property
    def selection(self) -> int:
        """Most tokens a query attends to: the selected blocks and the open one."""
        return self.index_topk * self.index_ratio + self.index_ratio - 1

    @property
    def ngram_total_heads(self) -> int:
        """Hash heads over all n-gram orders."""
        return (self.ngram - 1) * self.ngram_heads

    @property
    def ngram_width(self) -> int:
        """Values in one row of an n-gram table."""
        return self.ple_dim // self.ngram_total_heads

    @property
    def ple_history(self) -> int:
        """Past columns the n-gram convolution needs."""
        return (self.ple_conv_width - 1) * self.ngram

    def ngram_multipliers(self, layer: int) -> tuple[int, ...]:
        """Hash multipliers [ngram] of decoder layer `layer` (one of ple_layers)."""
        return ngram_hash.multipliers(self.vocab, self.ngram, self.seed, self.ple_layers.index(layer))

    def ngram_primes(self, layer: int) -> tuple[int, ...]:
        """Table sizes [ngram_total_heads] of decoder layer `layer`."""
        return ngram_hash.primes(self.ngram_base, self.ngram_total_heads, self.ple_layers.index(layer))

    def ngram_offsets(self, layer: int) -> tuple[int, ...]:
        """First table row of every hash head of decoder layer `layer`."""
        return ngram_hash.offsets(self.ngram_primes(layer))

    def ngram_rows(self, layer: int) -> int:
        """Rows of the n-gram table of decoder layer `layer`, padding included."""
        return ngram_hash.padded_rows(self.ngram_primes(layer), self.ngram_divisor)

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ConfigError unless every sharded dimension divides over `size` ranks; names the first that does not."""
        for name, count in (
            ("num_attention_heads", self.heads),
            ("linear_num_key_heads", self.gdn_key_heads),
            ("moe_intermediate_size", self.expert_width),
            ("shared_expert_intermediate_size", self.shared_width),
        ):
            if count % size:
                raise ConfigError(f"tensor parallel size is {size}; must divide the model's {name} {count}", param="parallel.tensor")
        if self.kv_heads % size and size % self.kv_heads:
            legal = f"a divisor or a multiple of num_key_value_heads {self.kv_heads}"
            raise ConfigError(f"tensor parallel size is {size}; must be {legal}", param="parallel.tensor")


def _layer_types(text: Fields, layers: int) -> tuple[LayerType, ...]:
    """One type per layer; without a list, every full_attention_interval-th layer is sparse attention."""
    if not text.has("layer_types"):
        interval = text.integer("full_attention_interval", default=4)
        return tuple("gdn" if (i + 1) % interval else "qsa" for i in range(layers))
    names = text.raw["layer_types"]
    if not isinstance(names, list) or len(names) != layers:
        raise text.error("layer_types", f"a list of num_hidden_layers = {layers} names")
    unknown = sorted({str(name) for name in names} - set(_LAYER_TYPES))
    if unknown:
        raise text.error("layer_types", f"names out of {', '.join(_LAYER_TYPES)} (not {', '.join(unknown)})")
    return tuple(_LAYER_TYPES[name] for name in names)


def _indexer(text: Fields, needed: bool, rotary: int) -> tuple[int, int, int, int]:
    """(heads, head dim, blocks per query, tokens per block) of the index; ones when no layer is sparse."""
    if not needed:
        return 1, 1, 1, 1
    heads, dim, budget = text.integer("indexer_n_heads"), text.integer("indexer_head_dim"), text.integer("indexer_budget")
    text.integer("indexer_kv_heads", high=1)
    ratio = text.integer("indexer_compress_ratio")
    if GRID % ratio:
        raise text.error("indexer_compress_ratio", f"a divisor of {GRID}, so that no index block straddles two token blocks")
    if budget % ratio:
        raise text.error("indexer_budget", f"a multiple of indexer_compress_ratio {ratio}")
    if rotary > dim:
        raise text.error("indexer_head_dim", f"at least the {rotary} rotary dims of the attention heads")
    return heads, dim, budget // ratio, ratio


def _ple_layers(text: Fields, types: tuple[LayerType, ...]) -> tuple[int, ...]:
    """0-based n-gram layers; they must be linear attention."""
    listed = sorted(set(text.integers("ple_layer_ids", low=1, high=len(types), default=())))
    if sparse := [i for i in listed if types[i - 1] != "gdn"]:
        raise text.error("ple_layer_ids", f"linear_attention layers, counted from 1 (not {sparse})")
    return tuple(i - 1 for i in listed)


def _dtype(top: Fields, text: Fields) -> str:
    for fields in (text, top):
        for name in ("dtype", "torch_dtype"):
            if fields.has(name):
                return fields.choice(name, ("float32", "float16", "bfloat16"))
    return "bfloat16"


def _quantization(top: Fields, text: Fields) -> str | None:
    for fields in (top, text):
        if fields.has("quantization_config"):
            found = fields.below("quantization_config")
            method = found.raw.get("quant_method")
            if not isinstance(method, str):
                raise found.error("quant_method", "a string")
            return method
    return None
