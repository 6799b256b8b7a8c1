"""One request as the scheduler sees it: its tokens, how far they are computed, what it holds."""

from dataclasses import dataclass

from revolta_serve.types import FinishReason, GenerateRequest


@dataclass(slots=True, eq=False)
class Request:
    """A request between admission to the queue and its last output."""

    number: int
    """The engine's name of it; never used again."""
    source: GenerateRequest
    tokens: list[int]
    """Prompt and answer so far. The last token of an answer has no K, V or state yet."""
    limit: int
    """Length at which the answer ends."""
    stops: frozenset[int]
    computed: int = 0
    """Tokens whose K, V and state are stored."""
    blocks: int = 0
    """Token blocks handed out to its slices."""
    slot: int = -1
    """State slot; -1 while waiting."""

    @classmethod
    def admit(cls, number: int, source: GenerateRequest, max_model_len: int) -> "Request":
        """Make the record of a request that fits max_model_len."""
        limit = min(len(source.prompt) + source.max_tokens, max_model_len)
        return cls(number, source, list(source.prompt), limit, frozenset(source.stop_token_ids))

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.source.prompt)

    @property
    def decoding(self) -> bool:
        """Whether the whole prompt is computed."""
        return self.computed >= self.prompt_length

    @property
    def stored_at_most(self) -> int:
        """Tokens that will ever be stored: the last token of an answer is never fed back."""
        return self.limit - 1

    def append(self, token: int) -> FinishReason | None:
        """Add one produced token and say whether it ends the answer: a stop id before a length."""
        self.tokens.append(token)
        if token in self.stops:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None
