"""Request bodies: the few fields that matter to an engine without a model, and vLLM's refusals.

Text counts as one token per four characters, of all messages together for chat; token ids count exactly. A chat is
its messages' text end to end: who says what makes no difference to the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, TypeVar

import msgspec

from proxy.sim.http.prompts import block_hashes, token_ids

_COMPLETION_TOKENS = 16
_CHAT_TOKENS = 256
"""Answer lengths where the client names none. vLLM lets a chat fill its context; a model would have stopped before."""


class ApiError(Exception):
    """A refusal in vLLM's shape: ``{"error": {"message", "type", "param", "code"}}``."""

    def __init__(
        self,
        message: str,
        *,
        error_type: str = "BadRequestError",
        param: str | None = None,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
    ) -> None:
        super().__init__(message)
        self.status = status
        self._error = {"message": message, "type": error_type, "param": param, "code": int(status)}

    @property
    def body(self) -> bytes:
        return msgspec.json.encode({"error": self._error})


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Part(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


_Prompt = str | list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]


class _Generation(msgspec.Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    cache_salt: str | None = None


class _Completion(_Generation, kw_only=True):
    prompt: _Prompt


class _Chat(_Generation, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None


class _Tokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[_Message] | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What a client asked for, checked and in tokens."""

    chat: bool
    prompt_tokens: int
    output_tokens: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    """Usage in every chunk; vLLM grants it only together with ``include_usage``."""
    hashes: tuple[bytes, ...] = ()
    """Of the prompt's full blocks, for the prefix cache."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server serves: its one model, and the longest prompt and answer together, in tokens."""

    model: str
    max_model_len: int
    block_tokens: int = 16


def read_completion(body: bytes, limits: Limits) -> Generation:
    """Read the body of ``/v1/completions``.

    Raises:
        ApiError: the body is malformed, names another model or does not fit the context.
    """
    wanted = _decode(body, _Completion)
    if not wanted.prompt and not isinstance(wanted.prompt, str):
        raise ApiError("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    ids = token_ids(wanted.prompt) if isinstance(wanted.prompt, str) else wanted.prompt
    return _check(wanted, limits, ids, wanted.max_tokens, _COMPLETION_TOKENS)


def read_chat(body: bytes, limits: Limits) -> Generation:
    """Read the body of ``/v1/chat/completions``.

    Raises:
        ApiError: the body is malformed, names another model or does not fit the context.
    """
    wanted = _decode(body, _Chat)
    allowed = wanted.max_tokens if wanted.max_completion_tokens is None else wanted.max_completion_tokens
    return _check(wanted, limits, token_ids(_text(wanted.messages)), allowed, _CHAT_TOKENS)


def read_tokenize(body: bytes, limits: Limits) -> list[int]:
    """Read the body of ``/tokenize`` and return the token ids of its prompt or messages.

    Raises:
        ApiError: the body is malformed or names another model.
    """
    wanted = _decode(body, _Tokenize)
    _check_model(wanted.model, limits)
    if wanted.messages is not None:
        return token_ids(_text(wanted.messages))
    if wanted.prompt is None:
        raise ApiError("1 validation error:\n  prompt: Field required", error_type="Bad Request", param="prompt")
    return token_ids(wanted.prompt)


_T = TypeVar("_T", _Completion, _Chat, _Tokenize)


def _decode(body: bytes, shape: type[_T]) -> _T:
    try:
        return msgspec.json.decode(body, type=shape)
    except RecursionError:
        message = "JSON decode error: nested too deeply"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"1 validation error:\n  {error}"
        if "$.prompt[" in message and "got `" in message:
            message += "; the simulated engine takes one prompt per request, as text or as token ids"
    raise ApiError(message, error_type="Bad Request")


def _check(
    wanted: _Completion | _Chat, limits: Limits, ids: list[int], allowed: int | None, default: int
) -> Generation:
    _check_model(wanted.model, limits)
    prompt_tokens = len(ids)
    options = wanted.stream_options or _StreamOptions()
    if wanted.stream_options is not None and not wanted.stream:
        message = "Stream options can only be defined when `stream=True`."
        raise ApiError(message, error_type="Bad Request", param="stream_options")
    if wanted.n not in (None, 1):
        raise ApiError(f"The simulated engine makes one choice per request, not n={wanted.n}.", param="n")
    longest = limits.max_model_len
    if allowed is not None and allowed < 1:
        raise ApiError(f"max_tokens must be at least 1, got {allowed}.", param="max_tokens")
    if allowed is not None and allowed > longest:
        message = (
            f"max_tokens={allowed} cannot be greater than max_model_len={longest}. Please request fewer output tokens."
        )
        raise ApiError(message, param="max_tokens")
    if prompt_tokens >= longest:
        message = (
            f"This model's maximum context length is {longest} tokens. However, your prompt contains {prompt_tokens} "
            f"input tokens, which exceeds this limit even without any output tokens. "
            f"Please reduce the length of the input prompt."
        )
        raise ApiError(message, param="input_tokens")
    return Generation(
        chat=isinstance(wanted, _Chat),
        prompt_tokens=prompt_tokens,
        # As in vLLM, an answer that would leave the context is shortened, not refused.
        output_tokens=min(default if allowed is None else allowed, longest - prompt_tokens),
        stream=bool(wanted.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        hashes=block_hashes(ids, limits.block_tokens, wanted.cache_salt or ""),
    )


def _check_model(model: str | None, limits: Limits) -> None:
    if model and model != limits.model:
        raise ApiError(
            f"The model `{model}` does not exist.",
            error_type="NotFoundError",
            param="model",
            status=HTTPStatus.NOT_FOUND,
        )


def _text(messages: list[_Message]) -> str:
    return "".join(map(_text_of, messages))


def _text_of(message: _Message) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "".join(part.text or "" for part in content)
