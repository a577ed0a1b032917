"""Profiles: how long one engine step takes on a given GPU, and what fits into its memory; built in, or from a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from random import Random


@dataclass(frozen=True, slots=True)
class StepModel:
    """Duration of one engine step, as a smooth roofline over the tokens in it.

    ``t_ms = host + host_per_sequence * n + host_per_prompt * (n - D) + (floor**p + (per_token * m)**p)**(1/p)
           + per_decode * D + per_kv_token * KV + per_attention * QA``

    with ``n`` sequences in the step, ``m`` prompt and decode tokens together, ``D`` decodes, ``KV`` the summed
    context of those decodes, and ``QA`` the sum over prefill chunks of ``length * (tokens before it + length / 2)``.
    With ``tile``, ``m`` is rounded up to whole tiles, in which GPUs multiply matrices; the fits have no steps in them.
    ``floor`` is the time to read the weights, ``per_token`` the cost of a token once the GPU is compute bound.
    All coefficients are milliseconds.
    """

    host: float
    host_per_sequence: float
    floor: float
    per_token: float
    p: float
    per_decode: float
    per_kv_token: float
    per_attention: float
    tile: int = 1
    """Tokens."""
    host_per_prompt: float = 0.0
    """Beside ``host_per_sequence``, for each prompt or slice of one: it is parsed, and looked up in the cache."""

    def seconds(self, *, prefill_tokens: int, sequences: int, decodes: int, kv_tokens: int, attention: float) -> float:
        """Return the duration of a step in seconds."""
        p, tile = self.p, self.tile
        tokens = prefill_tokens + decodes
        if tile > 1:
            tokens = -(-tokens // tile) * tile
        roofline: float = (self.floor**p + (self.per_token * tokens) ** p) ** (1 / p)
        return 1e-3 * (
            self.host
            + self.host_per_sequence * sequences
            + self.host_per_prompt * (sequences - decodes)
            + roofline
            + self.per_decode * decodes
            + self.per_kv_token * kv_tokens
            + self.per_attention * attention
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """A GPU with Mistral-7B in 16 bits on it; ``kv_tokens`` tokens have room for keys and values beside the weights."""

    name: str
    step: StepModel
    kv_tokens: int
    source: str


@dataclass(frozen=True, slots=True)
class Jitter:
    """By how much longer a real step takes than its profile says: always a little, and now and then a hiccup."""

    mean_seconds: float = 0.0007
    """Exponentially distributed."""
    hiccup_share: float = 0.01
    hiccup_seconds: tuple[float, float] = (0.005, 0.03)
    """Least and most, uniformly distributed."""

    def draw_seconds(self, rng: Random) -> float:
        """Draw one step's."""
        seconds = rng.expovariate(1 / self.mean_seconds)
        return seconds + rng.uniform(*self.hiccup_seconds) if rng.random() < self.hiccup_share else seconds


_VLLM_HOST = (0.4, 0.037)
"""Milliseconds per step and per sequence: the gap between kernel time and public vLLM measurements on an H100."""

_KERNELS = "smooth-roofline fit to measured GPU kernels (aiconfigurator tables), plus vLLM's host cost"

PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            "rtx6000ada",
            StepModel(0.0, 0.0, 22.24, 0.0989, 2.62, 0.05, 1.71e-4, 2.6e-6),
            235_728,
            "prefill steps of the SLAI paper's budget experiment (±6 % on 7 points); KV capacity from the paper's code",
        ),
        Profile(
            "a100",
            StepModel(3.586 + _VLLM_HOST[0], _VLLM_HOST[1], 7.255, 0.05614, 1.90, 0.0055, 8.512e-5, 2.54e-6),
            420_000,
            _KERNELS,
        ),
        Profile(
            "h100",
            StepModel(_VLLM_HOST[0], _VLLM_HOST[1], 6.436, 0.0198, 1.63, 0.0033, 4.248e-5, 6.18e-7),
            420_000,
            _KERNELS,
        ),
        Profile(
            "l40s",
            StepModel(_VLLM_HOST[0], _VLLM_HOST[1], 22.48, 0.05741, 2.05, 0.0094, 1.895e-4, 2.57e-6),
            235_728,
            _KERNELS,
        ),
    )
}


def find_profile(name: str) -> Profile:
    """Return a built-in profile by its name, or that of a file by its path.

    Raises:
        ValueError: there is neither, or the file is no profile; the message says what would be.
    """
    if (known := PROFILES.get(name)) is not None:
        return known
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError):
        raise ValueError(
            f"no profile {name!r}: there are {', '.join(PROFILES)}, and files that slai-proxy calibrate writes"
        ) from None
    try:
        return read_profile(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def checked_profile(name: str) -> str:
    """Return ``name`` if ``find_profile`` knows it.

    Raises:
        ValueError: as from there.
    """
    find_profile(name)
    return name


def read_profile(text: str) -> Profile:
    """Read a profile from JSON; other entries than a profile's are left alone.

    Raises:
        ValueError: it is none; the message names the entry.
    """
    document: Any = json.loads(text)
    if not isinstance(document, dict) or not isinstance(document.get("step"), dict):
        raise ValueError("a profile is a JSON object with an object 'step' in it, and 'kv_tokens'")  # noqa: TRY004
    terms: dict[str, Any] = {"tile": 1, "host_per_prompt": 0.0, **document["step"]}
    if terms.keys() != (known := {field.name for field in fields(StepModel)}):
        raise ValueError(f"'step' of a profile has the entries {', '.join(sorted(known))}")
    for term, value in terms.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
            raise ValueError(f"'step' of a profile has a number of zero or more for {term!r}, not {value!r}")
    if terms["p"] < 1 or not isinstance(terms["tile"], int) or terms["tile"] < 1:
        raise ValueError("'p' of a profile is at least 1, and 'tile' a whole number of tokens")
    kv_tokens = document.get("kv_tokens")
    if isinstance(kv_tokens, bool) or not isinstance(kv_tokens, int) or kv_tokens < 1:
        raise ValueError(f"'kv_tokens' of a profile is a whole number of tokens, not {kv_tokens!r}")
    name, source = (str(document.get(entry, "measured")) for entry in ("name", "source"))
    return Profile(name, StepModel(**terms), kv_tokens, source)


def write_profile(profile: Profile, **more: Any) -> str:
    """Return a profile as JSON that ``read_profile`` reads, with other entries beside it."""
    return json.dumps(asdict(profile) | more, indent=2) + "\n"
