"""The server's configuration: what `penstock serve` takes beside the engine arguments."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Any

from penstock.utils.errors import ConfigError

_KEY = re.compile(r"[\x21-\x7e]+")
TOOL_CALL_PARSERS = (
    "auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "pythonic", "none",
)  # fmt: skip
REASONING_PARSERS = ("none", "qwen3", "deepseek_r1")


def _arg(default: Any, help_text: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": help_text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """The server arguments, with the help text that the command line shows. `check` raises ConfigError."""

    host: str = _arg("127.0.0.1", "address to listen on; beyond loopback it needs --api-key")
    port: int = _arg(8000, "port to listen on; 0 takes a free one and prints it")
    api_key: tuple[str, ...] = _arg((), "key that clients must send; may be repeated (or PENSTOCK_API_KEY)")
    allow_unauthenticated: bool = _arg(False, "listen beyond loopback without an API key")
    served_model_name: tuple[str, ...] = _arg((), "name of the model in the API; may be repeated (default: --model)")
    admin_port: int | None = _arg(None, "loopback port for administration: cache reset, drain; none by default")
    shutdown_timeout: float = _arg(30.0, "seconds that running requests have to finish after SIGTERM")
    health_timeout: float = _arg(60.0, "seconds without a step, while there is work, that make /health fail")
    max_body_bytes: int = _arg(16 << 20, "largest request body")
    allowed_origin: tuple[str, ...] = _arg((), "web origin that browsers may call from (CORS); may be repeated")
    ssl_certfile: str | None = _arg(None, "TLS certificate chain, PEM")
    ssl_keyfile: str | None = _arg(None, "TLS private key, PEM")
    tool_call_parser: str = _arg("auto", "how tool calls look in the model's text", TOOL_CALL_PARSERS)
    reasoning_parser: str = _arg("none", "how the model sets its reasoning apart from its answer", REASONING_PARSERS)
    otlp_traces_endpoint: str | None = _arg(None, "OTLP/HTTP URL that receives a trace per request")
    access_log: bool = _arg(False, "log a line per HTTP request (path and status, never content)")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self) -> None:
        """Raises ConfigError for what cannot be, and for what would let strangers in."""
        for name in ("port", "admin_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 65535:
                raise ConfigError(f"{name} must be between 0 and 65535, got {value}")
        for name in ("shutdown_timeout", "health_timeout", "max_body_bytes"):
            if not getattr(self, name) >= (1 if name == "max_body_bytes" else 0):
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if not all(_KEY.fullmatch(key) for key in self.api_key):
            raise ConfigError("api_key must be printable ASCII without spaces, because it travels in a header")
        if not self.is_loopback and not self.api_key and not self.allow_unauthenticated:
            raise ConfigError(
                f"host={self.host} would let anyone on the network use the engine: set --api-key (or "
                "PENSTOCK_API_KEY), or pass --allow-unauthenticated if something in front of it checks who comes"
            )
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile belong together")
