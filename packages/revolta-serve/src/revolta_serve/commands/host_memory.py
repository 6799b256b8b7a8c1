"""Will weights and pools fit into this machine's memory? Asked before anything is loaded: a killed process cannot say why."""

from revolta_serve.cache.capacity import Capacity, size
from revolta_serve.cache.layout import ELEMENT_BYTES
from revolta_serve.config import ServeConfig
from revolta_serve.errors import ConfigError
from revolta_serve.memory import available_bytes
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.weights.names import parameters


def weight_bytes(config: ServeConfig, model: ModelConfig) -> int:
    """Bytes of all parameters of all ranks as they are kept, those that a checkpoint may leave out not included."""
    ranks, act = config.parallel.tensor, ELEMENT_BYTES[config.model.dtype]
    every = (parameter for rank in range(ranks) for parameter in parameters(model, rank, ranks))
    return sum(parameter.nbytes(act) for parameter in every if not parameter.optional)


def check_memory(config: ServeConfig, model: ModelConfig, planned: Capacity) -> None:
    """Raise ConfigError when weights and pools of all ranks, which share this machine's memory, are more than it has left."""
    ranks, weights, available = config.parallel.tensor, weight_bytes(config, model), available_bytes()
    pools = ranks * (planned.kv_bytes + planned.state_bytes)
    if weights + pools > available:
        raise ConfigError(
            f"weights of {size(weights)} and a cache of {size(pools)} in {ranks} process{'es' if ranks > 1 else ''} are more than the "
            f"{size(available)} of memory that are available; lower cache.memory_bytes={config.cache.memory_bytes} "
            f"(--kv-cache-memory-bytes) or schedule.max_model_len={config.schedule.max_model_len} (--max-model-len)"
        )
