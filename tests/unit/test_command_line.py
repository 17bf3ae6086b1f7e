"""The command line before a command runs: help, errors, sizes, and imported modules."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from penstock.cli.commands import SUMMARIES, make_parser, run_command
from penstock.cli.dataclass_args import engine_kwargs
from penstock.utils.errors import ConfigError

COMMANDS = [[name] for name in SUMMARIES] + [["bench", kind] for kind in ("throughput", "latency", "serve")]


def parsed(*arguments: str) -> Any:
    return make_parser().parse_args(arguments)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        run_command(arguments)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    return printed.err


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_help_fits_a_terminal_of_80_columns(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_command([*command, "--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith(" ".join(["usage: penstock", *command]))
    assert lines[1] == "", "the usage is one line"


def test_help_says_what_a_model_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(["--help"])
    assert "MODEL is a checkpoint folder, a GGUF file or a Hugging Face model id" in capsys.readouterr().out


def test_help_shows_engine_flags_in_groups_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(["serve", "--help"])
    text = capsys.readouterr().out
    for title in ("address", "access", "model", "device and kernels", "scheduling and speculation", "KV cache"):
        assert f"\n{title}:\n" in text
    joined = re.sub(r"\s+", " ", text)
    assert "--max-body-bytes SIZE largest request body (default: 16 MiB)" in joined
    assert "--[no-]enable-prefix-caching reuse the KV of prompts with a common beginning (default: on)" in joined
    assert "--enforce-eager " in text
    assert "--attention-backend NAME the implementation of attention (docs/GPU.md): auto, triton," in joined


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "penstock: name a command: serve, route, chat, generate, bench, verify, audit, simulate, demo-pd "
            "(see penstock --help)",
        ),
        (["sevre"], "penstock: unknown command 'sevre'; did you mean serve? (see penstock --help)"),
        (["--verison"], "penstock: unknown flag --verison; did you mean --version? (see penstock --help)"),
        (
            ["--port", "1", "serve"],
            "penstock: unknown flag --port; the flags of a command follow its name (see penstock --help)",
        ),
        (
            ["serve", "--max-modle-len", "5"],
            "penstock serve: unknown flag --max-modle-len; did you mean --max-model-len? (see penstock serve --help)",
        ),
        (
            ["chat", "--max_model_len=5"],
            "penstock chat: unknown flag --max_model_len; did you mean --max-model-len? (see penstock chat --help)",
        ),
        (
            ["bench", "latency", "--num-iter", "5"],
            "penstock bench latency: unknown flag --num-iter; did you mean --num-iters? (see penstock bench latency "
            "--help)",
        ),
        (["verify", "--zzz"], "penstock verify: unknown flag --zzz (see penstock verify --help)"),
        (["generate", "a", "b"], "penstock generate: unexpected argument 'b' (see penstock generate --help)"),
        (
            ["serve", "--port", "x"],
            "penstock serve: argument --port: must be a whole number of at most 64 bits, got 'x' "
            "(see penstock serve --help)",
        ),
        (
            ["route", "--serve", "http://127.0.0.1:1", "--port", "70000"],
            "penstock route: argument --port: must be at most 65,535, got 70000 (see penstock route --help)",
        ),
        (
            ["route", "--serve", "http://127.0.0.1:1", "--admin-port", "-1"],
            "penstock route: argument --admin-port: must be at least 0, got -1 (see penstock route --help)",
        ),
        (
            ["demo-pd", "--port", "65536"],
            "penstock demo-pd: argument --port: must be at most 65,535, got 65536 (see penstock demo-pd --help)",
        ),
        (
            ["bench", "serve", "--port", "65536"],
            "penstock bench serve: argument --port: must be at most 65,535, got 65536 (see penstock bench serve "
            "--help)",
        ),
        (
            ["bench", "serve", "--ready-check-timeout-sec", "9" * 400],
            "penstock bench serve: argument --ready-check-timeout-sec: must be a whole number of at most 64 bits, got "
            f"'{'9' * 400}' (see penstock bench serve --help)",
        ),
        (
            ["serve", "--kv-cache-memory", f"{'1' * 400}.5GB"],
            "penstock serve: argument --kv-cache-memory: must be a size such as 5GB, 512MiB or 1048576, got "
            f"'{'1' * 400}.5GB' (see penstock serve --help)",
        ),
        (
            ["serve", "--device", "cdua"],
            "penstock serve: argument --device: must be one of auto, cpu, cuda, got 'cdua'; did you mean cuda? "
            "(see penstock serve --help)",
        ),
        (
            ["chat", "--kv-cache-memory", "5G"],
            "penstock chat: argument --kv-cache-memory: '5G' is ambiguous: write 5GB (1000s) or 5GiB (1024s) "
            "(see penstock chat --help)",
        ),
    ],
)
def test_errors_name_the_mistake_and_suggest_a_correction(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error_of(capsys, *arguments) == message + "\n"


def test_no_flag_may_be_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "unknown flag --max-model;" in error_of(capsys, "chat", "--max-model", "128")


def test_flags_in_bytes_accept_units() -> None:
    args = parsed("serve", "--kv-cache-memory", "5GB", "--max-body-bytes", "512KiB")
    assert (args.kv_cache_memory, args.max_body_bytes) == (5_000_000_000, 512 << 10)
    assert parsed("serve").max_body_bytes == 16 << 20


# The engines of demo-pd are processes of their own, with few flags.
WITHOUT_ENGINE = (["bench"], ["simulate"], ["bench", "serve"], ["demo-pd"], ["route"], ["audit"])


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in WITHOUT_ENGINE])
def test_every_command_with_an_engine_takes_a_positional_model(command: list[str]) -> None:
    assert engine_kwargs(parsed(*command, "some/model"))["model"] == "some/model"
    assert engine_kwargs(parsed(*command, "--model", "some/model"))["model"] == "some/model"
    assert engine_kwargs(parsed(*command))["model"] == "demo"
    with pytest.raises(ConfigError, match="pass one of them"):
        engine_kwargs(parsed(*command, "some/model", "--model", "other/model"))


@pytest.mark.parametrize("command", [[], *COMMANDS], ids=" ".join)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    program = f"""
import sys
from penstock.cli.main import main
try:
    main({[*command, "--help"]!r})
except SystemExit:
    print(sorted({{"torch", "numpy", "fastapi", "uvloop", "asyncio", "msgspec", "tqdm"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
