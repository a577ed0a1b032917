"""The Kubernetes manifests: they render, pass Kubernetes' schemas, and fit the proxy that they start."""

import importlib
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.config import Settings
from proxy.flags import read_flags
from proxy.server.reload import LIVE

ROOT = Path(__file__).parents[2] / "deploy/kubernetes"
OVERLAYS = sorted(path.parent.name for path in ROOT.glob("overlays/*/kustomization.yaml"))
KUBERNETES_VERSION = "1.32"
# Their schemas are not Kubernetes' own: models made from the operators' CustomResourceDefinitions.
CUSTOM = {
    "PodMonitor": "cloudcoil.models.prometheus_operator.v1",
    "PrometheusRule": "cloudcoil.models.prometheus_operator.v1",
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
}
Manifest = dict[str, Any]


@cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """What ``kubectl apply -k`` would send."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here to render with")
    done = subprocess.run(
        [kubectl, "kustomize", str(ROOT / "overlays" / overlay)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def written() -> Iterator[tuple[str, Manifest]]:
    """Every manifest as it stands in a file, kustomize's own aside."""
    for path in sorted(ROOT.rglob("*.yaml")):
        if path.name not in {"kustomization.yaml", "slai.yaml"}:
            for number, manifest in enumerate(yaml.safe_load_all(path.read_text(encoding="utf-8"))):
                yield f"{path.relative_to(ROOT)}#{number}", manifest


def one(overlay: str, kind: str, name: str) -> Manifest:
    (found,) = [m for m in rendered(overlay) if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pods(overlay: str) -> list[Manifest]:
    return [m["spec"]["template"]["spec"] for m in rendered(overlay) if m["kind"] in {"Deployment", "StatefulSet"}]


def settings(overlay: str) -> Settings:
    """The settings of the proxy as the overlay starts it: its ConfigMap, and its flags over that."""
    (container,) = one(overlay, "Deployment", "slai-proxy")["spec"]["template"]["spec"]["containers"]
    command, *flags = container["args"]
    assert command == "serve"
    given = read_flags(Settings, flags, "serve", "")
    assert given.pop("config") == "/etc/slai-proxy/slai.yaml"
    return Settings(**(yaml.safe_load(one(overlay, "ConfigMap", "slai-proxy")["data"]["slai.yaml"]) | given))


def check(manifest: Manifest) -> None:
    """Hold a manifest to its schema, unknown fields included."""
    if (module := CUSTOM.get(manifest["kind"])) is None:
        validate = pytest.importorskip("kubernetes_validate").validate
        validate(manifest, KUBERNETES_VERSION, strict=True)
    else:
        pytest.importorskip("cloudcoil", reason="no models of the operators' resources here")
        model = getattr(importlib.import_module(module), manifest["kind"])
        read = model.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_unset=True)
        assert read == manifest, "there are fields that the operator does not know"


@pytest.mark.parametrize("manifest", [pytest.param(manifest, id=where) for where, manifest in written()])
def test_every_file_passes_its_schema(manifest: Manifest) -> None:
    check(manifest)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_rendered_passes_its_schema_and_has_a_namespace(overlay: str) -> None:
    for manifest in rendered(overlay):
        check(manifest)
        assert manifest["metadata"]["namespace"]


def test_a_field_that_there_is_not_is_noticed() -> None:
    for kind, name, field in (
        ("Deployment", "slai-proxy", "replica"),
        ("PodMonitor", "slai-proxy", "jobLabels"),
        ("ScaledObject", "vllm", "maxReplicas"),
    ):
        manifest = one("gpu", kind, name)
        with pytest.raises(Exception, match=r"(?s)replica|jobLabels|fields"):
            check(manifest | {"spec": manifest["spec"] | {field: 3}})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_settings_hold_and_fit_the_pod(overlay: str) -> None:
    held, pod = settings(overlay), one(overlay, "Deployment", "slai-proxy")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": held.port, "debug": held.debug_port}
    assert held.host == held.debug_host == "0.0.0.0"
    assert held.drain_grace_seconds + held.drain_seconds < pod["terminationGracePeriodSeconds"]
    # The grace is longer than the probe needs to fail, so that nobody is sent here any more when the port closes.
    probe = container["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < held.drain_grace_seconds
    mounted = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert str(held.state_dir) in mounted
    assert {"drain_seconds", "token_budget", "keys_file"} <= LIVE, "docs/kubernetes.md says that these change in place"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_variable_of_a_service_is_taken_for_a_setting(overlay: str) -> None:
    # Kubernetes would set SLAI_PROXY_PORT for the service slai-proxy, and the proxy not start.
    assert one(overlay, "Deployment", "slai-proxy")["spec"]["template"]["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_of_ours_runs_as_root_or_can_write_to_its_image(overlay: str) -> None:
    ours = [pod for pod in pods(overlay) if pod["containers"][0]["image"].partition(":")[0].endswith("slai-proxy")]
    assert ours
    for pod in ours:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_image_is_pinned_and_every_pod_has_requests_and_a_readiness_probe(overlay: str) -> None:
    for pod in pods(overlay):
        for container in pod["containers"]:
            _, _, tag = container["image"].rpartition("/")[2].partition(":")
            assert tag
            assert tag != "latest"
            assert container["resources"]["requests"]
            assert container["readinessProbe"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_whoever_selects_pods_selects_some(overlay: str) -> None:
    labels = [
        m["spec"]["template"]["metadata"]["labels"]
        for m in rendered(overlay)
        if m["kind"] in {"Deployment", "StatefulSet"}
    ]
    ports = {port["name"] for pod in pods(overlay) for container in pod["containers"] for port in container["ports"]}

    def selected(selector: dict[str, str]) -> bool:
        return any(selector.items() <= of.items() for of in labels)

    for manifest in rendered(overlay):
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Service":
                assert selected(spec["selector"]), manifest
                assert {port["targetPort"] for port in spec["ports"]} <= ports
            case "PodMonitor" | "PodDisruptionBudget":
                assert selected(spec["selector"]["matchLabels"]), manifest
                assert {e["port"] for e in spec.get("podMetricsEndpoints", [])} <= ports
            case "NetworkPolicy":
                assert selected(spec["podSelector"]["matchLabels"]), manifest
                assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} <= ports
            case "ScaledObject":
                target = spec["scaleTargetRef"]
                assert one(overlay, target["kind"], target["name"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_proxy_may_find_its_engines_and_nothing_else(overlay: str) -> None:
    (source,) = settings(overlay).engines
    assert one(overlay, "Service", source.removeprefix("k8s+http://").partition(":")[0])
    assert one(overlay, "Role", "slai-proxy")["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]


def test_the_proxy_is_told_the_limits_that_the_engines_have() -> None:
    held, (container,) = settings("gpu"), one("gpu", "StatefulSet", "vllm")["spec"]["template"]["spec"]["containers"]
    given = dict(arg.removeprefix("--").partition("=")[::2] for arg in container["args"])
    assert int(given["max-num-batched-tokens"]) == held.token_budget
    assert int(given["max-num-seqs"]) == held.max_num_seqs
    # What streams on at an engine that ends is cut by neither side before the other.
    assert int(given["shutdown-timeout"]) >= held.engine_drain_seconds


def test_the_operator_gets_the_rules_that_prometheus_gets() -> None:
    build = pytest.importorskip("dashboards.build", reason="the dashboards' SDK is not installed")
    assert build.OPERATOR_RULES.read_text(encoding="utf-8") == build.render_rules(), "run make dashboards"
