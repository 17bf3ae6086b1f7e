"""A prefill engine in a separate process, which can stop itself during a write and is driven by JSON lines.

python -m tests.integration.push_producer CONFIG
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np

from penstock import SamplingParams
from penstock.kv_transfer.transports.sockets import SocketsTransport
from penstock.kv_transfer.transports.stream import Stream
from tests.integration.test_disaggregation import connector, engine, prefill_for


class PushProducer:
    """Controls the process from a test."""

    def __init__(self, config: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "tests.integration.push_producer", json.dumps(config)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, action: str, *arguments: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([action, *arguments]) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def say(message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def stop() -> None:
    """Stops the process until the test lets it continue."""
    say("stopped")
    # To this thread, which could otherwise run on until another one has received the signal.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def stop_before_a_write() -> None:
    """Makes the process stop before its next write begins."""
    real = SocketsTransport.submit

    def submit(self: SocketsTransport, *args: Any, **options: Any) -> Any:
        SocketsTransport.submit = real
        stop()
        return real(self, *args, **options)

    SocketsTransport.submit = submit


def stop_halfway() -> None:
    """Makes the process stop when half of its next write has been sent."""
    real = Stream.send_segments

    def send_segments(self: Stream, segments: np.ndarray) -> None:
        Stream.send_segments = real
        real(self, segments[: len(segments) // 2])
        stop()
        real(self, segments[len(segments) // 2 :])

    Stream.send_segments = send_segments


def main() -> None:
    config, *_ = map(json.loads, sys.argv[1:])
    with engine(kv_transfer_config=config) as llm:
        for line in sys.stdin:
            action, *arguments = json.loads(line)
            match action:
                case "prefill":
                    prompt, max_tokens = arguments
                    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
                    say(prefill_for(llm, prompt, params))
                case "count":
                    say(connector(llm, *arguments))
                case "stop":
                    {"before": stop_before_a_write, "halfway": stop_halfway}[arguments[0]]()
                    say("ready")


if __name__ == "__main__":
    main()
