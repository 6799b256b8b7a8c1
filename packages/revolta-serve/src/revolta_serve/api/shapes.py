"""The JSON objects of the OpenAI dialect. A field that defaults to UNSET is left out; None is written as null."""

from msgspec import UNSET, Raw, Struct, UnsetType


class PromptDetails(Struct, frozen=True):
    """Prompt tokens whose computation was reused."""

    cached_tokens: int


class CompletionDetails(Struct, frozen=True):
    """Generated tokens that were reasoning."""

    reasoning_tokens: int


class Usage(Struct, frozen=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class TopLogprob(Struct, frozen=True, kw_only=True):
    """One of the most likely tokens at a place."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatLogprob(Struct, frozen=True, kw_only=True):
    """A token of the content and those that were as likely or likelier."""

    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """The tokens that a content, or a part of it, is made of: each a ChatLogprob, JSON already."""

    content: list[Raw]
    refusal: None = None


class TextLogprobs(Struct, frozen=True, kw_only=True):
    """The tokens of a text: four lists of one length. The first token of an echoed prompt has no logprobs."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[Raw | None] = []
    """{text: logprob}, JSON already."""
    text_offset: list[int] = []
    """Characters of the whole text before that of the token."""


class PromptLogprob(Struct, frozen=True, kw_only=True):
    """What the model thought of one token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


class ChatMessage(Struct, frozen=True, kw_only=True):
    """The answer of one choice. Reasoning is given under both names clients look for."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None
    reasoning_content: str | None


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One choice of a whole answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    """A whole chat answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None = None
    system_fingerprint: str
    usage: Usage
    prompt_logprobs: list[Raw | None] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class ChatDelta(Struct, frozen=True, kw_only=True):
    """What one chunk adds to a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One event of a streamed chat answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class TextChoice(Struct, frozen=True, kw_only=True):
    """One choice of a completion, whole or a part of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: list[Raw | None] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class TextCompletion(Struct, frozen=True, kw_only=True):
    """A completion, or one event of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Struct, frozen=True, kw_only=True):
    """One entry of /v1/models."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "revolta"
    root: str
    parent: None = None
    max_model_len: int
    thinking_default: bool
    permission: tuple[()] = ()


class ModelList(Struct, frozen=True, kw_only=True):
    """The answer of /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class Tokens(Struct, frozen=True, kw_only=True):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET
