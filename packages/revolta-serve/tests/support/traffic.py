"""Traffic of many clients: conversations of mixed requests.

Every conversation is drawn from a seed and its own number, and each of its requests from those and the answers before it. As answers do
not depend on who else is served, neither do requests: any of them can be had again, alone.
"""

import random
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from revolta_serve.weights.tiny_tokenizer import data
from support.answers import Answer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

TURNS = 5
"""Requests of a conversation. Exactly one of them is left by its client."""

LONGEST = 2048
"""Tokens of prompt and answer together: what schedule.max_model_len must be at least."""

MOST_PROMPT = 1600
"""Tokens of a prompt; a conversation that has grown longer starts anew."""

MOST_BYTES = 3600
"""Of the texts of a conversation, then. In the tiny tokenizer a token has 2.3 of them or more, English and nonsense alike."""

PATIENT_TOKENS = 400
"""Tokens of an answer that its client does not wait for: far more than can be ready when it leaves."""

MOST_TOKENS = 250
"""Of any other answer."""

PLAIN_IDS = range(5, 900)
"""Ids of any tiny tokenizer of 1,024 that are no control tokens."""


@dataclass(frozen=True, slots=True)
class Leave:
    """When a client closes the connection: so many seconds after it has sent its request, or after so many events of a stream.

    No events: once the response has begun.
    """

    after: Literal["seconds", "events"]
    amount: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    name: str
    """CONVERSATION.TURN; it begins the request's id in the server's log."""
    path: str
    fields: dict[str, Any]
    leave: Leave | None = None

    @property
    def body(self) -> dict[str, Any]:
        """What is sent."""
        return {**self.fields, "request_id": self.name}

    def alone(self) -> "Ask":
        """The same request with nothing to reuse, and waited for."""
        return replace(self, name=f"{self.name}.alone", fields={**self.fields, "cache_salt": f"alone {self.name}"}, leave=None)


Conversation = Generator[Ask, Answer | None, None]
"""Requests, each to be answered with `send`: None if its client has left."""


def conversation(seed: int, number: int) -> Conversation:
    """TURNS requests of one client.

    After each answer it goes on in one of four ways: a chat that grows, ids that grow, the same prompt once more, another prompt. A
    client that has left asks again, as people do.
    """
    rng = random.Random(f"{seed} {number}")
    left = rng.randrange(TURNS)
    talk: Chat | Ids | Texts = rng.choices((Chat, Ids, Texts), (5, 3, 2))[0](rng)
    for turn in range(TURNS):
        name = f"{number}.{turn}"
        if turn == left:
            yield _impatient(rng, name, talk.path, talk.prompt())
        else:
            answer = yield Ask(name, talk.path, talk.prompt() | _drawn(rng, talk.path))
            assert answer is not None, "it was waited for"
            if rng.random() < 0.85:
                talk.go_on(answer)


class Chat:
    """Messages under one of a few system prompts. Each answer becomes part of the next prompt."""

    path = CHAT

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._system = rng.choice((None, *_systems()))
        self._fields: dict[str, Any] = {}
        if rng.random() < 0.15:
            self._fields["cache_salt"] = rng.choice("ab")
        if rng.random() < 0.25:
            self._fields["reasoning_effort"] = "high"
        self._begin()

    def prompt(self) -> dict[str, Any]:
        return {**self._fields, "messages": list(self._messages)}

    def go_on(self, answer: Answer) -> None:
        said = answer.choices[0]
        message = {"role": "assistant", "content": said.text}
        if said.reasoning:
            message["reasoning"] = said.reasoning
        self._messages += [message, self._user()]
        if sum(len(text.encode()) for message in self._messages for text in message.values()) > MOST_BYTES:
            self._begin()

    def _begin(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system else []
        self._messages.append(self._user())

    def _user(self) -> dict[str, Any]:
        return {"role": "user", "content": passage(self._rng, _length(self._rng, 1200))}


class Ids:
    """A prompt of ids, the beginning of one of a few documents. It grows by exactly the ids of the answer, and some more."""

    path = COMPLETIONS

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._begin()

    def prompt(self) -> dict[str, Any]:
        return {"prompt": list(self._ids)}

    def go_on(self, answer: Answer) -> None:
        more = [*answer.choices[0].tokens, *self._rng.choices(PLAIN_IDS, k=self._rng.randrange(1, 40))]
        if len(self._ids) + len(more) > MOST_PROMPT:
            self._begin()
        else:
            self._ids += more

    def _begin(self) -> None:
        document = self._rng.choice(_documents())
        self._ids = [*document[: _length(self._rng, len(document))], *self._rng.choices(PLAIN_IDS, k=self._rng.randrange(1, 30))]


class Texts:
    """Prompts that have nothing to do with each other; some requests bring two."""

    path = COMPLETIONS

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._salt: dict[str, Any] = {"cache_salt": f"of {rng.random()}"} if rng.random() < 0.5 else {}
        self._draw()

    def prompt(self) -> dict[str, Any]:
        return {**self._salt, "prompt": self._text}

    def go_on(self, answer: Answer) -> None:
        self._draw()

    def _draw(self) -> None:
        texts = [passage(self._rng, _length(self._rng, 900)) for _ in range(1 + (self._rng.random() < 0.2))]
        self._text: str | list[str] = texts[0] if len(texts) == 1 else texts


def passage(rng: random.Random, tokens: int) -> str:
    """English text of about so many tokens, rather fewer."""
    text, characters = data("austen_excerpt.txt"), 5 * tokens // 2
    start = rng.randrange(len(text) - characters)
    return text[start : start + characters]


def _length(rng: random.Random, longest: int) -> int:
    """Mostly short, sometimes several blocks, now and then long."""
    return rng.randrange(*rng.choices(((1, 60), (60, 260), (longest // 2, longest)), (5, 4, 1))[0])


@cache
def _systems() -> tuple[str, ...]:
    rng = random.Random("system prompts")
    return tuple(passage(rng, tokens) for tokens in (40, 150, 500))


@cache
def _documents() -> tuple[list[int], ...]:
    rng = random.Random("documents")
    return tuple(rng.choices(PLAIN_IDS, k=tokens) for tokens in (200, 700, 1200))


def _impatient(rng: random.Random, name: str, path: str, prompt: dict[str, Any]) -> Ask:
    """A request that is left: in the queue, in its prompt, in its answer, streamed or not."""
    if rng.random() < 0.4:  # a long prompt that nobody has sent before: a few steps at least
        path, prompt = COMPLETIONS, {"prompt": rng.choices(PLAIN_IDS, k=rng.randrange(800, MOST_PROMPT))}
    seconds = Leave("seconds", rng.choice((0.0, 0.01, 0.03, 0.1, 0.3, 0.6)))
    leave = rng.choice((seconds, seconds, Leave("events", 0), Leave("events", rng.randrange(1, 25))))
    stream = leave.after == "events" or rng.random() < 0.3
    return Ask(name, path, prompt | {"max_tokens": PATIENT_TOKENS, "ignore_eos": True, "stream": stream, "temperature": 1.0}, leave)


def _drawn(rng: random.Random, path: str) -> dict[str, Any]:
    """Everything but the prompt of a request whose answer is read to its end."""

    def at(chance: float) -> bool:
        return rng.random() < chance

    tokens = rng.randrange(*rng.choices(((1, 8), (8, 30), (40, 100), (150, MOST_TOKENS)), (35, 50, 12, 3))[0])
    fields: dict[str, Any] = {"max_tokens": tokens, "return_token_ids": True, "stream": at(0.65), "temperature": 0}
    if at(0.65):
        fields |= {"temperature": rng.choice((0.3, 0.8, 1.0, 1.4)), "seed": rng.randrange(2**40)}
        fields |= {"top_p": rng.choice((1.0, 0.9)), "top_k": rng.choice((0, 5, 50)), "min_p": rng.choice((0.0, 0.05))}
    if fields["stream"] and at(0.6):
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": at(0.3)}
    if at(0.15):
        fields["n"] = 2
    if at(0.2):
        fields |= {"presence_penalty": rng.choice((0.5, 1.5)), "frequency_penalty": rng.choice((0.0, 0.7))}
    if at(0.1):
        fields["repetition_penalty"] = rng.choice((0.8, 1.3))
    if at(0.25):
        fields["stop"] = rng.sample(("th", " a", "e", "the ", "\n", "or not"), k=2)
    if at(0.1):
        fields |= {"min_tokens": min(tokens, 5), "include_stop_str_in_output": True}
    if at(0.2):
        fields["ignore_eos"] = True
    if at(0.1):
        fields["logit_bias"] = {str(rng.choice(PLAIN_IDS)): rng.choice((-100, 5, 20)) for _ in range(3)}
    if at(0.1):
        fields["bad_words"] = ["the", " of", "ing"]
    if at(0.05):
        fields["repetition_detection"] = {"max_pattern_size": 3, "min_count": 3}
    fields |= _chat_only(rng) if path == CHAT else _completion_only(rng)
    if not fields["stream"] and at(0.1):
        fields["prompt_logprobs"] = rng.randrange(3)
    return fields


def _chat_only(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if rng.random() < 0.3:
        fields |= {"logprobs": True, "top_logprobs": rng.randrange(4)}
    if rng.random() < 0.15:
        fields["thinking_token_budget"] = rng.randrange(12)
    return fields


def _completion_only(rng: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if rng.random() < 0.3:
        fields["logprobs"] = rng.randrange(4)
    if rng.random() < 0.08:
        fields["echo"] = True
    return fields
