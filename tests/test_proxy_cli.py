"""``slai-proxy``: help, exit codes, and mistakes told in a line. What it does when it serves is in ``e2e``."""

import hashlib
import io
import re
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter

from proxy import __version__
from proxy.cli import main
from proxy.configload import load_settings
from proxy.core import is_compiled
from proxy.keys import KeySettings

COMMANDS = ("serve", "check-config", "config", "key", "simulate", "engine", "replay")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.upper().startswith("SLAI_")]:
        monkeypatch.delenv(name)


def exit_code(*arguments: str) -> int:
    """Run a command, whether it returns its exit code or exits as argparse does."""
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else -1


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--help") == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^ +{command}( |$)", printed, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(command, "--help") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"usage: slai-proxy {command} ")
    assert printed.err == ""


def test_config_says_that_it_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("config", "--help") == 0
    assert "start nothing, and print the settings" in " ".join(capsys.readouterr().out.split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("--version") == 0
    compiled = " (core compiled)" if is_compiled() else ""
    assert capsys.readouterr().out == f"slai-proxy {__version__}{compiled}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "COMMAND"),
        (("nonsense",), "nonsense"),
        (("serve", "--nonsense", "1"), "--nonsense"),
        (("serve", "extra"), "extra"),
        (("serve", "--port", "abc"), "port (flag)"),
        (("serve", "--engines", "localhost"), "engines (flag)"),
        (("serve", "--config", "/no/such/file"), "/no/such/file"),
        (("config", "--port", "abc"), "port (flag)"),
        (("config", "--policy", "lifo"), "policy (flag)"),
        (("config", "--classes", "{bad"), "JSON"),
        (("config", "--engines", "http://h:99999"), "65535"),
        (("serve", "--port", "0", "--sim-profile", "abacus"), "sim_profile (flag)"),
        (("serve", "--port", "0", "--decision-log", "/no/such/place"), "/no/such/place"),
        (("serve", "--decision-log-bytes", "9"), "decision_log_bytes (flag)"),
        (("replay",), "LOG"),
        (("replay", "/no/such/file"), "/no/such/file"),
        (("simulate",), "--rate"),
        (("simulate", "--rate", "-1"), "-1"),
        (("simulate", "--rate", "1", "--trace", "/no/such/file"), "/no/such/file"),
        (("engine", "--ports", "x"), "--ports: 'x' is not a port"),
        (("engine", "--ports", "8101,70000"), "--ports: '70000' is not a port (0 to 65535)"),
        (("engine", "--ports", ""), "--ports: '' is not a port"),
        (("engine", "--ports", "-1"), "--ports"),
        (("engine", "--profile", "abacus"), "abacus"),
        (("engine", "--speed", "0", "--ports", "0"), "--speed: 0 is not a positive number"),
        (("engine", "--speed", "nan", "--ports", "0"), "--speed: nan is not a positive number"),
        (("engine", "--token-budget", "-5", "--ports", "0"), "--token-budget: -5 is not a positive number"),
        (("engine", "--max-num-seqs", "0", "--ports", "0"), "--max-num-seqs: 0 is not a positive number"),
        (("engine", "--token-budget", "1", "--ports", "0"), "--token-budget: 1 does not hold"),
    ],
)
def test_mistakes_exit_with_2_and_say_what_is_wrong(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    said = printed.err.rstrip("\n").splitlines()
    assert said[-1].startswith("slai-proxy")
    assert words in said[-1]
    assert len(said) == 1 or said[0].startswith("usage: "), "one line, or argparse's usage before it"


def test_a_state_directory_that_cannot_be_used_ends_serve_at_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    arguments = ("--engines", "http://127.0.0.1:1", "--state-dir", str(tmp_path / "file"))
    assert exit_code("serve", *arguments) == 2
    assert capsys.readouterr().err == f"slai-proxy: --state-dir {tmp_path / 'file'}: not a directory\n"


def test_config_prints_every_setting_with_its_source(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("token_budget: 512\n")
    monkeypatch.setenv("SLAI_POLICY", "fcfs")
    assert exit_code("config", "--config", str(file), "--port", "9") == 0
    lines = capsys.readouterr().out.splitlines()
    sources = dict(zip(lines[1:], lines, strict=False))  # each setting stands beneath where it comes from
    assert sources["port: 9"] == "# flag"
    assert sources["policy: fcfs"] == "# environment"
    assert sources["token_budget: 512"] == f"# file {file}"
    assert sources["host: 127.0.0.1"] == "# default"


@pytest.mark.parametrize(("budget", "advised"), [("2000", True), ("512", False)])
def test_config_advises_on_stderr(budget: str, advised: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("config", "--token-budget", budget) == 0
    assert ("2000 is not a multiple of 128" in capsys.readouterr().err) is advised


def test_what_config_prints_can_be_kept_as_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = (
        *("--engines", "http://a:1,https://b/behind/a/path", "--policy", "fcfs", "--tiles", "--kv-tokens", "5000"),
        *("--classes", '{"gold: #1": {"ttft_seconds": 1, "tbt_seconds": 0.05}, "bulk": {}}', "--default-class", "bulk"),
        *("--otlp-endpoint", "http://127.0.0.1:4318/v1/traces", "--kv-watermark", "1e-3", "--host", "::"),
    )
    assert exit_code("config", *flags) == 0
    file = tmp_path / "settings.yaml"
    file.write_text(capsys.readouterr().out)
    (found, sources), (expected, _) = load_settings(("--config", str(file)), "prog"), load_settings(flags, "prog")
    assert found.model_copy(update={"config": None}) == expected
    assert sources == {name: "flag" if name == "config" else f"file {file}" for name in sources}


def test_an_interrupt_before_a_command_runs_ends_as_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("proxy.configload.load_settings", interrupted)
    for command in ("serve", "config"):
        assert exit_code(command) == 130


class TestKeys:
    def test_a_new_key_is_shown_once_and_its_entry_holds(self, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ("--tenant", "acme", "--models", "a, b*", "--requests-per-minute", "60", "--admin")
        assert main(["key", "new", "acme-1", *flags]) == 0
        told = capsys.readouterr()
        key = re.search(r"acme-1: (sk-slai-\S{43})\n", told.err)
        assert key is not None
        assert key[1] not in told.out
        (found,) = (entry.key(name) for name, entry in _entries(told.out).items())
        assert (found.tenant, found.models, found.limits.requests_per_minute) == ("acme", ("a", "b*"), 60)
        assert found.admin
        assert found.sha256 == hashlib.sha256(key[1].encode()).hexdigest()
        main(["key", "new", "acme-1"])
        assert capsys.readouterr().err != told.err

    def test_the_entry_of_a_key_that_is_there(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO("my-key\n"))
        assert main(["key", "hash", "mine"]) == 0
        told = capsys.readouterr()
        assert _entries(told.out)["mine"].sha256 == hashlib.sha256(b"my-key").hexdigest()
        assert "my-key" not in told.out + told.err
        monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
        assert main(["key", "hash", "mine"]) == 2

    def test_wrong_use(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["key", "new", "a b"]) == 2
        with pytest.raises(SystemExit):
            main(["key", "new", "a", "--concurrency", "0"])
        assert "--concurrency" in capsys.readouterr().err


class TestCheckConfig:
    def test_settings_that_hold(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check-config", "--port", "0"]) == 0
        told = capsys.readouterr()
        assert told.out == "the settings hold\n"
        assert told.err == "slai-proxy: no engines are given: serve would start simulated ones\n"
        assert main(["check-config", "--port", "0", "--engines", "http://a:1"]) == 0
        assert capsys.readouterr().err == ""

    def test_a_flag_that_there_is_not(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["check-config", "--token-budgets=3"])
        assert "did you mean --token-budget?" in capsys.readouterr().err

    def test_files_that_the_settings_name_are_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "keys").write_text("a: 1\n")
        assert main(["check-config", "--keys-file", str(tmp_path / "keys")]) == 2
        assert "line 1" in capsys.readouterr().err

    def test_an_option_of_a_stores_url_that_nobody_knows(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check-config", "--redis", "redis://:password@h/0?colour=red"]) == 2
        told = capsys.readouterr().err
        assert "colour" in told
        assert "password" not in told
        assert main(["check-config", "--redis", "redis://:password@h/0"]) == 0


def _entries(text: str) -> dict[str, KeySettings]:
    return TypeAdapter(dict[str, KeySettings]).validate_python(yaml.safe_load(text))
