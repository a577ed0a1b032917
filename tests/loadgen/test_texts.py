from dataclasses import replace
from math import ceil

from scripted_upstream import Upstream, request_at, requests_at

from loadgen.client import Api
from loadgen.runner import run_workload
from loadgen.texts import TextLengths, Words, fit, make_text, measure_texts
from proxy.sim.engine import EngineConfig
from proxy.sim.http import start_engines, stop_engines
from proxy.sim.profiles import PROFILES

pytest_plugins = ("loadgen_fixtures",)

WORKLOAD = [replace(r, prompt_tokens=10 + 37 * r.index) for r in requests_at([0.0] * 12)]


async def by_words(text: str) -> int:
    return len(text.split()) + 7


async def by_characters(text: str) -> int:
    return 3 + ceil(len(text) / 4)


async def test_where_words_are_tokens_only_the_template_has_to_be_known() -> None:
    found = await fit(WORKLOAD, 1, by_words)
    assert found == TextLengths(overhead=7, exact=True)
    for request in WORKLOAD:
        assert await by_words(found.text(request, 1)) == request.prompt_tokens


async def test_elsewhere_every_prompt_is_measured_until_it_fits() -> None:
    told: list[str] = []
    found = await fit(WORKLOAD, 1, by_characters, told.append)
    assert found.exact
    for request in WORKLOAD:
        assert await by_characters(found.text(request, 1)) == request.prompt_tokens
    assert len(told) == 1


async def test_what_cannot_be_fitted_is_told() -> None:
    async def by_pairs(text: str) -> int:
        return 2 * len(text.split())

    told: list[str] = []
    found = await fit([request_at(0.0, prompt=11), request_at(0.0, index=1, prompt=12)], 1, by_pairs, told.append)
    assert not found.exact
    assert told[-1] == "1 prompts cannot be made exactly as long as asked for"
    assert await by_pairs(found.text(request_at(0.0, index=1, prompt=12), 1)) == 12
    assert await by_pairs(found.text(request_at(0.0, prompt=11), 1)) <= 12


def test_texts_begin_alike_where_prompts_do() -> None:
    first, second = request_at(0.0, prompt=40), request_at(0.0, index=1, prompt=60)
    second = replace(second, content_seed=first.content_seed)
    assert make_text(second, 1, Words(60)).startswith(make_text(first, 1, Words(40)))
    assert make_text(first, 2, Words(40)) != make_text(first, 1, Words(40))


async def test_a_server_that_does_not_tell_is_told(upstream: Upstream) -> None:
    told: list[str] = []
    assert await measure_texts(upstream.url, "tiny", WORKLOAD, 1, tell=told.append) == TextLengths()
    assert "/tokenize does not tell lengths (answered 404)" in told[0]


async def test_chats_have_exactly_the_length_asked_for_by_the_servers_own_count() -> None:
    engines = await start_engines([0], EngineConfig(PROFILES["h100"]), model="m", speed=100.0)
    try:
        url = engines[0].url
        texts = await measure_texts(url, "m", WORKLOAD, 5)
        results = await run_workload(WORKLOAD, [url], model="m", api=Api.CHAT, nonce=5, texts=texts)
    finally:
        await stop_engines(engines)
    assert texts.exact
    assert [r.prompt_tokens for r in results] == [r.prompt_tokens for r in WORKLOAD]


async def test_a_key_and_standard_fields_only_are_sent_on_demand(upstream: Upstream) -> None:
    await run_workload(requests_at([0.0]), [upstream.url], model="tiny", api_key="secret", standard=True)
    [request], [body] = upstream.requests, upstream.bodies
    assert request.headers["Authorization"] == "Bearer secret"
    assert not {"min_tokens", "ignore_eos"} & body.keys()
