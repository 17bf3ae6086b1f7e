"""The manifests in deploy/kubernetes/ are valid, name existing flags, ports and objects, and agree with one another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate  # pyright: ignore[reportMissingTypeStubs]
import pytest
import yaml

from penstock.cli.commands import make_parser
from penstock.cli.dataclass_args import engine_kwargs, server_args
from penstock.config.kv_transfer import KVTransferConfig, parse_kv_transfer_config
from penstock.config.server import ServerArgs
from penstock.kv_transfer.p2p.peers import PeerList

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
VERSIONS = ("1.30", "1.35")
USER = 10001
SECRETS = {"PENSTOCK_API_KEY": "key", "cluster.key": "a key of the cluster"}

Manifest = dict[str, Any]


def kustomization() -> Manifest:
    return yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))


def manifests() -> list[Manifest]:
    files = (FOLDER / name for name in kustomization()["resources"])
    return [each for file in files for each in yaml.safe_load_all(file.read_text(encoding="utf-8"))]


def named(kind: str) -> dict[str, Manifest]:
    return {each["metadata"]["name"]: each for each in manifests() if each["kind"] == kind}


WORKLOADS = {**named("StatefulSet"), **named("Deployment")}


def container(name: str) -> Manifest:
    (only,) = WORKLOADS[name]["spec"]["template"]["spec"]["containers"]
    return only


def settings() -> dict[str, str]:
    (generator,) = kustomization()["configMapGenerator"]
    return dict(each.split("=", 1) for each in generator["literals"])


def environment(name: str, pod: str) -> dict[str, str]:
    """Returns the environment variables of a pod's container."""
    sources = {"fieldRef": {"metadata.name": pod}, "configMapKeyRef": settings(), "secretKeyRef": SECRETS}
    found: dict[str, str] = {}
    for each in container(name).get("env", ()):
        ((source, reference),) = each["valueFrom"].items()
        found[each["name"]] = sources[source][reference["fieldPath" if source == "fieldRef" else "key"]]
    return found


def command(name: str, pod: str) -> list[str]:
    known = environment(name, pod)
    return [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], each) for each in container(name)["args"]]


def pods(name: str) -> list[str]:
    return [f"{name}-{number}" for number in range(WORKLOADS[name]["spec"]["replicas"])]


def engines(name: str) -> Iterator[tuple[str, str, KVTransferConfig]]:
    """Yields the pod, URL and transfer configuration of each instance."""
    for pod in pods(name):
        args = make_parser().parse_args(command(name, pod))
        server_args(args, api_key=("key",)).check()
        assert args.host == "0.0.0.0"
        transfer = parse_kv_transfer_config(engine_kwargs(args)["kv_transfer_config"])
        yield pod, f"http://{pod}.{name}:{args.port}", transfer


@pytest.mark.parametrize("version", VERSIONS)
def test_the_manifests_match_the_schemas_of_their_kinds(version: str) -> None:
    for manifest in manifests():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_wrong_field_is_found() -> None:
    manifest = manifests()[-1]
    manifest["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(manifest, VERSIONS[0], strict=True)


def test_the_kustomization_names_every_manifest_and_everything_they_refer_to() -> None:
    known = kustomization()
    assert set(known["resources"]) == {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert known["namespace"] in named("Namespace")
    (secret,), (config,) = known["secretGenerator"], known["configMapGenerator"]
    assert {secret["name"], config["name"]} == set(references("secretName", "secretKeyRef", "configMapKeyRef"))
    assert [image["name"] for image in known["images"]] == ["penstock"]
    assert {container(name)["image"] for name in WORKLOADS} == {"penstock"}
    ignored = (FOLDER / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {*secret["files"], *secret["envs"]} <= set(ignored), "keys must not be committed"


def references(*fields: str) -> Iterator[str]:
    def walk(value: Any) -> Iterator[str]:
        if isinstance(value, list):
            for each in value:
                yield from walk(each)
        elif isinstance(value, Mapping):
            for name, each in value.items():
                if name in fields:
                    yield each["name"] if isinstance(each, Mapping) else each
                yield from walk(each)

    yield from walk(manifests())


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_service_selects_the_pods(name: str) -> None:
    service, spec = named("Service")[name]["spec"], WORKLOADS[name]["spec"]
    assert service["selector"] == spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    ports = {each["name"]: each["containerPort"] for each in container(name)["ports"]}
    assert {each["name"]: each["port"] for each in service["ports"]} == ports
    if name in named("StatefulSet"):
        assert spec["serviceName"] == name
        assert service["clusterIP"] == "None"
        assert service["publishNotReadyAddresses"], "KV is fetched also from an instance that takes no requests"


@pytest.mark.parametrize("name", WORKLOADS)
def test_probes_and_prometheus_use_the_port_of_the_command(name: str) -> None:
    args = make_parser().parse_args(command(name, f"{name}-0"))
    ports = {each["name"]: each["containerPort"] for each in container(name)["ports"]}
    assert ports["http"] == args.port
    asked = {kind: container(name)[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {each["port"] for each in asked.values()} == {"http"}
    assert (asked["readinessProbe"]["path"], asked["livenessProbe"]["path"]) == ("/ready", "/health")
    notes = WORKLOADS[name]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(args.port)
    assert notes["prometheus.io/path"] == "/metrics"


@pytest.mark.parametrize("name", WORKLOADS)
def test_pods_have_time_to_finish_their_requests(name: str) -> None:
    pause = int(container(name)["lifecycle"]["preStop"]["exec"]["command"][-1]) if name == "router" else 0
    grace = WORKLOADS[name]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > ServerArgs.shutdown_timeout + pause


def test_decode_instances_know_the_names_that_prefill_instances_advertise() -> None:
    prefill = {pod: transfer for pod, _, transfer in engines("prefill")}
    names = [f"{transfer.kv_ip}:{transfer.kv_port}" for transfer in prefill.values()]
    assert names == [f"{pod}.prefill:5600" for pod in pods("prefill")]
    assert {transfer.kv_role for transfer in prefill.values()} == {"kv_producer"}
    for pod, _, transfer in engines("decode"):
        assert (transfer.kv_role, transfer.kv_ip) == ("kv_consumer", f"{pod}.decode")
        assert transfer.kv_connector_extra_config["peers"] == names
        peers = PeerList(transfer.kv_connector_extra_config["peers"], None)
        for each in prefill.values():
            assert peers.resolve((each.kv_ip, each.kv_port)) == (each.kv_ip, each.kv_port)
    ids = [transfer.engine_id for name in ("prefill", "decode") for _, _, transfer in engines(name)]
    assert ids == [*pods("prefill"), *pods("decode")]


def test_the_router_knows_all_instances() -> None:
    router = make_parser().parse_args(command("router", "router-0"))
    assert router.prefill == [url for _, url, _ in engines("prefill")]
    assert router.decode == [url for _, url, _ in engines("decode")]


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_an_engine_can_read_its_key_and_write_where_it_must(name: str) -> None:
    spec = WORKLOADS[name]["spec"]["template"]["spec"]
    mounts = {each["mountPath"]: each["name"] for each in container(name)["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    (_, _, transfer), *_ = engines(name)
    key = Path(transfer.kv_connector_extra_config["cluster_key_file"])
    secret = volumes[mounts[str(key.parent)]]["secret"]
    assert [each["path"] for each in secret["items"]] == [key.name]
    assert secret["defaultMode"] == 0o440
    assert spec["securityContext"]["fsGroup"] == USER
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "emptyDir" in volumes[mounts["/tmp"]]
    containerfile = (FOLDER.parent / "Containerfile").read_text(encoding="utf-8")
    (models,) = re.findall(r"HF_HOME=(\S+)", containerfile)
    claims = [each["metadata"]["name"] for each in WORKLOADS[name]["spec"]["volumeClaimTemplates"]]
    assert mounts[models] in claims


@pytest.mark.parametrize("name", WORKLOADS)
def test_containers_have_no_privileges(name: str) -> None:
    pod, own = WORKLOADS[name]["spec"]["template"]["spec"], container(name)["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == USER
    assert f"USER {USER}\n" in (FOLDER.parent / "Containerfile").read_text(encoding="utf-8")
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["enableServiceLinks"] is False


def test_the_transfer_configuration_is_json_before_substitution() -> None:
    for name in ("prefill", "decode"):
        (given,) = [each for each in container(name)["args"] if each.startswith("--kv-transfer-config=")]
        assert json.loads(given.partition("=")[2])["kv_ip"] == f"$(POD_NAME).{name}"
