"""Prompts as text, for chat: as many words as it takes for the server to count the tokens that were asked for.

Token ids have no need of this. A chat's length depends on the server's tokenizer and chat template, which it tells at
``/tokenize`` (vLLM's). If the common words of which prompts are made are one token each there, all that has to be known
is what the template adds; if they are not, each prompt is measured before the run and made longer or shorter until it
fits. What a server that does not tell makes of a prompt can be seen afterwards only, in its ``usage``.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import msgspec

from loadgen.content import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from proxy.sim.workload import ScheduledRequest

# Common English words: one token each for nearly every tokenizer, so n words are about n tokens.
_WORDS = ("about", "book", "city", "day", "each", "find", "good", "home", "last", "make", "new", "over", "play", "red")
_SHORT_WORD = " a"
"""A token, too, where words are; and less than one where characters are counted."""

_SAMPLES = (1, 65, 257)
_ROUNDS = 8
_MOST_SHORT_WORDS = 8
_AT_ONCE = 16
_LIMIT_SECONDS = 60.0


class Words(NamedTuple):
    """Of how many words a text is made."""

    words: int
    short: int = 0


@dataclass(frozen=True, slots=True)
class TextLengths:
    """How many words make a prompt of so many tokens."""

    overhead: int = 0
    """Tokens that the chat template adds."""
    fitted: Mapping[int, Words] = field(default_factory=dict)
    """By the request's index, where that was measured."""
    exact: bool = False
    """Whether the server has told, so that lengths are those asked for."""

    def text(self, request: ScheduledRequest, nonce: int) -> str:
        """Return the text of a request's prompt."""
        words = self.fitted.get(request.index) or Words(max(1, request.prompt_tokens - self.overhead))
        return make_text(request, nonce, words)


def make_text(request: ScheduledRequest, nonce: int, words: Words) -> str:
    """Return so many words of a request's stream, which begins alike for requests that share their beginnings."""
    ids = prompt_ids(replace(request, prompt_tokens=max(1, words.words)), nonce)
    return " ".join(_WORDS[i] for i in (ids % len(_WORDS)).tolist()) + words.short * _SHORT_WORD


async def measure_texts(
    url: str,
    model: str,
    workload: Sequence[ScheduledRequest],
    nonce: int,
    *,
    api_key: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> TextLengths:
    """Find out by the server's ``/tokenize`` how long texts must be; ``tell`` hears what comes of it."""
    timeout = aiohttp.ClientTimeout(total=_LIMIT_SECONDS)
    headers = None if api_key is None else {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:

        async def count(text: str) -> int:
            body = {"model": model, "messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
            async with session.post(f"{url}/tokenize", json=body) as response:
                if response.status != 200:
                    raise _NotToldError(f"answered {response.status}")
                return msgspec.json.decode(await response.read(), type=_Tokenized).count

        try:
            return await fit(workload, nonce, count, tell)
        except (_NotToldError, aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError) as error:
            why = str(error) or type(error).__name__
            tell(f"{url}/tokenize does not tell lengths ({why}): prompts are of about the lengths asked for")
            return TextLengths()


async def fit(
    workload: Sequence[ScheduledRequest],
    nonce: int,
    count: Callable[[str], Awaitable[int]],
    tell: Callable[[str], None] = lambda _: None,
) -> TextLengths:
    """Find out how long texts must be from a function that counts the tokens of one."""
    sample = replace(workload[0], blocks=(), prefix="")
    found = [await count(make_text(sample, nonce, Words(n))) for n in _SAMPLES]
    if [n - found[0] for n in found] == [n - _SAMPLES[0] for n in _SAMPLES]:
        return TextLengths(found[0] - _SAMPLES[0], exact=True)
    per_word = max(0.1, (found[-1] - found[0]) / (_SAMPLES[-1] - _SAMPLES[0]))
    tell(f"a word is {per_word:.2f} tokens to this server: measuring each of {len(workload)} prompts")
    room = asyncio.Semaphore(_AT_ONCE)

    async def fit_one(request: ScheduledRequest) -> tuple[int, Words, bool]:
        async with room:
            words, exact = await _fit_one(request, nonce, count, per_word)
            return request.index, words, exact

    fitted = await asyncio.gather(*map(fit_one, workload))
    if off := sum(not exact for _, _, exact in fitted):
        tell(f"{off} prompts cannot be made exactly as long as asked for")
    return TextLengths(fitted={index: words for index, words, _ in fitted}, exact=not off)


async def _fit_one(
    request: ScheduledRequest, nonce: int, count: Callable[[str], Awaitable[int]], per_word: float
) -> tuple[Words, bool]:
    """Return the words that come nearest, and whether they hit."""
    wanted = request.prompt_tokens
    words = max(1, int(wanted / per_word))
    most = 0  # words of which it is known that they are not too many
    for _ in range(_ROUNDS):
        got = await count(make_text(request, nonce, Words(words)))
        if got == wanted:
            return Words(words), True
        if got < wanted:
            most = max(most, words)
            step = int((wanted - got) / per_word)
            if step == 0:
                break
            words += step
        else:
            if words == 1:
                return Words(1), False
            words = max(1, most, words - ceil((got - wanted) / per_word))
            if words == most:
                break
    # A word more would be too much: go on in smaller steps.
    words = most or words
    for short in range(1, _MOST_SHORT_WORDS + 1):
        got = await count(make_text(request, nonce, Words(words, short)))
        if got >= wanted:
            return Words(words, short if got == wanted else short - 1), got == wanted
    return Words(words), False


class _Tokenized(msgspec.Struct):
    count: int


class _NotToldError(Exception):
    """The server does not count tokens for us."""
