"""Settings: which source wins, where each value came from, and what every mistake is told."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict

from proxy.config import Settings
from proxy.configfile import ConfigError
from proxy.configload import advice, load_settings
from proxy.core.limits import CacheConfig, EngineLimits
from proxy.core.ordering import first_come_first_served, shortest_prompt_first
from proxy.core.policies import PolicyName
from proxy.core.request import RequestClass
from proxy.entries import ClassSettings, TenantSettings
from proxy.flags import SECTIONS


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.upper().startswith("SLAI_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def load(*arguments: str) -> tuple[Settings, dict[str, str]]:
    return load_settings(arguments, "prog")


def settings(*arguments: str) -> Settings:
    return load(*arguments)[0]


def complaint(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    return str(caught.value)


class TestPrecedence:
    def test_defaults(self) -> None:
        found, sources = load()
        assert found == Settings()
        assert set(sources.values()) == {"default"}
        assert sources.keys() == Settings.model_fields.keys()

    def test_flag_over_environment_over_file_over_default(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        file.write_text("port: 1\nmax_num_seqs: 1\ntoken_budget: 1\n")
        monkeypatch.setenv("SLAI_PORT", "2")
        monkeypatch.setenv("SLAI_MAX_NUM_SEQS", "2")
        found, sources = load("--config", str(file), "--port", "3")
        assert (found.port, found.max_num_seqs, found.token_budget, found.host) == (3, 2, 1, "127.0.0.1")
        assert sources["port"] == "flag"
        assert sources["max_num_seqs"] == "environment"
        assert sources["token_budget"] == f"file {file}"
        assert sources["host"] == "default"
        assert sources["config"] == "flag"

    def test_a_default_that_is_given_counts_as_given(self, file: Path) -> None:
        file.write_text("port: 8000\n")
        found, sources = load("--config", str(file), "--policy", "spf")
        assert found.port == 8000
        assert sources["port"] == f"file {file}"
        assert sources["policy"] == "flag"

    def test_the_file_may_be_named_by_the_environment(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        file.write_text("port: 9\n")
        monkeypatch.setenv("SLAI_CONFIG", str(file))
        found, sources = load()
        assert found.port == 9
        assert sources["config"] == "environment"

    def test_a_flag_names_another_file_than_the_environment(
        self, monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("SLAI_CONFIG", str(tmp_path / "missing.yaml"))
        file.write_text("port: 9\n")
        assert settings("--config", str(file)).port == 9

    def test_a_table_of_classes_replaces_the_weaker_one_whole(
        self, monkeypatch: pytest.MonkeyPatch, file: Path
    ) -> None:
        file.write_text("classes: {gold: {tbt_seconds: 0.05}, bulk: {}}\ndefault_class: bulk\n")
        found = settings("--config", str(file))
        assert set(found.classes) == {"gold", "bulk"}
        monkeypatch.setenv("SLAI_CLASSES", '{"bulk": {"ttft_seconds": 3}}')
        found, sources = load("--config", str(file))
        assert found.classes == {"bulk": ClassSettings(ttft_seconds=3)}
        assert sources["classes"] == "environment"

    def test_an_empty_file_changes_nothing(self, file: Path) -> None:
        for text in ("", "# nothing\n", "---\n"):
            file.write_text(text)
            assert settings("--config", str(file)).port == 8000


class TestValues:
    @pytest.mark.parametrize(
        "arguments",
        [
            ("--engines", "http://a:1,http://b:2"),
            ("--engines", " http://a:1/ , http://b:2/ ,"),
            ("--engines", "http://a:1", "--engines", "http://b:2"),
        ],
    )
    def test_engines_on_the_command_line(self, arguments: tuple[str, ...]) -> None:
        assert settings(*arguments).engines == ("http://a:1", "http://b:2")

    def test_engines_elsewhere(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        file.write_text("engines: [http://a:1, 'http://b:2/']\n")
        assert settings("--config", str(file)).engines == ("http://a:1", "http://b:2")
        file.write_text("engines: http://a:1,http://b:2\n")
        assert settings("--config", str(file)).engines == ("http://a:1", "http://b:2")
        monkeypatch.setenv("SLAI_ENGINES", "http://c:3,http://d:4")
        assert settings("--config", str(file)).engines == ("http://c:3", "http://d:4")

    def test_an_engine_behind_a_path_and_tls(self) -> None:
        assert settings("--engines", "https://h/behind/a/path/").engines == ("https://h/behind/a/path",)

    def test_classes_on_the_command_line(self) -> None:
        found = settings("--classes", '{"gold": {"ttft_seconds": 1, "tbt_seconds": 0.05}}', "--default-class", "gold")
        assert found.request_classes() == {"gold": RequestClass("gold", 1.0, 0.05)}

    def test_a_class_may_have_a_weight(self) -> None:
        found = settings("--classes", '{"gold": {"weight": 3}, "bulk": {}}', "--default-class", "bulk")
        assert found.request_classes() == {"gold": RequestClass("gold", weight=3.0), "bulk": RequestClass("bulk")}

    def test_tenants_may_be_guaranteed_tokens_a_minute(self) -> None:
        found = settings("--tenants", '{"acme": {"guaranteed_tokens_per_minute": 90000}, "batch": {"weight": 0.5}}')
        assert found.scheduler_config().tenant_guarantees == {"acme": 90_000}
        assert found.scheduler_config().tenant_weights == {"acme": 1.0, "batch": 0.5}

    def test_tenants_have_weights_and_keys(self) -> None:
        digest = hashlib.sha256(b"k").hexdigest()
        found = settings("--tenants", json.dumps({"acme": {"weight": 2, "key_sha256": [digest]}}))
        assert found.scheduler_config().tenant_weights == {"acme": 2.0}
        assert found.tenant_reader(b"s").of(CIMultiDict({"x-api-key": "k"})) == "acme"

    @pytest.mark.parametrize(
        ("tenants", "told"),
        [
            ({"a": {"weight": 0}}, "greater than 0"),
            ({"a": {"key_sha256": ["k"]}}, "key_sha256"),
            ({name: {"key_sha256": ["0" * 64]} for name in "ab"}, "one tenant only"),
            ({f"t{n}": {} for n in range(101)}, "at most 100"),
        ],
    )
    def test_wrong_tenants_are_told(self, tenants: dict[str, Any], told: str) -> None:
        with pytest.raises(ConfigError, match=told):
            settings("--tenants", json.dumps(tenants))

    def test_the_classes_of_the_paper_are_the_default(self) -> None:
        found = Settings().request_classes()
        assert found == {"strict": RequestClass("strict", None, 0.1), "relaxed": RequestClass("relaxed", None, 0.5)}

    def test_a_configured_kv_size_wins_over_what_the_engine_tells(self) -> None:
        told = CacheConfig(kv_tokens=1000, block_tokens=32, caches_prefixes=True)
        assert Settings(token_budget=8, max_num_seqs=9).engine_limits(told) == EngineLimits(8, 9, 1000, 32, True)
        assert Settings().engine_limits(CacheConfig()).kv_tokens is None
        assert Settings(kv_tokens=50).engine_limits(told).kv_tokens == 50

    def test_the_rules_of_the_scheduler(self) -> None:
        found = settings(
            *("--backlog-factor", "2.5", "--kv-watermark", "0.1", "--max-wait-seconds", "7"),
            *("--tenant-headroom", "0.2"),
            *("--queue-timeout-seconds", "8", "--max-queue-requests", "9", "--max-queue-bytes", "10"),
        ).scheduler_config()
        assert (found.gate.backlog_factor, found.gate.kv_watermark, found.gate.tenant_headroom) == (2.5, 0.1, 0.2)
        assert (found.max_wait_seconds, found.queue_timeout_seconds) == (7, 8)
        assert (found.max_queue_requests, found.max_queue_bytes) == (9, 10)

    def test_the_order(self) -> None:
        fcfs, expected = settings("--policy", "fcfs").scheduler_config().ordering, first_come_first_served()
        assert [fcfs(p, t) for p, t in ((5, 1.0), (1, 2.0))] == [expected(p, t) for p, t in ((5, 1.0), (1, 2.0))]
        spf, expected = settings("--aging-seconds", "3").scheduler_config().ordering, shortest_prompt_first(3.0)
        assert [spf(p, t) for p, t in ((5, 1.0), (1, 2.0))] == [expected(p, t) for p, t in ((5, 1.0), (1, 2.0))]

    @pytest.mark.parametrize("policy", PolicyName)
    def test_every_policy_can_be_chosen(self, policy: PolicyName) -> None:
        assert settings("--policy", policy).policy == policy

    def test_throughput_mode(self) -> None:
        assert settings("--policy", "rad").scheduler_config().rad is not None
        assert settings().scheduler_config().rad is None
        assert "tiles" in complaint("--policy", "rad", "--tiles")

    def test_a_known_budget_that_is_no_whole_number_of_tiles_is_told(self) -> None:
        assert ["2000 is not a multiple of 128" in line for line in advice(*load("--token-budget", "2000"))] == [True]
        assert advice(*load("--token-budget", "512")) == []
        assert advice(*load()) == []

    def test_a_budget_too_small_for_tiles_is_told(self) -> None:
        (told,) = advice(*load("--tiles", "--token-budget", "512", "--engines", "http://a:1"))
        assert told.startswith("--tiles needs a token budget of 2048 or more: with 512 ")
        assert advice(*load("--tiles", "--engines", "http://a:1")) == []
        assert advice(*load("--token-budget", "512")) == []

    def test_tiles_over_simulated_engines_of_our_own_are_told_to_be_of_no_use(self) -> None:
        (told,) = advice(*load("--tiles"))
        assert told.startswith("--tiles has no effect on simulated engines of our own; ")

    def test_a_state_directory_for_simulated_engines_is_told_to_be_of_no_use(self) -> None:
        text = "--state-dir is not used for simulated engines of our own"
        assert advice(*load("--state-dir", "/tmp/x")) == [text]
        assert advice(*load("--state-dir", "/tmp/x", "--engines", "http://a:1")) == []

    def test_defaults_of_the_core_and_of_the_settings_are_the_same(self) -> None:
        from proxy.core.config import SchedulerConfig

        ours, core = Settings().scheduler_config(), SchedulerConfig()
        for name in ("gate", "max_wait_seconds", "queue_timeout_seconds", "max_queue_requests", "max_queue_bytes"):
            assert getattr(ours, name) == getattr(core, name), name

    def test_settings_do_not_change(self) -> None:
        with pytest.raises(ValueError, match="frozen"):
            Settings().port = 1


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--port", "abc"), ("port (flag)", "integer")),
            (("--port", "70000"), ("port (flag)", "65535")),
            (("--port", "-1"), ("port (flag)", "0")),
            (("--token-budget", "0"), ("token_budget (flag)", "greater than 0")),
            (("--aging-seconds", "nan"), ("aging_seconds (flag)", "finite")),
            (("--queue-timeout-seconds", "inf"), ("queue_timeout_seconds (flag)", "finite")),
            (("--connect-timeout-seconds", "inf"), ("connect_timeout_seconds (flag)", "finite")),
            (("--kv-watermark", "1"), ("kv_watermark (flag)", "less than 1")),
            (("--drain-seconds", "-1"), ("drain_seconds (flag)", "0")),
            (("--policy", "lifo"), ("policy (flag)", "'slai' or 'rad'")),
            (("--log-level", "loud"), ("log_level (flag)", "'debug'")),
            (("--engines", "localhost:8001"), ("engines (flag)", "localhost:8001", "http://")),
            (("--engines", "ftp://h"), ("engines (flag)", "ftp://h")),
            (("--engines", "http://"), ("engines (flag)", "http://")),
            (("--engines", "http://h?x=1"), ("engines (flag)", "http://h?x=1")),
            (("--engines", "http://h:1,http://h:1/"), ("engines (flag)", "twice")),
            (("--engines", "http://h:80,http://H"), ("engines (flag)", "twice")),
            (("--engines", "http://h x:1"), ("engines (flag)", "'http://h x:1'", "spaces")),
            (("--engines", "http://h:1/a\r\nb"), ("engines (flag)", "control characters")),
            (("--engines", "http://h:99999"), ("engines (flag)", "http://h:99999", "65535")),
            (("--engines", "http://h:abc"), ("engines (flag)", "http://h:abc", "port")),
            (("--engines", "http://h:1/v1"), ("engines (flag)", "http://h:1/v1", "without /v1")),
            (("--engines", "https://h/behind/v1/"), ("engines (flag)", "without /v1")),
            (("--classes", "{bad"), ('classes (flag): not JSON; like {"fast": {"tbt_seconds": 0.1}}',)),
            (("--classes", "xx"), ('classes (flag): not JSON; like {"fast": {"tbt_seconds": 0.1}}',)),
            (("--classes", "3"), ('classes (flag): give {"fast": {"tbt_seconds": 0.1}}',)),
            (("--classes", '{"a": 3}'), ('classes.a (flag): give {"tbt_seconds": 0.1}',)),
            (("--tenants", "["), ('tenants (flag): not JSON; like {"acme": {"weight": 3}}',)),
            (("--tenants", "[" * 100_000), ("tenants (flag): not JSON",)),
            (("--tenants", '{"acme": 7}'), ('tenants.acme (flag): give {"weight": 7}',)),
            (("--tenants", '{"acme": "hi"}'), ('tenants.acme (flag): give {"weight": 3}',)),
            (("--tenants-from", "KEY"), ("tenants_from (flag)", "'none', 'named', 'key' or 'header'")),
            (("--policy", "tiles"), ("policy (flag)", "(tiles is the flag --tiles)")),
            (("--debug-port", "9", "--port", "9"), ("--debug-port and --port are both 9",)),
            (("--default-class", "gold"), ("gold", "strict", "relaxed")),
            (("--classes", '{"a": {"tbt": 1}}', "--default-class", "a"), ("classes.a.tbt (flag)", "no such setting")),
            (("--classes", '{"a": {"tbt_seconds": -1}}'), ("classes.a.tbt_seconds (flag)", "greater than", "0.000001")),
            # Times made from these would not be finite, and raise with the first request that waits.
            (("--aging-seconds", "1e-320"), ("aging_seconds (flag)", "0.000001")),
            (("--queue-timeout-seconds", "1e305"), ("queue_timeout_seconds (flag)", "1000000000")),
            (("--classes", '{"a": {"ttft_limit_seconds": 1e305}}'), ("classes.a.ttft_limit_seconds", "1000000000")),
        ],
    )
    def test_flags(self, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
        found = complaint(*arguments)
        assert all(word in found for word in words), found
        assert "\n" not in found

    @pytest.mark.parametrize("url", ["http://user:secret@h:1", "http://secret@h:1", "http://:secret@h:1"])
    def test_credentials_in_the_url_of_an_engine_are_refused_and_not_repeated(self, url: str) -> None:
        found = complaint("--engines", url)
        assert "engines (flag)" in found
        assert "credentials" in found
        assert "secret" not in found

    def test_classes_in_the_environment_that_are_not_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLAI_CLASSES", "{bad")
        found = complaint()
        assert "classes" in found
        assert "JSON" in found

    @pytest.mark.parametrize(("value", "words"), [("x", "port (environment)"), ("", "port (environment)")])
    def test_environment(self, monkeypatch: pytest.MonkeyPatch, value: str, words: str) -> None:
        monkeypatch.setenv("SLAI_PORT", value)
        assert words in complaint()

    def test_a_name_in_the_environment_that_is_no_setting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SLAI_PROT", "1")
        monkeypatch.setenv("SLAI_ENGINE", "http://a")
        found = complaint()
        assert "SLAI_ENGINE" in found
        assert "SLAI_PROT" in found
        assert found.endswith("; did you mean SLAI_ENGINES?")

    def test_other_variables_are_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PORT", "1")
        monkeypatch.setenv("MY_SLAI_PORT", "1")
        assert settings().port == 8000

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("prot: 1", ("prot (file ", "no such setting")),
            ("port: abc", ("port (file ", "integer")),
            ("1: 2", ("1 (file ", "no such setting")),
            ("- port", ("mapping", "list")),
            ("just words", ("mapping", "str")),
            ("tokenbudget: 1", ("line 1", "no such setting; did you mean token_budget?")),
            ("host: a\nport: 1\nport: 2", ("line 3: port is there already, in line 2",)),
            ("classes:\n  a: {}\n  b: {}\n  a: {}", ("line 4: classes.a is there already, in line 2",)),
            ("classes:\n  a: {tbt_second: 1}", ("line 2", "no such setting; did you mean tbt_seconds?")),
            ("tenants:\n  a: {wieght: 1}", ("no such setting; did you mean weight?",)),
            ("keys:\n  a: {sha265: b}", ("no such setting; did you mean sha256?",)),
            ("classes:\n  relaxed:\n    tbt: 1", ("classes.relaxed.tbt (file ", "line 3)")),
            ("engines:\n- http://a\n- ftp://b", ("engines (file ", "line 1)")),
            ("port: 1\na: &a [*a]", ("no such setting",)),
            ("[" * 5000, ("nested too deeply",)),
            ("port: " + "9" * 5000, ("is not valid YAML: ",)),
            ("log_level: 2026-13-45", ("is not valid YAML: month must be in 1..12",)),
            ("port: [1", ("is not valid YAML: line 1, column 9: ",)),
            ("port: 1\n\tx", ("is not valid YAML: line 2, column 1: ",)),
            ("port: \0", ("is not valid YAML: position 6: special characters are not allowed",)),
            ("engines: null", ("engines (file ",)),
            ("engines: {a: b}", ("engines (file ",)),
            ("classes: null", ("classes (file ",)),
            ("classes: {}", ("default_class",)),
            ("classes: {gold: 5}", ("classes.gold (file ",)),
            ("a: !!python/object/apply:os.getcwd []", ("not valid YAML",)),
        ],
    )
    def test_file(self, file: Path, text: str, words: tuple[str, ...]) -> None:
        file.write_text(text)
        found = complaint("--config", str(file))
        assert all(word in found for word in words), found
        assert "<unicode string>" not in found

    def test_a_file_that_cannot_be_read(self, tmp_path: Path) -> None:
        assert "No such file" in complaint("--config", str(tmp_path / "missing.yaml"))
        assert "directory" in complaint("--config", str(tmp_path))
        binary = tmp_path / "binary"
        binary.write_bytes(b"\xff\xfe\x00\x01")
        assert "not valid YAML" in complaint("--config", str(binary))

    def test_all_mistakes_are_told_at_once_each_with_its_source(
        self, monkeypatch: pytest.MonkeyPatch, file: Path
    ) -> None:
        file.write_text("kv_tokens: 0\n")
        monkeypatch.setenv("SLAI_POLICY", "lifo")
        lines = complaint("--config", str(file), "--port", "x").splitlines()
        assert sorted(line.split(":")[0].split(" (")[0] for line in lines) == ["kv_tokens", "policy", "port"]
        assert any("(environment)" in line for line in lines)
        assert any(f"(file {file}, line 1)" in line for line in lines)

    @pytest.mark.parametrize(
        "arguments", [("--nonsense", "1"), ("positional",), ("--port",), ("--por", "9"), ("--tile",)]
    )
    def test_flags_that_do_not_parse_end_as_argparse_does(
        self, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            load(*arguments)
        assert caught.value.code == 2
        assert "prog" in capsys.readouterr().err


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_a_flag_with_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(rf" --{name.replace('_', '-')}[ ,]", text)
    description: Any = Settings.model_fields[name].description
    assert description
    assert " ".join(description.split())[:20] in text


class TestHelp:
    @staticmethod
    def text(capsys: pytest.CaptureFixture[str]) -> str:
        with pytest.raises(SystemExit):
            load_settings(("--help",), "prog", "Does this and that.")
        return " ".join(capsys.readouterr().out.split())

    def test_it_is_for_people_who_know_no_python(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = self.text(capsys)
        found = re.findall(r"factory|lambda|None|True|False|Path|\b(?:str|int|float|dict|tuple)\b|\(\)|KEY", text)
        assert found == []

    def test_it_has_sections_in_order(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = self.text(capsys)
        places = [text.index(f" {title}: --{first.replace('_', '-')}") for first, title in SECTIONS.items()]
        assert places == sorted(places)

    def test_values_and_defaults_are_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = self.text(capsys)
        for value in (
            *("--engines URL[,URL] ", "--classes JSON ", "--state-dir DIR ", "--port PORT ", "--debug-port PORT "),
            *("--drain-seconds SECONDS ", "--kv-tokens TOKENS ", "--max-num-seqs NUMBER ", "--sim-engines NUMBER "),
            *("--tenants-from {none,named,key,header} ", "--policy {fcfs,spf,slai,rad} "),
        ):
            assert value in text
        options = re.split(r" (?=--[a-z-]+ [A-Z{])", text)
        defaults = (re.match(r"(--[a-z-]+) .* \(default: ([^()]*)\)$", option) for option in options)
        explained = {found[1]: found[2] for found in defaults if found}
        assert explained["--engines"] == explained["--tenants"] == "none"
        assert explained["--classes"] == "strict and relaxed"
        assert explained["--tenants-from"] == "named"
        assert explained["--port"] == "8000"

    def test_tables_are_shown_by_an_example_that_holds(self, capsys: pytest.CaptureFixture[str]) -> None:
        text = self.text(capsys)
        fast, acme = re.findall(r"like (\{.*?\}\})", text)
        found = settings("--classes", fast, "--default-class", "fast", "--tenants", acme)
        assert found.classes == {"fast": ClassSettings(ttft_seconds=1, tbt_seconds=0.1)}
        assert found.scheduler_config().tenant_weights == {"acme": 3.0}
        assert all(field in text for model in (ClassSettings, TenantSettings) for field in model.model_fields)
        assert "replaces strict and relaxed; name default_class too" in text

    def test_it_begins_with_what_the_program_does(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.text(capsys).startswith("usage: prog [FLAG ...] Does this and that. Every flag is also ")


def test_aliases_are_names_and_models() -> None:
    assert Settings(aliases="gpt-4=llama, fast=tiny").aliases == {"gpt-4": "llama", "fast": "tiny"}  # type: ignore[arg-type]
    assert Settings(aliases={"a": "b"}).aliases == {"a": "b"}
    with pytest.raises(ValueError, match="NAME=MODEL"):
        Settings(aliases="gpt-4")  # type: ignore[arg-type]
