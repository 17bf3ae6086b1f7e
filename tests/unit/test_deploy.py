"""The files in deploy/ name flags, paths and times that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

from penstock.cli.commands import make_parser
from penstock.cli.dataclass_args import engine_kwargs, server_args
from penstock.config import env
from penstock.config.server import ServerArgs

DEPLOY = Path(__file__).parents[2] / "deploy"


def environment() -> dict[str, str]:
    lines = (DEPLOY / "penstock.env.example").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_the_command_of_the_unit_is_one_that_serves() -> None:
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
