"""What is left of a flame graph that goes into a repository."""

from bench.flame import _without_place


def test_a_flame_graph_does_not_tell_where_it_was_drawn() -> None:
    place = "/home/me/.venv/lib/python3.11/site-packages/"
    drawn = f"<text>py-spy record --pid 7</text><title>run ({place}aiohttp/web.py:1) (9)</title>"
    wanted = "<text>slai-proxy, tokens</text><title>run (aiohttp/web.py:1) (9)</title>"
    assert _without_place(drawn, "slai-proxy, tokens") == wanted


def test_other_names_stay() -> None:
    drawn = "<title>main (proxy/cli.py:42) (3 samples, 1%)</title><text>a/b</text>"
    assert _without_place(drawn, "") == drawn
