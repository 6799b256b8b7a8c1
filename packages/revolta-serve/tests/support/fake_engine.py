"""An engine process whose model is a rule: the next token is the last one plus one. Started as a script by the client's tests.

Some prompt tokens make a rank misbehave, so that a test can choose the fault and the moment.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

from revolta_serve.cache.capacity import capacity
from revolta_serve.config import ServeConfig
from revolta_serve.engine import process
from revolta_serve.errors import CheckpointError
from revolta_serve.model.model_config import ModelConfig
from revolta_serve.types import SliceResult, StartupReport, StepPlan, StepResult

VOCAB = 1000
RAISE, HANG, DIE, CORRUPT, RANK_1_DIES, SLOW, RANK_1_BREAKS = 990, 991, 992, 993, 994, 995, 996
COMMAND = (sys.executable, "-P", __file__)

CONFIG = {
    "model_type": "qwen4_exp_text", "num_hidden_layers": 2, "hidden_size": 16, "vocab_size": VOCAB, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4,
    "linear_value_head_dim": 4, "layer_types": ["linear_attention", "full_attention"], "max_position_embeddings": 2048,
    "indexer_n_heads": 1, "indexer_head_dim": 8, "indexer_kv_heads": 1, "indexer_compress_ratio": 4, "indexer_budget": 64,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "eos_token_id": 0,
    "ple_layer_ids": [1], "ple_embed_dim": 16,
}  # fmt: skip


def write_model(directory: Path, load: str = "fine") -> Path:
    """A directory with the config.json of a model that nobody will load.

    load: fine | refuse | die | slow, or how rank 1 differs: other weights | other pools.
    """
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "load").write_text(load)
    return directory


class FakeRunner:
    """Follows plans without a model."""

    def __init__(self, config: ServeConfig, rank: int) -> None:
        how = (Path(config.model.path) / "load").read_text()
        if how == "refuse":
            raise CheckpointError("tensor lm_head.weight of model.safetensors is missing")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "slow":
            time.sleep(60)
        planned = capacity(config, ModelConfig.load(config.model.path))
        self.rank = rank
        self.slow: set[int] = set()
        weights = "other" if rank and how == "other weights" else "fake"
        blocks, slots = (1, 1) if rank and how == "other pools" else (planned.num_blocks, planned.num_slots)
        self.report = StartupReport(
            rank=rank, weight_bytes=0, kv_bytes=planned.kv_bytes, state_bytes=planned.state_bytes, num_blocks=blocks, num_slots=slots,
            load_seconds=0.0, fingerprint=weights,
        )  # fmt: skip

    @classmethod
    def load(cls, config: ServeConfig, rank: int) -> "FakeRunner":
        return cls(config, rank)

    def step(self, plan: StepPlan) -> StepResult:
        results = []
        for piece in plan.slices:
            first = piece.tokens[0]
            if piece.kind == "prefill":
                self._misbehave(first)
                if first == SLOW:
                    self.slow.add(piece.request)
            if piece.request in self.slow:
                time.sleep(0.02)
            corrupt = piece.kind == "prefill" and first == CORRUPT
            token = (piece.tokens[-1] + 1) % VOCAB
            results.append(SliceResult(piece.request, (token,) if piece.sample and not corrupt else (), corrupt))
        rows = {kind: sum(len(piece.tokens) for piece in plan.slices if piece.kind == kind) for kind in ("decode", "prefill")}
        return StepResult(step=plan.step, slices=tuple(results), decode_rows=rows["decode"], prefill_rows=rows["prefill"])

    def _misbehave(self, token: int) -> None:
        if self.rank == 0 and token == RAISE:
            raise RuntimeError("injected fault")
        if self.rank == 0 and token == HANG:
            time.sleep(60)
        if self.rank == 0 and token == DIE:
            time.sleep(0.1)  # so that the admission of the request is on its way
            os.kill(os.getpid(), signal.SIGKILL)
        if token == RANK_1_DIES:
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # rank 0 waits in a collective that never returns
        if token == RANK_1_BREAKS:
            if self.rank == 1:
                time.sleep(0.1)
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("connection closed by peer")  # rank 0 notices before anyone else


if __name__ == "__main__":
    sys.exit(process.main(FakeRunner.load))
