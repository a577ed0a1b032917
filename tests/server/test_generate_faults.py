"""Engines that refuse, break off, fall silent or die, and what the client is told then."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
from live_proxy import CHAT, LiveProxy, exchange, live_proxy, raw_post, until
from scripted_engine import DONE, JSON, SSE, Call, Script, chunk, event, head, last, scripted_engine, token, two_tokens

STREAMED = b'{"model": "m", "prompt": "hello", "stream": true}'
WHOLE = b'{"model": "m", "prompt": "hello"}'


def told(event_or_body: bytes) -> Any:
    """The error that a client reads, from a body or from an event of a stream."""
    return json.loads(event_or_body.removeprefix(b"data: "))["error"]


def check_shape(error: Any) -> None:
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)


async def served(call: Call) -> None:
    await call.answer(b'{"served": true}')


SERVED = (200, b'{"served": true}')


def ending_with_connection(*pieces: bytes) -> Script:
    """A stream whose end only the end of the connection tells."""

    async def script(call: Call) -> None:
        await call.send(head("200 OK", *SSE, "Connection: close") + b"".join(pieces))
        call.close()

    return script


class TestAnswersThatAreErrors:
    @pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "404 Not Found", "422 X", "500 Oops"])
    async def test_they_pass_as_they_came_even_where_a_stream_was_asked_for(self, status: str) -> None:
        body = b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}'
        async with scripted_engine() as engine, scripted_engine() as other, live_proxy(engine, other) as proxy:
            engine.script = lambda call: call.answer(body, status=status, headers=(*JSON, "WWW-Authenticate: Bearer"))
            async with proxy.post(body=STREAMED) as response:
                assert f"{response.status} {response.reason}" == status
                assert response.headers["Content-Type"] == "application/json"
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert await response.read() == body
            assert (len(engine.calls), len(other.calls)) == (1, 0), "never sent a second time"
            assert proxy.outcomes() == {"engine_error": 1}
            assert proxy.reasons() == {f"engine_{status[:3]}": 1}

    async def test_an_error_object_inside_a_stream_passes_and_is_no_success(self) -> None:
        error = event({"error": {"message": "EngineDeadError", "type": "InternalServerError", "code": 500}})
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            engine.script = lambda call: call.stream(token(), error, DONE)
            assert await proxy.fetch() == (200, token() + error + DONE)
            assert proxy.outcomes() == {"engine_error": 1}

    async def test_an_error_that_is_no_json_passes_too(self) -> None:
        async with scripted_engine() as engine, live_proxy(engine) as proxy:
            engine.script = lambda call: call.answer(
                b"<h1>no</h1>", status="500 X", headers=("Content-Type: text/html",)
            )
            async with proxy.post() as response:
                assert response.headers["Content-Type"] == "text/html"
                assert await response.read() == b"<h1>no</h1>"
            assert proxy.outcomes() == {"engine_error": 1}


class TestEnginesThatTurnAway:
    @pytest.mark.parametrize("status", ["503 Service Unavailable", "429 Too Many Requests"])
    @pytest.mark.parametrize("body", [STREAMED, WHOLE])
    async def test_another_engine_serves(self, status: str, body: bytes) -> None:
        async with scripted_engine() as busy, scripted_engine(served) as free, live_proxy(busy, free) as proxy:
            busy.script = lambda call: call.answer(b'{"error": {}}', status=status)
            assert await proxy.fetch(body=body) == SERVED
            assert busy.calls[0].body == free.calls[0].body == body
            assert proxy.outcomes() == {"completed": 1}
            assert proxy.reasons() == {}
            assert await proxy.fetch(body=body) == SERVED
            assert len(busy.calls) == 1, "it is left alone for a while"

    async def test_the_same_engine_serves_later_if_there_is_no_other(self) -> None:
        loop = asyncio.get_running_loop()
        times: list[float] = []

        async def script(call: Call) -> None:
            times.append(loop.time())
            if len(times) < 3:
                await call.answer(b"", status="503 Service Unavailable", headers=("Retry-After: 0.2",))
            else:
                await served(call)

        async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
            assert await proxy.fetch() == SERVED
            assert [b - a >= 0.199 for a, b in pairwise(times)] == [True, True]
            assert proxy.outcomes() == {"completed": 1}

    @pytest.mark.parametrize("value", ["Wed, 21 Oct 2026 07:28:00 GMT", "-5", "0", "soon", "nan", "-inf", ""])
    async def test_whatever_it_asks_for_it_is_not_called_again_at_once(self, value: str) -> None:
        async def script(call: Call) -> None:
            await call.answer(b"", status="503 Service Unavailable", headers=(f"Retry-After: {value}",))

        async with scripted_engine(script) as engine, live_proxy(engine, queue_timeout_seconds=0.15) as proxy:
            status, body = await proxy.fetch()
            assert status == 429
            assert told(body)["code"] == "slow_down"
            assert len(engine.calls) <= 3
            assert proxy.outcomes() == {"rejected": 1}
            assert proxy.reasons() == {"queue_timeout": 1}

    async def test_the_order_of_arrival_is_kept(self) -> None:
        """Who was turned away goes back before those who came later."""
        order: list[bytes] = []
        turned_away = asyncio.Event()

        async def script(call: Call) -> None:
            if not turned_away.is_set():
                await until(lambda: proxy.scheduler.waiting == 2)
                turned_away.set()
                await call.answer(b"", status="429 Too Many Requests", headers=("Retry-After: 0.1",))
            else:
                order.append(call.body)
                await served(call)

        bodies = [b'{"model": "m", "prompt": "%d"}' % n for n in range(3)]
        async with (
            scripted_engine(script) as engine,
            live_proxy(engine, policy="fcfs", max_num_seqs=1) as proxy,
            asyncio.TaskGroup() as group,
        ):
            for body in bodies:
                group.create_task(proxy.fetch(body=body))
                await until(lambda: engine.calls)
        assert order == bodies


class TestEnginesThatCannotBeReached:
    async def test_another_engine_serves(self) -> None:
        async with scripted_engine() as dead, scripted_engine(served) as alive, live_proxy(dead, alive) as proxy:
            await dead.stop()
            assert await proxy.fetch() == SERVED
            assert proxy.outcomes() == {"completed": 1}

    async def test_nobody_waits_for_one_that_is_down(self) -> None:
        async with scripted_engine() as engine, live_proxy(engine, probe_interval_seconds=0.02) as proxy:
            assert (await proxy.fetch())[0] == 200
            await engine.stop()
            async with proxy.post() as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert told(await response.read())["code"] == "no_engines"
            assert proxy.outcomes() == {"completed": 1, "rejected": 1}
            assert proxy.reasons() == {"no_engine": 1}
            await engine.start()
            await until(lambda: proxy.scheduler.engines[0].up)

    async def test_one_that_has_come_back_is_used_at_once(self) -> None:
        """Its back-off from the refused connection, a second, ends with the outage."""
        async with scripted_engine() as engine, live_proxy(engine, probe_interval_seconds=0.02) as proxy:
            await engine.stop()
            assert (await proxy.fetch())[0] == 503
            await engine.start()
            await until(lambda: proxy.scheduler.engines[0].up)
            begun = asyncio.get_running_loop().time()
            assert (await proxy.fetch())[0] == 200
            assert asyncio.get_running_loop().time() - begun < 0.7


class TestEnginesThatSayNothing:
    @pytest.mark.parametrize("path_body", [("/v1/completions", STREAMED), (CHAT, STREAMED), ("/v1/completions", WHOLE)])
    @pytest.mark.parametrize("how", ["FIN", "RST", "half a head", "garbage"])
    async def test_a_cut_before_the_head(self, how: str, path_body: tuple[str, bytes]) -> None:
        async def script(call: Call) -> None:
            if how == "RST":
                return call.reset()
            await call.send({"half a head": b"HTTP/1.1 200 OK\r\nX", "garbage": b"\x00\r\n\r\n"}.get(how, b""))
            return call.close()

        path, body = path_body
        async with scripted_engine(script) as engine, scripted_engine() as other, live_proxy(engine, other) as proxy:
            async with proxy.post(path, body) as response:
                assert response.status == 502
                assert response.headers["Content-Type"] == "application/json"
                assert response.headers["x-should-retry"] == "false"
                error = told(await response.read())
            check_shape(error)
            assert error["code"] == "upstream_error"
            assert (len(engine.calls), len(other.calls)) == (1, 0), "it may have been worked on: no silent replay"
            assert proxy.outcomes() == {"engine_failed": 1}
            assert proxy.reasons() == {"cut_before_answer": 1}

    async def test_silence_before_the_head(self) -> None:
        async def script(call: Call) -> None:
            await call.gone.wait()

        async with scripted_engine(script) as engine, live_proxy(engine, idle_timeout_seconds=0.1) as proxy:
            status, body = await proxy.fetch()
            assert status == 504
            check_shape(told(body))
            async with asyncio.timeout(1):
                await engine.calls[0].gone.wait()
            assert proxy.outcomes() == {"engine_failed": 1}
            assert proxy.reasons() == {"timed_out": 1}


class TestReplays:
    """Where the operator allows that a request may be generated twice (``replays``)."""

    @staticmethod
    async def cut(call: Call) -> None:
        call.close()

    @pytest.mark.parametrize("body", [STREAMED, WHOLE])
    async def test_another_engine_serves_and_the_answer_says_so(self, body: bytes) -> None:
        async with (
            scripted_engine(self.cut) as one,
            scripted_engine() as two,
            live_proxy(one, two, replays=1) as proxy,
            proxy.post(body=body) as response,
        ):
            assert response.status == 200
            assert response.headers["x-slai-replayed"] == "1"
            await response.read()
            assert (len(one.calls), len(two.calls)) == (1, 1)
            assert two.calls[0].body == body
            assert proxy.outcomes() == {"completed": 1}

    async def test_silence_is_a_failure_too(self) -> None:
        async with (
            scripted_engine(lambda call: call.gone.wait()) as one,  # type: ignore[arg-type, return-value]
            scripted_engine() as two,
            live_proxy(one, two, replays=1, idle_timeout_seconds=0.1) as proxy,
        ):
            assert (await proxy.fetch())[0] == 200
            await asyncio.wait_for(one.calls[0].gone.wait(), 5)
            assert len(two.calls) == 1

    async def test_no_more_often_than_allowed(self) -> None:
        async with (
            scripted_engine(self.cut) as one,
            scripted_engine(self.cut) as two,
            scripted_engine(self.cut) as three,
            live_proxy(one, two, three, replays=1) as proxy,
            proxy.post() as response,
        ):
            assert response.status == 502
            assert response.headers["x-slai-replayed"] == "1"
            assert len(one.calls) + len(two.calls) + len(three.calls) == 2
            assert proxy.outcomes() == {"engine_failed": 1}

    async def test_the_only_engine_is_asked_again_a_while_later(self) -> None:
        async def script(call: Call) -> None:
            await (self.cut if len(engine.calls) == 1 else two_tokens)(call)

        async with scripted_engine(script) as engine, live_proxy(engine, replays=3) as proxy:
            begun = asyncio.get_running_loop().time()
            async with proxy.post() as response:
                assert (response.status, response.headers["x-slai-replayed"]) == (200, "1")
                await response.read()
            assert asyncio.get_running_loop().time() - begun > 0.9, "it is left alone for a second"

    async def test_never_after_a_byte(self) -> None:
        async def script(call: Call) -> None:
            await call.send(head("200 OK", *SSE, "Transfer-Encoding: chunked"))
            call.close()

        async with scripted_engine(script) as one, scripted_engine() as two, live_proxy(one, two, replays=1) as proxy:
            async with proxy.post() as response:
                assert "x-slai-replayed" not in response.headers
                assert told(await response.read())["code"] == "upstream_error"
            assert two.calls == []

    async def test_a_stream_whose_head_is_out_tells_by_a_comment(self) -> None:
        def held_up(until_then: asyncio.Event, then: Script) -> Script:
            async def script(call: Call) -> None:
                if until_then.is_set():
                    await then(call)
                else:
                    await until_then.wait()
                    await two_tokens(call)

            return script

        go = [asyncio.Event(), asyncio.Event()]
        async with (
            scripted_engine(held_up(go[0], self.cut)) as one,
            scripted_engine(held_up(go[1], two_tokens)) as two,
            live_proxy(one, two, max_num_seqs=1, replays=1, queue_comment_seconds=0.01) as proxy,
        ):
            others = [asyncio.ensure_future(proxy.fetch()) for _ in range(2)]
            await until(lambda: one.calls and two.calls)
            async with proxy.post(body=STREAMED) as response:
                assert await response.content.readuntil(b"\n\n") == b": waiting\n\n"
                go[0].set()
                await until(lambda: len(one.calls) == 2)
                go[1].set()
                rest = await response.read()
            assert rest.count(b": replayed\n\n") == 1
            assert rest.endswith(DONE)
            assert (len(one.calls), len(two.calls)) == (2, 2)
            await asyncio.gather(*others)


class TestStreamsThatBreakOff:
    async def broken(self, proxy: LiveProxy) -> bytes:
        """The stream that the client gets, which must end in an orderly way."""
        status, body = await proxy.fetch()
        assert status == 200
        assert proxy.outcomes() == {"engine_failed": 1}
        return body

    @pytest.mark.parametrize("end", ["FIN", "RST", "chunk cut"])
    @pytest.mark.parametrize("tokens", [0, 1, 5])
    async def test_one_error_event_and_an_orderly_end(self, end: str, tokens: int) -> None:
        async def script(call: Call) -> None:
            await call.begin()
            for n in range(tokens):
                await call.write(token(str(n)))
            # A reset may overtake what was sent before it, so let the proxy read that first.
            await until(lambda: proxy.scheduler.engines[0].decodes == bool(tokens))
            if end == "chunk cut":
                await call.send(b"ff\r\n")
            (call.reset if end == "RST" else call.close)()

        async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
            body = await self.broken(proxy)
            events = body.split(b"\n\n")
            assert body.endswith(b"\n\n")
            assert events[:tokens] == [token(str(n)).removesuffix(b"\n\n") for n in range(tokens)]
            assert len(events) == tokens + 2
            error = told(events[tokens])
            check_shape(error)
            assert error["code"] == "upstream_error"
            assert b"[DONE]" not in body
            assert b"finish_reason" not in body
            assert proxy.reasons() == {"cut_mid_stream": 1}

    @pytest.mark.parametrize("piece", [b"data: {", b"data: {}\n", b"data: {}\r\n", b": half a comm", b"data: {}\r"])
    async def test_a_cut_within_an_event_is_ended_by_a_blank_line_first(self, piece: bytes) -> None:
        async def script(call: Call) -> None:
            await call.begin()
            await call.write(token() + piece)
            await until(lambda: proxy.scheduler.engines[0].decodes)
            call.reset()

        async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
            body = await self.broken(proxy)
            rest = body.removeprefix(token() + piece)
            assert rest.startswith(b"\n\n" + b"data: ")
            check_shape(told(rest.strip()))

    async def test_after_carriage_returns_no_blank_line_is_missing_or_made_up(self) -> None:
        async def script(call: Call) -> None:
            await call.begin()
            await call.write(b'data: {"choices": [{"text": "a"}]}\r\n\r\n')
            await until(lambda: proxy.scheduler.engines[0].decodes)
            call.reset()

        async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
            body = await self.broken(proxy)
            assert body.count(b"data: ") == 2
            assert b"\r\n\r\ndata: {" in body

    async def test_silence(self) -> None:
        async def script(call: Call) -> None:
            await call.begin()
            await call.write(token())
            await call.gone.wait()

        async with scripted_engine(script) as engine, live_proxy(engine, idle_timeout_seconds=0.1) as proxy:
            body = await self.broken(proxy)
            assert told(body.removeprefix(token()).strip())["code"] == "upstream_timeout"
            async with asyncio.timeout(1):
                await engine.calls[0].gone.wait()
            assert proxy.reasons() == {"timed_out": 1}

    async def test_a_malformed_chunk(self) -> None:
        """aiohttp closes the connection then, but tells nobody."""

        async def script(call: Call) -> None:
            await call.begin()
            await call.write(token())
            await until(lambda: proxy.scheduler.engines[0].decodes)
            await call.send(b"not hex\r\n")
            await call.gone.wait()

        async with scripted_engine(script) as engine, live_proxy(engine, idle_timeout_seconds=0.2) as proxy:
            body = await self.broken(proxy)
            check_shape(told(body.removeprefix(token()).strip()))

    async def test_one_of_stated_length_is_cut_for_the_client_too(self) -> None:
        """An error event would be shorter than what is missing, and the client would wait for the rest."""

        async def script(call: Call) -> None:
            await call.send(head("200 OK", *SSE, "Content-Length: 5000") + token())
            await asyncio.wait_for(received.wait(), 5)
            call.close()

        received = asyncio.Event()
        async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
            async with proxy.post() as response:
                assert await response.content.readany() == token()
                received.set()
                with pytest.raises(aiohttp.ClientPayloadError):
                    await asyncio.wait_for(response.read(), 5)
            assert proxy.outcomes() == {"engine_failed": 1}

    @pytest.mark.parametrize("pieces", [(), (token(), token()), (token() + b"data: {",)])
    async def test_one_that_ends_with_its_connection_before_its_own_end(self, pieces: tuple[bytes, ...]) -> None:
        async with scripted_engine(ending_with_connection(*pieces)) as engine, live_proxy(engine) as proxy:
            body = await self.broken(proxy)
            sent = b"".join(pieces)
            assert body.startswith(sent)
            check_shape(told(body.removeprefix(sent).strip()))
            assert proxy.reasons() == {"cut_mid_stream": 1}

    @pytest.mark.parametrize("end", [DONE, last(), last() + DONE])
    async def test_one_that_ends_with_its_connection_after_its_own_end_is_whole(self, end: bytes) -> None:
        async with scripted_engine(ending_with_connection(token(), end)) as engine, live_proxy(engine) as proxy:
            assert await proxy.fetch() == (200, token() + end)
            assert proxy.outcomes() == {"completed": 1}

    async def test_the_connection_to_the_client_can_be_used_again(self) -> None:
        async def script(call: Call) -> None:
            await call.begin()
            call.reset()

        async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            async with asyncio.timeout(5):
                writer.write(raw_post(STREAMED).replace(b"Connection: close\r\n", b""))
                assert (await reader.readuntil(b"0\r\n\r\n")).count(b"data: ") == 1
                engine.script = two_tokens
                writer.write(raw_post(STREAMED))
                assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")
            writer.close()

    async def test_an_engine_that_dies_with_many_streams(self) -> None:
        """Those that had begun fail fast with one error event each, and those that waited do not wait for it."""
        streams = 20

        async def script(call: Call) -> None:
            await call.begin()
            await call.write(token())
            await call.gone.wait()

        async with (
            scripted_engine(script) as dying,
            live_proxy(dying, max_num_seqs=streams, probe_interval_seconds=0.02) as proxy,
            asyncio.TaskGroup() as group,
        ):
            begun = [group.create_task(proxy.fetch()) for _ in range(streams)]
            await until(lambda: proxy.scheduler.engines[0].decodes == streams)
            waiting = [group.create_task(proxy.fetch()) for _ in range(5)]
            await until(lambda: proxy.scheduler.waiting == 5)
            await dying.stop()
            answers = await asyncio.wait_for(asyncio.gather(*begun), 1)
            assert all(body.count(b"upstream_error") == 1 for _, body in answers)
            refused = await asyncio.wait_for(asyncio.gather(*waiting), 2)
            assert {status for status, _ in refused} == {503}
            assert proxy.outcomes() == {"engine_failed": streams, "rejected": 5}


class TestAnswersInOnePieceThatBreakOff:
    @pytest.mark.parametrize("end", ["FIN", "RST"])
    @pytest.mark.parametrize("framing", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
    async def test_the_clients_connection_is_cut_too(self, end: str, framing: str) -> None:
        """The status is out, and a body that ended in an orderly way would be taken for the whole."""

        async def script(call: Call) -> None:
            await call.send(head("200 OK", *JSON, framing))
            part = b'{"choices": ['
            await call.send(chunk(part) if "chunked" in framing else part)
            await asyncio.wait_for(received.wait(), 5)
            (call.close if end == "FIN" else call.reset)()

        received = asyncio.Event()
        async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
            async with proxy.post(body=WHOLE) as response:
                assert response.status == 200
                data = await response.content.readany()
                assert data == b'{"choices": ['
                received.set()
                with pytest.raises(aiohttp.ClientError):
                    await response.read()
            assert proxy.outcomes() == {"engine_failed": 1}
            assert proxy.reasons() == {"cut_mid_stream": 1}

    async def test_no_error_event_is_put_into_it(self) -> None:
        async def script(call: Call) -> None:
            await call.send(head("200 OK", *JSON, "Content-Length: 1000") + b"{")
            call.close()

        async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
            answer = await exchange(proxy, raw_post(WHOLE))
            assert answer.endswith(b"\r\n\r\n{") or answer == b""
            assert proxy.outcomes() == {"engine_failed": 1}


async def test_every_way_to_end_is_one_outcome() -> None:
    async def script(call: Call) -> None:
        prompt = call.json()["prompt"]
        if prompt == "complete":
            await two_tokens(call)
        elif prompt == "error":
            await call.answer(b"{}", status="400 Bad Request")
        elif prompt == "cut":
            await call.send(head("200 OK", *SSE, "Transfer-Encoding: chunked"))
            call.reset()
        else:
            call.close()

    async with scripted_engine(script) as engine, live_proxy(engine) as proxy:
        for prompt in ("complete", "error", "cut", "nothing"):
            await proxy.fetch(body=json.dumps({"model": "m", "prompt": prompt, "stream": True}).encode())
        await proxy.fetch(body=b"{bad")
        await proxy.fetch(body=b'{"model": "unknown", "prompt": "x"}')
        assert proxy.outcomes() == {"completed": 1, "engine_error": 1, "engine_failed": 2, "rejected": 2}
        assert proxy.reasons() == {
            "engine_400": 1,
            "cut_mid_stream": 1,
            "cut_before_answer": 1,
            "bad_request": 1,
            "unknown_model": 1,
        }
