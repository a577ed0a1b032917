"""Workloads: who asks for what, and when. Shared by the simulator and the load generator.

A workload is drawn once, before anything runs, from four independent seeded streams (which lengths,
which arrivals, which classes, which content), so that two systems compared on one seed see the same
requests at the same instants: common random numbers make the *difference* between schedulers several
times steadier than either figure.
"""

from __future__ import annotations

import csv
import heapq
import itertools
import json
import random
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.core.request import RELAXED, STRICT, RequestClass

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

SHAREGPT_LIKE = "sharegpt-like"
"""The built-in trace's name: lengths drawn from the fit below, nothing read from disk."""

# Beta distributions scaled to the longest length, fitted to the prompt and output lengths of the ShareGPT
# trace of the SLAI paper (30,731 conversations, Llama-2 tokens, at most 8k together). Kolmogorov-Smirnov
# distance of either fit: 0.02. Quantiles 10/25/50/75/90/99 % of prompts: fit 110/527/1778/3790/5675/7643,
# trace 74/580/1730/3735/5696/7434; of outputs: fit 100/221/420/640/810/975, trace 84/228/415/628/834/998.
_PROMPT_FIT = (0.6, 1.49, 8192)
_OUTPUT_FIT = (1.22, 1.62, 1024)

# A ShareGPT JSON file has text and no token counts. 4.5 characters per token is the mean of real ShareGPT
# text under Llama-2's tokenizer (5th to 95th percentile of conversations: 3.2 to 5.7).
CHARACTERS_PER_TOKEN = 4.5


_TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class TraceError(ValueError):
    """The trace cannot be read; the message names the file and what was expected."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of one request of a trace."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """The lengths of a trace, with an account of the rows that were not usable."""

    name: str
    lengths: tuple[Lengths, ...]
    rows_read: int
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows left out, by reason; ``rows_read == len(lengths) + dropped.total()``."""


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One request of a workload: send it ``at_seconds`` after the start, whatever happened to the others."""

    index: int
    at_seconds: float
    prompt_tokens: int
    output_tokens: int
    request_class: RequestClass
    content_seed: int
    prefix: str = ""
    """Requests of one prefix have their first ``prefix_tokens`` tokens in common."""
    prefix_tokens: int = 0
    tenant: str = ""
    blocks: tuple[int, ...] = ()
    """Names of the blocks that its prompt begins with: where two requests have the same name, they have the same text.

    What follows the last block is its own, drawn from ``content_seed``; so two requests of one seed without blocks
    have the shorter one's whole prompt in common, as the turns of a conversation have."""
    block_tokens: int = 0
    """Tokens in each of ``blocks``; the last one may be cut by the prompt's end."""
    session: str = ""
    """The conversation that it is a turn of; empty for a request that stands alone."""
    after: int | None = None
    """Index of the request whose answer its user waits for; it comes ``think_seconds`` after that answer's end."""
    think_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ClassShare:
    """A class and the share of the requests that belong to it."""

    request_class: RequestClass
    share: float


@dataclass(frozen=True, slots=True)
class Surge:
    """A time at the start of a workload in which ``factor`` times as many requests come as after it."""

    factor: float
    seconds: float

    def compress(self, at_seconds: float) -> float:
        """Return the time at which there have come as many requests as there would have by ``at_seconds`` without."""
        in_surge = at_seconds / self.factor
        return in_surge if in_surge <= self.seconds else at_seconds - (self.factor - 1) * self.seconds


def parse_surge(text: str) -> Surge:
    """Read ``FACTOR:SECONDS``, e.g. ``2.5:60``.

    Raises:
        ValueError: the text has another form, or a number is not positive.
    """
    factor, _, seconds = text.partition(":")
    with suppress(ValueError):
        if 0 < float(factor) < inf and 0 < float(seconds) < inf:
            return Surge(float(factor), float(seconds))
    raise ValueError(f"a surge is FACTOR:SECONDS, both positive, not {text!r}")


PAPER_CLASSES = (ClassShare(STRICT, 0.05), ClassShare(RELAXED, 0.95))


def parse_class(text: str) -> ClassShare:
    """Read ``NAME:SHARE[:tbt=SECONDS][:ttft=SECONDS][:weight=WEIGHT]``, e.g. ``strict:0.05:tbt=0.1``.

    Raises:
        ValueError: the text has another form, or a number is not positive.
    """
    name, *parts = text.split(":")
    try:
        share = float(parts[0])
        terms = {key: float(value) for key, value in (part.split("=") for part in parts[1:])}
    except (ValueError, IndexError):
        terms = {"?": 0.0}
    if not terms.keys() <= {"tbt", "ttft", "weight"}:
        raise ValueError(f"a class is NAME:SHARE[:tbt=SECONDS][:ttft=SECONDS][:weight=WEIGHT], not {text!r}")
    if not name or not 0 < share <= 1 or any(not 0 < t < inf for t in terms.values()):
        raise ValueError(f"class {text!r}: the share lies in (0, 1], deadlines are positive seconds, weights positive")
    return ClassShare(RequestClass(name, terms.get("ttft"), terms.get("tbt"), terms.get("weight", 1.0)), share)


def draw_workload(
    trace: Trace,
    *,
    rate: float,
    requests: int,
    seed: int,
    classes: Sequence[ClassShare] = PAPER_CLASSES,
    tenants: Mapping[str, float] | None = None,
    surge: Surge | None = None,
) -> list[ScheduledRequest]:
    """Draw ``requests`` Poisson arrivals at ``rate`` per second with lengths and classes from ``trace``.

    With a ``surge`` the first of them come at a multiple of that rate.

    Inter-arrival times are drawn at unit rate and divided by ``rate``, so that one seed at two rates gives
    the same requests in the same order, only closer together. Lengths are a shuffle of the trace, repeated
    when more are asked for than it has.

    ``tenants`` gives each tenant's part of the rate, of whatever sum. Every one has streams of its own: at one rate of
    its own it sends the same requests at the same instants, whoever else there is.

    Raises:
        ValueError: a rate, count or tenant's part that is not positive, or shares that do not add up to one.
    """
    if not 0 < rate < inf or requests <= 0:
        raise ValueError("rate and requests must be positive")
    if any(c.share < 0 for c in classes) or abs(sum(c.share for c in classes) - 1) > 1e-6:
        raise ValueError("the shares of the classes must not be negative and add up to 1")
    if not trace.lengths:
        raise ValueError(f"the trace {trace.name!r} is empty")
    parts = tenants or {"": 1.0}
    if not all(0 < part < inf for part in parts.values()):
        raise ValueError("the tenants' parts of the rate must be positive")
    whole = sum(parts.values())
    streams = [_draw_tenant(trace, rate * part / whole, seed, classes, name) for name, part in parts.items()]
    merged = heapq.merge(*streams, key=lambda r: r.at_seconds)
    drawn = enumerate(itertools.islice(merged, requests))
    at = surge.compress if surge else float
    return [replace(request, index=index, at_seconds=at(request.at_seconds)) for index, request in drawn]


def _draw_tenant(
    trace: Trace, rate: float, seed: int, classes: Sequence[ClassShare], tenant: str
) -> Iterator[ScheduledRequest]:
    """Draw one tenant's requests without end."""
    name = f"{seed}:{tenant}" if tenant else f"{seed}"
    arrivals, lengths, kinds, content = (
        random.Random(f"{name}:{s}") for s in ("arrivals", "lengths", "classes", "content")
    )
    at = 0.0
    for index in itertools.count():
        if index % len(trace.lengths) == 0:
            order = lengths.sample(trace.lengths, len(trace.lengths))
        at += arrivals.expovariate(1.0) / rate
        kind = kinds.choices(classes, [c.share for c in classes])[0].request_class
        size = order[index % len(trace.lengths)]
        seed_of_content = content.getrandbits(48)
        yield ScheduledRequest(index, at, size.prompt_tokens, size.output_tokens, kind, seed_of_content, tenant=tenant)


def parse_tenants(text: str) -> dict[str, float]:
    """Read ``NAME=PART[,NAME=PART]``: tenants and their parts of the request rate, e.g. ``calm=1,flood=10``.

    Raises:
        ValueError: the text has another form, names one twice, or a part is not positive.
    """
    pairs = [part.strip().partition("=") for part in text.split(",")]
    try:
        parts = {name: float(value) for name, _, value in pairs}
    except ValueError:
        parts = {}
    well_named = all(_TENANT_NAME.fullmatch(name) for name in parts)
    if len(parts) < len(pairs) or not well_named or not all(0 < part < inf for part in parts.values()):
        raise ValueError(f"tenants are NAME=PART[,NAME=PART] with plain names and positive parts, not {text!r}")
    return parts


def load_trace(name: str) -> Trace:
    """Read a trace by its path, or make the built-in one (``sharegpt-like``).

    The format is recognised by content: a CSV whose header names prompt and output token columns, or a
    ShareGPT JSON array of conversations.

    Raises:
        TraceError: no such file, an unknown format, or no usable row in it.
    """
    if name == SHAREGPT_LIKE:
        return sharegpt_like()
    path = Path(name)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TraceError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise TraceError(f"cannot read the trace {name!r}: {why}; {SHAREGPT_LIKE!r} is built in") from error
    rows = _read_json(name, text) if text.lstrip().startswith("[") else _read_csv(name, text)
    lengths: list[Lengths] = []
    dropped: Counter[str] = Counter()
    try:
        for row in rows:
            if isinstance(row, Lengths):
                lengths.append(row)
            else:
                dropped[row] += 1
    except csv.Error as error:
        raise TraceError(f"{name}: not a CSV of lengths ({error})") from error
    if not lengths:
        raise TraceError(f"{name}: no usable row; left out: {dict(dropped) or 'the file is empty'}")
    return Trace(name, tuple(lengths), len(lengths) + dropped.total(), dropped)


def sharegpt_like(count: int = 20_000, seed: int = 0) -> Trace:
    """Make a trace with lengths like ShareGPT's: drawn from the stated fit, at most 8,192 tokens together."""
    rng = random.Random(f"{seed}:{SHAREGPT_LIKE}")
    lengths: list[Lengths] = []
    while len(lengths) < count:
        prompt, output = (1 + int(rng.betavariate(a, b) * (top - 1)) for a, b, top in (_PROMPT_FIT, _OUTPUT_FIT))
        if output >= 2 and prompt + output <= _PROMPT_FIT[2]:
            lengths.append(Lengths(prompt, output))
    return Trace(SHAREGPT_LIKE, tuple(lengths), count)


_PROMPT_COLUMNS = ("num_prefill_tokens", "ContextTokens", "Request tokens", "prompt_tokens")
_OUTPUT_COLUMNS = ("num_decode_tokens", "GeneratedTokens", "Response tokens", "output_tokens")


def _read_csv(name: str, text: str) -> Iterator[Lengths | str]:
    table = csv.DictReader(text.splitlines())
    columns = table.fieldnames or []
    prompt = next((c for c in _PROMPT_COLUMNS if c in columns), None)
    output = next((c for c in _OUTPUT_COLUMNS if c in columns), None)
    if prompt is None or output is None:
        raise TraceError(
            f"{name}: a CSV trace needs a header with one of {', '.join(_PROMPT_COLUMNS)} and one of "
            f"{', '.join(_OUTPUT_COLUMNS)}; found {', '.join(columns) or 'nothing'}"
        )
    for row in table:
        yield _lengths_or_reason(row[prompt], row[output])


def _lengths_or_reason(prompt: str | None, output: str | None) -> Lengths | str:
    try:
        p, o = float(prompt or ""), float(output or "")
        if not (p.is_integer() and o.is_integer()):
            return "not a whole number"
    except ValueError:
        return "not a number"
    if p < 1 or o < 1:
        return "empty prompt or output"
    return Lengths(int(p), int(o))


def _read_json(name: str, text: str) -> Iterator[Lengths | str]:
    """Yield every assistant turn with all that came before it as its prompt, as a chat client sends it."""
    try:
        conversations = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{name}: not valid JSON ({error})") from error
    for conversation in conversations:
        turns = conversation.get("conversations") if isinstance(conversation, dict) else None
        if not isinstance(turns, list):
            yield "no list of turns under 'conversations'"
            continue
        history = 0.0
        found = False
        for entry in turns:
            turn = _loads_if_text(entry)
            if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
                continue
            size = len(turn["value"]) / CHARACTERS_PER_TOKEN
            if turn.get("from") in ("gpt", "assistant", "chatgpt", "bing", "bard") and history >= 1 and size >= 1:
                found = True
                yield Lengths(round(history), max(1, round(size)))
            history += size
        if not found:
            yield "no assistant turn with text before it"


def _loads_if_text(turn: object) -> object:
    # Some published ShareGPT files hold each turn as a JSON string.
    if isinstance(turn, str):
        try:
            return json.loads(turn)
        except (ValueError, RecursionError):
            return None
    return turn
