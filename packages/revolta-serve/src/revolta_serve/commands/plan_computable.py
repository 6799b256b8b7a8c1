"""What can be planned but not served yet."""

from revolta_serve.config import ServeConfig
from revolta_serve.errors import CheckpointError, ConfigError
from revolta_serve.model.model_config import ModelConfig


def check_computable(config: ServeConfig, model: ModelConfig) -> None:
    """Raise for what can be planned but not served yet, all of it in one message: ConfigError, or CheckpointError for packed weights."""
    wrong = []
    if config.cache.kv_format not in ("auto", config.model.dtype):
        wrong.append(f"cache.kv_format={config.cache.kv_format} (use auto)")
    if config.cache.index_ranks > 1:
        wrong.append(f"cache.index_ranks={config.cache.index_ranks} (use 1)")
    if config.cache.device_bytes:
        wrong.append(f"cache.device_bytes={config.cache.device_bytes} (use 0: it runs on the CPU)")
    if config.speculate.method != "none":
        wrong.append(f"speculate.method={config.speculate.method} (use none)")
    if config.model.vision:
        wrong.append("model.vision=true (use false)")
    if config.model.ngram_tables != "device":
        wrong.append(f"model.ngram_tables={config.model.ngram_tables} (use device)")
    if wrong:
        raise ConfigError(f"this version can plan but not serve {', '.join(wrong)}; change them with --set, or choose --profile cpu")
    if model.quantization is not None or model.ple_storage is not None:
        kind = model.quantization or f"ple_embedding_dtype {model.ple_storage}"
        raise CheckpointError(f"{config.model.path}: stored as {kind}; this version serves float32, float16 and bfloat16 checkpoints only")
