"""Messages to prompt pieces through the checkpoint's own Jinja template.

The template's markup is trusted, the text inside messages, tools and arguments is not: a user who writes `<|im_end|>` must get ten
characters, not the end of the turn. So each spelling of an added token inside a caller's string is replaced by one private
character before rendering; after rendering, the added tokens that are still visible are the template's own, the text is cut at
them, and the private characters become what they stood for in the plain pieces. Nothing else changes: a plain piece reaches the
BPE exactly as it would have without the detour.

A spelling can also be assembled at a seam (one string ends in `<|im_`, the next begins with `end|>`). A string whose end could
begin a spelling, or whose start could end one, gets a private character that stands for nothing at that edge.
"""

import datetime
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from revolta_serve.errors import CheckpointError, RequestError
from revolta_serve.text.tokenizer import Piece, Tokenizer

PRIVATE = range(0xF0000, 0x10FFFE)
"""Private-use planes 15 and 16: what the stand-ins are taken from, leaving out those a caller's text contains."""


class ChatTemplate:
    """A compiled template, immutable and safe to use from several threads."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None, origin: str = "chat template"
    ) -> None:
        """`variables` are constants every rendering sees (bos_token, eos_token, ...)."""
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{origin}: not a valid template: {error}") from error

    @classmethod
    def load(cls, directory: str | Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Read chat_template.jinja, else `chat_template` of tokenizer_config.json. Raises CheckpointError when there is neither."""
        config_path = Path(directory) / "tokenizer_config.json"
        template_path = Path(directory) / "chat_template.jinja"
        try:
            config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
            source = template_path.read_text(encoding="utf-8") if template_path.exists() else config.get("chat_template")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory}: cannot read the chat template: {error}") from error
        if not isinstance(source, str):
            raise CheckpointError(f"{directory}: no chat_template.jinja and no chat_template string in tokenizer_config.json")
        return cls(source, tokenizer, _special_variables(config), str(template_path if template_path.exists() else config_path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Piece]:
        """Pieces of the prompt, for Tokenizer.encode_pieces.

        With `continue_final_message` the prompt ends exactly where the content of the last message ends, spaces included.
        Raises RequestError when the template refuses the messages or fails on them.
        """
        shield = Shield(self._tokenizer.added, (messages, tools, variables))
        shielded = shield.hide(list(messages))
        if continue_final_message:
            shielded[-1] = {**shielded[-1], "content": f"{shielded[-1].get('content') or ''}{shield.end}"}
        context = {
            **self._variables,
            **shield.hide(dict(variables or {})),
            "messages": shielded,
            "tools": shield.hide(list(tools)) if tools else None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self._text(context)
        except Exception as error:  # whatever a template trips over comes from the messages it was given
            raise RequestError(f"the chat template cannot render these messages: {error}", param="messages") from error
        if continue_final_message:
            if text.count(shield.end) != 1:
                raise RequestError("continue_final_message: the chat template does not render the last message once", param="messages")
            text = text[: text.index(shield.end)]
        return [piece if isinstance(piece, int) else shield.reveal(piece) for piece in self._tokenizer.split(text)]

    def _text(self, variables: dict[str, Any]) -> str:
        """What the template writes. Macros and the context they are defined in keep each other: emptied, it does not keep the messages."""
        context = self._template.new_context(variables)
        try:
            return "".join(self._template.root_render_func(context))
        finally:
            context.vars.clear()
            context.parent.clear()


class Shield:
    """Stand-ins for the added tokens spelled in one request's strings."""

    def __init__(self, literals: Iterable[str], values: Any) -> None:
        self._literals = sorted(literals, key=len, reverse=True)
        taken = {ord(char) for text in _strings(values) for char in text if ord(char) >= PRIVATE.start}
        free = (chr(code) for code in PRIVATE if code not in taken)
        self.end = next(free)
        """Marks the end of a continued message; never revealed."""
        self._edge = next(free)
        self._stand_ins = {literal: next(free) for literal in self._literals}
        self._meaning = {ord(self._edge): ""} | {ord(char): literal for literal, char in self._stand_ins.items()}
        self._pattern = re.compile("|".join(map(re.escape, self._literals))) if self._literals else None
        self._heads = {literal[:n] for literal in self._literals for n in range(1, len(literal))}
        self._tails = {literal[n:] for literal in self._literals for n in range(1, len(literal))}
        self._longest = max(map(len, self._literals), default=0)

    def hide(self, value: Any) -> Any:
        """A copy of `value` with every string in it shielded, keys included (but for their edges: templates look keys up)."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self._replace(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        """`text` with the stand-ins put back."""
        return text.translate(self._meaning)

    def _replace(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._stand_ins[match.group()], text) if self._pattern else text

    def _hide_text(self, text: str) -> str:
        text = self._replace(text)
        edge = range(1, min(self._longest, len(text) + 1))
        before = self._edge if any(text[:n] in self._tails for n in edge) else ""
        after = self._edge if any(text[-n:] in self._heads for n in edge) else ""
        return f"{before}{text}{after}"


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment chat templates are written for: that of transformers, without its assistant-mask block."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes HTML, which no chat template wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _special_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... of tokenizer_config.json, whose values are strings or {"content": string}."""
    variables = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            variables[name] = value
    return variables
