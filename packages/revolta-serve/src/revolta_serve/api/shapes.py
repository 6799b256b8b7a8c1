"""The JSON objects of the OpenAI dialect. A field that defaults to UNSET is left out; None is written as null."""

from msgspec import UNSET, Struct, UnsetType


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
    logprobs: None = None
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
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


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
    logprobs: None = None
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


class TextChoice(Struct, frozen=True, kw_only=True):
    """One choice of a completion, whole or a part of it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


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
