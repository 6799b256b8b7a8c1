"""What the scheduler must respect."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Tokens, requests, blocks, slots; how the queue is ordered; what may be reused."""

    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_cap: int
    """Prompt tokens of a step in which a request decodes; a multiple of 64."""
    max_model_len: int
    max_queue: int
    num_blocks: int
    num_slots: int
    history: int
    """Ids before a slice that the n-gram hash needs: ngram_size - 1."""
    mark: int
    """The id that stands for tokens before the request."""
    width: int = 8
    """Known answer tokens a request may compute again in one step."""
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill: int = 0
    """Prompt tokens of one request in a step while others run or wait, a multiple of 64; 0: no limit."""
    bypass_limit: int = 4
    """Requests that may overtake one that waits for blocks."""
    bypass_seconds: float = 60.0
    """Seconds of waiting after which nobody overtakes a request."""
    stall_steps: int = 500
    """Steps a running request may be left out of before it is preempted, and the second time ended."""
    prefix: bool = True
    """Reuse what other requests computed."""
    generated: bool = True
    """Reuse states over generated text too."""
    block_times: bool = False
    """Tell how long cached blocks live."""
    domain: str = ""
    """What must be equal for cached work to be interchangeable."""
