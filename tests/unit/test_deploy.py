"""The files in deploy/ name existing flags, paths and metrics, and have consistent addresses and timeouts."""

from __future__ import annotations

import configparser
import ipaddress
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.commands import make_parser
from penstock.cli.dataclass_args import engine_kwargs, server_args
from penstock.config import env
from penstock.config.kv_transfer import KVTransferConfig, parse_kv_transfer_config
from penstock.config.server import ServerArgs
from penstock.metrics.router import ROUTER_METRICS
from penstock.metrics.table import METRICS, Kind

DEPLOY = Path(__file__).parents[2] / "deploy"


def environment() -> dict[str, str]:
    lines = (DEPLOY / "penstock.env.example").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_command_of_the_unit_is_valid() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(DEPLOY / "penstock.service")
    values = environment()
    command = unit["Service"]["ExecStart"].replace("${MODEL}", values["MODEL"]).replace("$FLAGS", values["FLAGS"])
    program, *arguments = shlex.split(command)
    assert Path(program).name == "penstock"
    args = make_parser().parse_args(arguments)
    server_args(args, api_key=tuple(values["PENSTOCK_API_KEY"].split(","))).check()
    assert engine_kwargs(args)["kv_cache_memory"] == 4 << 30
    assert int(unit["Service"]["TimeoutStopSec"]) > ServerArgs.shutdown_timeout
    assert set(values) - {"MODEL", "FLAGS"} <= set(env.NAMES)


def test_the_command_of_the_image_serves_beyond_loopback_with_a_key() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    lists = {word: json.loads(value) for word, value in re.findall(r"^([A-Z]+) (\[.*\])$", text, re.MULTILINE)}
    assert lists["ENTRYPOINT"] == ["penstock"]
    args = make_parser().parse_args(lists["CMD"])
    server_args(args, api_key=("key",)).check()
    assert args.host == "0.0.0.0"
    assert f"EXPOSE {args.port}" in text
    assert f"127.0.0.1:{args.port}/health" in text


def test_the_image_copies_what_the_package_needs() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for name in line.split()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "src", "constraints.txt"} <= copied
    assert all((DEPLOY.parent / name).exists() for name in copied)


@pytest.mark.parametrize(
    ("device", "index", "has_compiler"),
    [("cpu", "https://download.pytorch.org/whl/cpu", False), ("gpu", "https://pypi.org/simple", True)],
)
def test_the_image_is_built_for_the_device_of_its_build_argument(device: str, index: str, has_compiler: bool) -> None:
    assert "ARG DEVICE=cpu\n" in (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    build, final = run_device_steps(device)
    assert build.returncode == final.returncode == 0
    assert f"pip install -c constraints.txt --index-url {index} --extra-index-url" in build.stdout
    assert ("install --yes --no-install-recommends gcc libc6-dev" in final.stdout) == has_compiler


def test_an_unknown_device_ends_the_build_with_an_error() -> None:
    build, _ = run_device_steps("tpu")
    assert build.returncode == 1
    assert build.stderr == "DEVICE must be cpu or gpu, got tpu\n"
    assert not build.stdout


def run_device_steps(device: str) -> list[subprocess.CompletedProcess[str]]:
    """Runs the step of each stage that depends on the device, in a shell whose commands only print themselves."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8").replace("\\\n", "")
    stages = [stage for stage in text.split("\nFROM ")[1:] if "\nARG DEVICE\n" in stage]
    steps = [step for stage in stages for step in re.findall(r"^RUN (.*DEVICE.*)$", stage, re.MULTILINE)]
    assert len(stages) == len(steps) == 2
    stubs = "".join(f'{name}() {{ echo {name} "$@"; }}\n' for name in ("pip", "apt_get", "rm"))
    shells = [["sh", "-c", stubs + step.replace("apt-get", "apt_get")] for step in steps]
    options: dict[str, Any] = {"capture_output": True, "text": True, "env": {"DEVICE": device}, "timeout": 60}
    return [subprocess.run(shell, check=False, **options) for shell in shells]


# ---- compose.yaml ----


def compose() -> dict[str, Any]:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(re.sub(r"\$\{(\w+)(?::-([^}]*)|:\?[^}]*)?\}", lambda found: found[2] or "value", text))


def addresses_of_names(services: dict[str, Any]) -> dict[str, str]:
    return {
        name: service["networks"]["penstock"]["ipv4_address"]
        for name, service in services.items()
        if isinstance(service.get("networks"), dict)
    }


def test_the_engines_of_compose_find_each_other() -> None:
    services = compose()["services"]
    addresses = addresses_of_names(services)
    assert len(set(addresses.values())) == 2
    subnet = ipaddress.ip_network(compose()["networks"]["penstock"]["ipam"]["config"][0]["subnet"])
    transfers: dict[str, KVTransferConfig] = {}
    for name, address in addresses.items():
        args = make_parser().parse_args(services[name]["command"])
        server_args(args, api_key=("key",)).check()
        transfers[name] = parse_kv_transfer_config(engine_kwargs(args)["kv_transfer_config"])
        assert transfers[name].kv_ip == address
        assert ipaddress.ip_address(address) in subnet
    prefill, decode = transfers["prefill"], transfers["decode"]
    assert (prefill.kv_role, decode.kv_role) == ("kv_producer", "kv_consumer")
    assert decode.kv_connector_extra_config["peers"] == [f"{prefill.kv_ip}:{prefill.kv_port}"]
    key = services["cluster-key"]["command"][0]
    for transfer in (prefill, decode):
        assert f"> {transfer.kv_connector_extra_config['cluster_key_file']}" in key


def test_the_router_of_compose_knows_the_engines() -> None:
    services = compose()["services"]
    addresses = addresses_of_names(services)
    router = make_parser().parse_args(services["router"]["command"])
    ports = {name: make_parser().parse_args(services[name]["command"]).port for name in ("prefill", "decode", "router")}
    assert router.prefill == [f"http://{addresses['prefill']}:{ports['prefill']}"]
    assert router.decode == [f"http://{addresses['decode']}:{ports['decode']}"]
    for name, port in ports.items():
        assert f"http://127.0.0.1:{port}/health" in services[name]["healthcheck"]["test"][-1]
        assert int(services[name]["stop_grace_period"].rstrip("s")) > ServerArgs.shutdown_timeout
    assert services["router"]["ports"] == [f"{ports['router']}:{ports['router']}"]
    scraped = yaml.safe_load((DEPLOY / "monitoring/prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = {target for job in scraped for each in job["static_configs"] for target in each["targets"]}
    assert targets == {f"{name}:{port}" for name, port in ports.items()}


def test_the_mounts_of_compose_exist() -> None:
    for service in compose()["services"].values():
        for source in (volume.split(":")[0] for volume in service.get("volumes", ())):
            assert source in compose()["volumes"] or (DEPLOY / source).exists(), source


def test_the_grafana_dashboard_shows_existing_metrics() -> None:
    """A histogram must be queried by its buckets, a counter by its total."""
    suffixes = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_bucket"}
    known = {metric.name + suffixes[metric.kind] for metric in (*METRICS, *ROUTER_METRICS)}
    folder = DEPLOY / "monitoring/grafana/provisioning"
    panels = json.loads((folder / "dashboards/penstock.json").read_text(encoding="utf-8"))["panels"]
    shown = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"\b(?:vllm|penstock)[_:][a-z_:]+", target["expr"])
    }
    assert len(shown) >= 10
    assert shown <= known
    source = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text(encoding="utf-8"))["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
