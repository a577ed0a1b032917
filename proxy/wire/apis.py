"""The APIs by which text is generated: where each is, and how its requests, streams and errors are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.wire.messages import message_error_frame, peek_message, read_message_event, read_message_usage
from proxy.wire.openai import peek, read_chunk, read_usage
from proxy.wire.responses import peek_response, read_response_event, read_response_usage, response_error_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.wire.errors import ErrorAnswer
    from proxy.wire.openai import ChunkView, RequestView, Usage


@dataclass(frozen=True, slots=True)
class Api:
    """One of them."""

    path: str
    operation: str
    """As OpenTelemetry's GenAI conventions have it."""
    peek: Callable[[bytes], RequestView]
    read_event: Callable[[bytes], ChunkView]
    read_usage: Callable[[bytes], Usage]
    error_frame: Callable[[ErrorAnswer], bytes]
    """The event that ends a stream which was cut."""
    is_chat: bool = False
    """Whether its body is that of a chat completion: only such prompts and those of completions can be cut."""
    is_openai: bool = True
    """Whether its streams are those of completions: usage comes if it is asked for, and ``[DONE]`` at the end."""


CHAT = Api(
    "/v1/chat/completions",
    "chat",
    lambda body: peek(body, chat=True),
    read_chunk,
    read_usage,
    lambda told: told.sse_frame(),
    is_chat=True,
)
COMPLETIONS = Api(
    "/v1/completions",
    "text_completion",
    lambda body: peek(body, chat=False),
    read_chunk,
    read_usage,
    lambda told: told.sse_frame(),
)
RESPONSES = Api(
    "/v1/responses",
    "generate_content",
    peek_response,
    read_response_event,
    read_response_usage,
    lambda told: response_error_frame(told.body()),
    is_openai=False,
)
MESSAGES = Api(
    "/v1/messages",
    "chat",
    peek_message,
    read_message_event,
    read_message_usage,
    lambda told: message_error_frame(told.anthropic_body()),
    is_openai=False,
)
APIS = {api.path: api for api in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}
"""By path."""
