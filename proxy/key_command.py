"""``slai-proxy key``: make API keys."""

from __future__ import annotations

import argparse
import re
import sys

import yaml

from proxy.keys import digest_of, new_key

_EPILOG = """\
examples:
  slai-proxy key new acme-1 --tenant acme --models 'llama-*' --requests-per-minute 60 >> keys.yaml
  slai-proxy key hash acme-2 < key.txt >> keys.yaml     # a key that you have already
  slai-proxy serve --keys-file keys.yaml ...
"""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's own flags."""
    parser = commands.add_parser(
        "key",
        help="make an API key, or the line of one for the keys file",
        description="new: make an API key. It is shown once, on standard error; the entry for the keys file, with its "
        "hash, goes to standard output. hash: the entry of a key that is read from standard input.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("new", "hash"))
    parser.add_argument("name", help="what logs and metrics call the key")
    parser.add_argument("--tenant", help="whose it is (default: the key's name)")
    parser.add_argument("--classes", type=_names, help="classes it may ask for, with commas; the first by default")
    parser.add_argument(
        "--models", type=_names, help="models it may use, with commas; * at the end stands for anything"
    )
    for name, what in (
        ("requests-per-minute", "most requests a minute"),
        ("tokens-per-minute", "most tokens a minute, prompt and output"),
        ("concurrency", "most requests at once"),
    ):
        parser.add_argument(f"--{name}", type=_positive, metavar="NUMBER", help=what)
    parser.add_argument("--admin", action="store_true", help="may use the engines' own administration")


def run(options: argparse.Namespace) -> int:
    """Print a key's entry."""
    if not _NAME.fullmatch(options.name):
        print("slai-proxy: a key's name is 1 to 64 letters, digits, '.', '_' and '-'", file=sys.stderr)
        return 2
    if options.action == "new":
        key = new_key()
        print(f"{options.name}: {key}\nIt is not shown again.", file=sys.stderr)
    else:
        key = sys.stdin.read().strip()
        if not key or any(c.isspace() for c in key):
            print("slai-proxy: give one API key on standard input", file=sys.stderr)
            return 2
    entry: dict[str, object] = {"sha256": digest_of(key)}
    names = ("tenant", "classes", "models", "requests_per_minute", "tokens_per_minute", "concurrency")
    entry |= {name: value for name in names if (value := getattr(options, name)) is not None}
    entry |= {"admin": True} if options.admin else {}
    print(yaml.safe_dump({options.name: entry}, sort_keys=False, default_flow_style=None, width=1000), end="")
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value
