"""The part of a chat request that makes the prompt: messages, tools, thinking and how the prompt ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from revolta_serve.api.errors import UnsupportedParameterError
from revolta_serve.api.fields import Fields
from revolta_serve.api.messages import read_messages
from revolta_serve.errors import RequestError
from revolta_serve.text.boundaries import Marks, chat_marks
from revolta_serve.text.chat_template import ChatTemplate
from revolta_serve.text.tokenizer import Piece, Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
THINKING_DEFAULT = False
MESSAGE_START = "<|im_start|>"
"""Opens every message of a rendered prompt, and the answer."""
RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Template variables that are fields of the request."""


@dataclass(frozen=True)
class ChatPrompt:
    """Everything the chat template is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool

    def render(self, template: ChatTemplate) -> list[Piece]:
        """The prompt, for Tokenizer.encode_pieces. Raises RequestError when the template refuses the messages."""
        pieces = template.render(
            self.messages,
            tools=self.tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            variables=self.variables,
        )
        if all(piece == "" for piece in pieces):
            raise RequestError("messages: the chat template renders an empty prompt from them", param="messages")
        return pieces

    def marks(self, ids: Sequence[int], tokenizer: Tokenizer) -> Marks:
        """Positions in its ids at which the conversation may part from others (text.boundaries)."""
        system = bool(self.tools) or any(message["role"] == "system" for message in self.messages[:1])
        return chat_marks(ids, tokenizer.added.get(MESSAGE_START), system=system, generation=self.add_generation_prompt)


def read_chat_prompt(fields: Fields) -> ChatPrompt:
    """Check the fields; RequestError names the one at fault."""
    messages = read_messages(fields)
    continues = fields.boolean("continue_final_message", False)
    generates = fields.boolean("add_generation_prompt", not continues)
    if continues and generates:
        raise RequestError("continue_final_message and add_generation_prompt exclude each other; send one", param="continue_final_message")
    if continues:
        _check_continued(messages)
    return ChatPrompt(messages, _tools(fields), _variables(fields), generates, continues)


def _check_continued(messages: list[dict[str, Any]]) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        raise RequestError("continue_final_message: the last message must be an assistant message", param="continue_final_message")
    if "tool_calls" in last:
        raise RequestError("continue_final_message: a message with tool_calls cannot be continued", param="continue_final_message")


def _variables(fields: Fields) -> dict[str, Any]:
    """Template variables. Thinking: chat_template_kwargs.enable_thinking, else reasoning_effort, else off."""
    effort = fields.choice("reasoning_effort", EFFORTS, None)
    given = fields.object("chat_template_kwargs")
    for name in RESERVED:
        if name in given.raw:
            raise RequestError(f"{given.at(name)}: is a field of the request itself; set it there", param=given.at(name))
    thinking = THINKING_DEFAULT if effort is None else effort != "none"
    return {**given.raw, "enable_thinking": given.boolean("enable_thinking", thinking)}


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    """Tools are shown to the model; calling them is not supported, and only tool_choice none says that none is expected."""
    tools = fields.array("tools")
    choice = fields.raw.get("tool_choice")
    if tools is None:
        if choice not in (None, "none"):
            raise RequestError("tool_choice: there are no tools to choose from; send tools or leave it out", param="tool_choice")
        return None
    if not tools:
        raise fields.fail("tools", "a list of at least one tool")
    for tool in fields.objects("tools"):
        if tool.choice("type", ("function",), None) is None:
            raise tool.fail("type", '"function"')
        function = tool.object("function")
        if not function.string("name", ""):
            raise function.fail("name", "the name of a function")
        function.string("description", None)
        function.object("parameters")
    if choice != "none":
        raise UnsupportedParameterError('tools: calling tools is not supported; send tool_choice "none" or leave tools out', param="tools")
    return tools
