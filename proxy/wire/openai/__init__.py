"""What the scheduler wants to know of an OpenAI request, stream chunk or answer, and nothing more.

Bodies and chunks are only looked at: what travels on is always the bytes that came. The typed decoders of
msgspec skip what is not asked for; where they refuse what Python's ``json`` takes (a lone surrogate, NaN, a
repeated key of the wrong type first), ``json`` decides, because vLLM reads requests with it.
"""

from proxy.wire.openai.answer import (
    VISIBLE_TOKEN,
    ChunkView,
    Usage,
    decode_leniently,
    read_chunk,
    read_index,
    read_usage,
    token_count,
)
from proxy.wire.openai.request import (
    BadRequest,
    RequestView,
    integer,
    make_view,
    peek,
    read_fields,
    size_of_texts,
    whole_body,
)

__all__ = [
    "VISIBLE_TOKEN",
    "BadRequest",
    "ChunkView",
    "RequestView",
    "Usage",
    "decode_leniently",
    "integer",
    "make_view",
    "peek",
    "read_chunk",
    "read_fields",
    "read_index",
    "read_usage",
    "size_of_texts",
    "token_count",
    "whole_body",
]
