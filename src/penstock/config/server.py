"""The server's configuration: the arguments of `penstock serve` besides the engine arguments."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from dataclasses import dataclass

from penstock.config.arguments import argument
from penstock.config.options import read_object
from penstock.utils.errors import ConfigError

_KEY = re.compile(r"[\x21-\x7e]+")
TOOL_CALL_PARSERS = (
    "auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "pythonic", "lfm2",
    "glm45", "glm47", "granite", "phi4_mini_json", "kimi_k2", "openai", "none",
)  # fmt: skip
REASONING_PARSERS = ("auto", "qwen3", "deepseek_r1", "glm45", "granite", "openai_gptoss", "none")


ADDRESS, ACCESS, API, OPERATION = "address", "access", "API", "operation"
"""Groups of arguments, as the command line's help shows them."""


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """The server arguments, with what the command line's help shows of them. `check` raises ConfigError."""

    host: str = argument(
        ADDRESS, "127.0.0.1", "address to listen on; beyond loopback it needs --api-key", metavar="ADDRESS"
    )
    port: int = argument(ADDRESS, 8000, "port to listen on; 0 chooses a free one and prints it")
    api_key: tuple[str, ...] = argument(
        ACCESS, (), "key that clients must send; may be repeated (or PENSTOCK_API_KEY)", metavar="KEY"
    )
    protect_metrics: bool = argument(ACCESS, False, "require an API key for /metrics too; needs --api-key")
    allow_unauthenticated: bool = argument(ACCESS, False, "listen beyond loopback without an API key")
    served_model_name: tuple[str, ...] = argument(
        API, (), "name of the model in the API; may be repeated (default: MODEL)", metavar="NAME"
    )
    lora_modules: tuple[str, ...] = argument(
        API,
        (),
        'adapter to serve as a model: name=folder, or {"name": ..., "path": ...}; may be repeated',
        metavar="NAME=FOLDER",
    )
    lora_allowed_path: tuple[str, ...] = argument(
        ACCESS,
        (),
        "folder from which POST /v1/load_lora_adapter on the administration port may load; may be repeated",
        metavar="FOLDER",
    )
    admin_port: int | None = argument(
        ADDRESS, None, "loopback port for administration: cache reset, drain (default: none)"
    )
    admin_api_key: tuple[str, ...] = argument(
        ACCESS, (), "key for administration; may be repeated (or PENSTOCK_ADMIN_API_KEY)", metavar="KEY"
    )
    shutdown_timeout: float = argument(
        OPERATION, 30.0, "time that running requests have to finish after SIGTERM", metavar="SECONDS"
    )
    health_timeout: float = argument(
        OPERATION, 60.0, "time without a step, while there is work, that makes /health fail", metavar="SECONDS"
    )
    restart_on_failure: int = argument(
        OPERATION, 0, "maximum restarts in a row of an engine that died; then the server exits", metavar="N"
    )
    max_body_bytes: int = argument(ACCESS, 16 << 20, "largest request body", unit="bytes")
    allowed_origin: tuple[str, ...] = argument(
        ACCESS, (), "web origin that browsers may call from (CORS); may be repeated", metavar="ORIGIN"
    )
    ssl_certfile: str | None = argument(ADDRESS, None, "TLS certificate chain, PEM", metavar="FILE")
    ssl_keyfile: str | None = argument(ADDRESS, None, "TLS private key, PEM", metavar="FILE")
    ignore_unknown_fields: bool = argument(API, False, "leave out unknown request fields instead of refusing them")
    tool_call_parser: str = argument(
        API, "auto", "format of tool calls in the model's text", TOOL_CALL_PARSERS, metavar="FORMAT"
    )
    reasoning_parser: str = argument(
        API, "auto", "format of the model's reasoning", REASONING_PARSERS, metavar="FORMAT"
    )
    otlp_traces_endpoint: str | None = argument(
        OPERATION, None, "OTLP/HTTP address that receives a trace per request", metavar="URL"
    )
    access_log: bool = argument(OPERATION, False, "log a line per HTTP request (path and status, no content)")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost"

    @property
    def loras(self) -> list[tuple[str, str]]:
        """The names and folders of `lora_modules`. Raises ConfigError for one that has another form."""
        return [_lora_module(text) for text in self.lora_modules]

    def check(self) -> None:
        """Raises ConfigError for invalid arguments, and for those that would allow unauthenticated access."""
        if not all(0 <= port <= 65535 for port in (self.port, self.admin_port or 0)):
            raise ConfigError(f"port and admin_port must be between 0 and 65535, got {self.port} and {self.admin_port}")
        if self.is_loopback and self.port and self.port == self.admin_port:
            raise ConfigError(f"port and admin_port are both {self.port}: choose different ones")
        for name in ("shutdown_timeout", "health_timeout", "restart_on_failure", "max_body_bytes"):
            if not getattr(self, name) >= (1 if name == "max_body_bytes" else 0):
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if not all(_KEY.fullmatch(key) for key in (*self.api_key, *self.admin_api_key)):
            raise ConfigError("api_key and admin_api_key must be printable ASCII without spaces, as headers are")
        if self.api_key and self.admin_port is not None and not self.admin_api_key:
            raise ConfigError(
                "admin_port beside an API key needs a key of its own, because clients must not drain the server: "
                "set --admin-api-key (or PENSTOCK_ADMIN_API_KEY)"
            )
        if self.protect_metrics and not self.api_key:
            raise ConfigError("protect_metrics needs a key that clients of /metrics must send: set --api-key")
        if set(self.api_key) & set(self.admin_api_key):
            raise ConfigError("admin_api_key must differ from every api_key")
        if not self.is_loopback and not self.api_key and not self.allow_unauthenticated:
            raise ConfigError(
                f"host={self.host} makes the engine reachable from the network without authentication: set --api-key "
                "(or PENSTOCK_API_KEY), or pass --allow-unauthenticated if a proxy in front of it authenticates"
            )
        if len(dict(self.loras)) < len(self.lora_modules):
            raise ConfigError(f"two lora_modules have one name: {', '.join(self.lora_modules)}")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("ssl_certfile and ssl_keyfile must be given together")


def _lora_module(text: str) -> tuple[str, str]:
    if text.lstrip().startswith("{"):
        given = read_object("lora_modules", text)
        name, path = given.get("name"), given.get("path")
    else:
        name, _, path = text.partition("=")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise ConfigError(f'lora_modules must be name=folder or {{"name": ..., "path": ...}}, got {text!r}')
    return name, path
