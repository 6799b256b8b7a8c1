"""What every handler works with, built once per server."""

import time
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version

from starlette.requests import Request

from revolta_serve.api.engine_port import EnginePort
from revolta_serve.api.errors import ModelNotFoundError
from revolta_serve.api.fields import Fields
from revolta_serve.config import ServeConfig
from revolta_serve.errors import ContextLengthError, EngineUnavailableError, RequestError
from revolta_serve.metrics import Metrics
from revolta_serve.text.chat_template import ChatTemplate
from revolta_serve.text.defaults import GenerationDefaults
from revolta_serve.text.reasoning import ThinkTokens
from revolta_serve.text.tokenizer import Tokenizer

VERSION = version("revolta-serve")


@dataclass(frozen=True)
class Api:
    """The parts of a running server. The engine may still be starting."""

    config: ServeConfig
    engine: EnginePort
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults
    think: ThinkTokens
    metrics: Metrics
    created: float = field(default_factory=time.time)

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.config.served_names[0]

    @property
    def fingerprint(self) -> str:
        """system_fingerprint: differs when version or configuration differ."""
        return f"revolta-{VERSION}-tp{self.config.parallel.tensor}-{self.config.digest()[:8]}"

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        return max(len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.size))

    def check_characters(self, count: int, param: str) -> None:
        """Raise ContextLengthError for a text of so many characters that encoding it is not needed to know that it cannot fit."""
        limit = self.engine.max_model_len
        # A character has at least one byte. Normalising (NFC) may put characters together, into at least half as many bytes.
        most = 2 * limit * self.longest_token
        if count > most:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens, but the prompt has {count} characters, and so many tokens "
                f"never spell more than {most}. Shorten the prompt.",
                param=param,
            )

    def check_sequences(self, prompts: int, runs: int, param: str) -> None:
        """Raise RequestError for more answers than the engine can ever admit: it admits those of one request together."""
        schedule = self.config.schedule
        most = schedule.max_queue + schedule.max_num_seqs
        if prompts * runs > most:
            raise RequestError(
                f"{param}: {prompts} prompts of {runs} different answers each are {prompts * runs} answers; at most {most} are taken at "
                f"once (schedule.max_queue {schedule.max_queue} and schedule.max_num_seqs {schedule.max_num_seqs}): send several requests",
                param=param,
            )

    def check_model(self, fields: Fields) -> None:
        """Raise ModelNotFoundError unless the request names a served model or none."""
        name = fields.string("model", None)
        if name and name not in self.config.served_names:
            served = ", ".join(self.config.served_names)
            raise ModelNotFoundError(f"model: {name[:200]!r} is not served here; use {served}", param="model")

    def check_ready(self) -> None:
        """Raise EngineUnavailableError unless the engine admits requests."""
        reasons = {"starting": "the model is still loading; try again later", "draining": "the server is shutting down"}
        if self.engine.phase != "ready":
            raise EngineUnavailableError(reasons.get(self.engine.phase, "the engine has stopped"))


def api_of(request: Request) -> Api:
    """The server a request came to."""
    api = request.app.state.api
    assert isinstance(api, Api)
    return api
