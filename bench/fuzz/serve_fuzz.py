"""Runs Schemathesis against a running server, from its own OpenAPI document, with a canary in parallel.

    penstock serve --port 8300 --max-num-seqs 16
    python bench/fuzz/serve_fuzz.py --url http://127.0.0.1:8300 --minutes 10

Fails if any answer was a 5xx other than 503, if the engine is dead at the end, or if the canary's tokens changed
meanwhile. Schemathesis' own summary is printed for information: requests that it reports as timed out, because they ask
for thousands of tokens, do not count as failures here. The answers are counted by the server (`/metrics`).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

CANARY = {"prompt": "The old mill", "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
SECONDS_BETWEEN_CANARIES = 1.0
# The client disconnects from longer requests, which is a test too.
REQUEST_TIMEOUT = "10"
_ANSWERS = re.compile(r"^penstock:http_requests_total\{(.*)\} (\S+)$", re.MULTILINE)


class Server:
    def __init__(self, url: str, api_key: str | None) -> None:
        self.url = url
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def ask(self, path: str, body: Any = None) -> bytes:
        """Raises URLError if the answer is not 200."""
        data = None if body is None else json.dumps(body).encode()
        headers = {**self.headers, "Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=120) as answer:
            return answer.read()

    def canary(self) -> list[int]:
        return json.loads(self.ask("/v1/completions", CANARY))["choices"][0]["token_ids"]

    def answers(self) -> Counter[tuple[str, str]]:
        """Returns how many answers the server has given, by route and status."""
        counts: Counter[tuple[str, str]] = Counter()
        for labels, value in _ANSWERS.findall(self.ask("/metrics").decode()):
            fields = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            counts[fields["route"], fields["status"]] += int(float(value))
        return counts


def start_schemathesis(server: Server, seconds: int, workers: int, seed: int) -> subprocess.Popen[bytes]:
    program = shutil.which("schemathesis", path=f"{Path(sys.executable).parent}") or "schemathesis"
    command = [program, "run", f"{server.url}/openapi.json", "--max-time", str(seconds), "--workers", str(workers)]
    command += [
        "--phases",
        "coverage,fuzzing",
        "--checks",
        "not_a_server_error",
        "--continue-on-failure",
        "--no-shrink",
    ]
    command += ["--request-timeout", REQUEST_TIMEOUT, "--seed", str(seed), "--warnings", "off"]
    for name, value in server.headers.items():
        command += ["--header", f"{name}:{value}"]
    print(" ".join(command), flush=True)
    return subprocess.Popen(command)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    server = Server(args.url, args.api_key)
    before, expected = server.answers(), server.canary()
    fuzzing = start_schemathesis(server, max(1, int(args.minutes * 60)), args.workers, args.seed)
    num_canaries, changed = 0, 0
    try:
        while fuzzing.poll() is None:
            num_canaries += 1
            changed += server.canary() != expected
            try:
                fuzzing.wait(SECONDS_BETWEEN_CANARIES)
            except subprocess.TimeoutExpired:
                continue
    finally:
        fuzzing.kill()
        fuzzing.wait()
    health = json.loads(server.ask("/health"))["status"]
    counts = server.answers() - before
    statuses: Counter[str] = Counter()
    for (route, status), count in sorted(counts.items()):
        print(f"{count:8d}  {status}  {route}")
        statuses[status] += count
    failed = {status: n for status, n in statuses.items() if status.startswith("5") and status != "503"}
    print(f"{statuses.total()} answers {dict(statuses)}; health {health}; {num_canaries} canaries, {changed} changed")
    return 1 if failed or changed or health != "ok" else 0


if __name__ == "__main__":
    sys.exit(main())
