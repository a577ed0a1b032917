"""How requests find their handler."""

from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from aiohttp.typedefs import Middleware

from proxy.server.runner import by_plain_paths

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
NAME = web.AppKey("name", str)


@web.middleware
async def marked(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await handler(request)
    response.headers["x-of"] = request.app[NAME]
    return response


async def plain(_: web.Request) -> web.Response:
    return web.Response(text="plain")


async def routed(_: web.Request) -> web.Response:
    return web.Response(text="routed")


def handler_of(*middlewares: Middleware) -> Handler:
    app = web.Application(middlewares=middlewares)
    app[NAME] = "here"
    app.router.add_post("/v1/plain", plain)
    app.router.add_post("/v1/{rest:.*}", routed)
    app.router.add_get("/v1/got", plain)
    return by_plain_paths(app, routed)


async def text_of(handler: Handler, method: str, path: str, **headers: str) -> str | None:
    response = await handler(make_mocked_request(method, path, headers=headers))
    assert isinstance(response, web.Response)
    assert response.headers.get("x-of") == ("here" if response.text == "plain" else None)
    return response.text


@pytest.mark.parametrize("path", ["/v1/plain", "/v1/plain?x=1"])
async def test_what_is_posted_to_a_plain_path_passes_by_the_router(path: str) -> None:
    assert await text_of(handler_of(marked), "POST", path) == "plain"


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/plain"), ("POST", "/v1/plain/"), ("POST", "/v1%2Fplain"), ("POST", "/v1/other"), ("GET", "/v1/got")],
)
async def test_other_requests_are_routed(method: str, path: str) -> None:
    assert await text_of(handler_of(marked), method, path) == "routed"


async def test_one_that_expects_something_is_routed() -> None:
    assert await text_of(handler_of(marked), "POST", "/v1/plain", expect="100-continue") == "routed"


@pytest.mark.parametrize("middlewares", [(), (marked, marked)])
async def test_all_are_routed_where_there_is_not_one_middleware(middlewares: tuple[Middleware, ...]) -> None:
    assert await text_of(handler_of(*middlewares), "POST", "/v1/plain") == "routed"
