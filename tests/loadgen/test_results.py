from scripted_upstream import request_at

from loadgen.results import Result


def test_every_chunk_is_kept_beside_the_gaps_between_them() -> None:
    result = Result(request_at(0.5), sent_at=0.75)
    for at, tokens in ((1.0, 1), (1.5, 3), (1.5, 1)):
        result.on_tokens(at, tokens)
    assert list(result.chunk_times) == [1.0, 1.5, 1.5]
    assert list(result.chunk_tokens) == [1, 3, 1]
    assert (list(result.gaps), result.tokens, result.ttft_seconds) == ([0.5], 5, 0.5)
    assert result.schedule_delay_seconds == 0.25
    assert Result(request_at(0.0)).schedule_delay_seconds is None
