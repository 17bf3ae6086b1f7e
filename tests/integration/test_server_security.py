"""Authentication, access control, and isolation between clients."""

from __future__ import annotations

import asyncio
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Scope

from penstock.config.server import ServerArgs
from penstock.server import limits, middleware
from penstock.server.app import create_admin_app, create_app
from penstock.server.middleware import BodyLimit
from penstock.server.service import Service
from penstock.tokenizer.chat_template import ChatTemplate
from penstock.utils.errors import ConfigError, RequestError
from tests.integration.raw_http import Answer, call, connect, send_raw
from tests.integration.server_process import ADMIN_KEY, ServerProcess, serve

COMPLETIONS = "/v1/completions"
OPEN = ("/health", "/ready", "/metrics")
KEYS = ("first-secret-key", "second-secret-key")
ORIGIN = "https://app.example.com"
ADMIN_ROUTES = [("POST", "/reset_prefix_cache"), ("POST", "/drain"), ("GET", "/drain"), ("POST", "/resume")]
ADMIN_ROUTES += [("POST", "/check_integrity")]
MAX_BODY_BYTES = 1 << 20


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def check_refused(answer: Answer) -> None:
    """Asserts a 401 with an OpenAI error that reveals nothing about the keys."""
    assert answer.status == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    if answer.headers["content-type"].startswith("application/json") and answer.body:
        assert answer.error["code"] == "invalid_api_key"
    assert not any(key.encode() in answer.body for key in KEYS)


@pytest.fixture(scope="module")
def keyed() -> Iterator[ServerProcess]:
    """Starts a server that is open to the network and has two keys."""
    flags = ("--host", "0.0.0.0", "--allowed-origin", ORIGIN, "--max-body-bytes", str(MAX_BODY_BYTES))
    with serve(*flags, env={"PENSTOCK_API_KEY": f"{KEYS[0]}, {KEYS[1]},"}) as server:
        yield server


@pytest.fixture(scope="module")
def local() -> Iterator[ServerProcess]:
    """Starts a server on loopback without a key."""
    with serve("--max-body-bytes", str(MAX_BODY_BYTES)) as server:
        yield server


# ---- Keys ----


@pytest.mark.spread(2)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "localhost.example.com"])
def test_the_network_is_not_served_without_a_key(host: str) -> None:
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--port", "0", "--host", host]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--api-key" in line


def _paths(routes: list[BaseRoute]) -> Iterator[tuple[str, str]]:
    for route in routes:
        path = getattr(route, "path", "/")
        for method in getattr(route, "methods", None) or ("GET",):
            yield method, re.sub(r"\{[^}]*\}", "x", path)


async def _status(app: ASGIApp, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> int:
    """Returns the status of an app's response, without a server."""
    sent: list[Message] = []
    scope: Scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "headers": headers, "root_path": "", "scheme": "http", "client": None, "server": None,
    }  # fmt: skip

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"]


def test_every_route_needs_the_key() -> None:
    metrics = SimpleNamespace(on_http=lambda *_: None)
    args = ServerArgs(api_key=("k",), admin_api_key=("a",))
    service = cast(Service, SimpleNamespace(args=args, metrics=metrics))
    for app, needed in ((create_app(service), "/v1/chat/completions"), (create_admin_app(service), "/drain")):
        document = [(m.upper(), path) for path, item in app.openapi()["paths"].items() for m in item]
        found = {*_paths(app.routes), *((method, re.sub(r"\{[^}]*\}", "x", path)) for method, path in document)}
        assert ("POST", needed) in found
        assert len(found) > 5
        for method, path in found:
            if method not in ("GET", "HEAD") or path not in OPEN:
                assert asyncio.run(_status(app, method, path, [(b"host", b"localhost")])) == 401, (method, path)


SPELLINGS = [
    "/", "/v1/models", "//v1/models", "/v1/models/", "/v1//models", "/V1/MODELS", "/%761/models", "/v1%2Fmodels",
    "/./v1/models", "/health/../v1/models", "/health/%2e%2e/v1/models", "/health%2F..%2Fv1/models", "/health/",
    "//health", "/health;/v1/models", "/health%00", "/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect",
    "/dashboard", "/dashboard/", "/dashboard/events", "/metrics/", "/ready/", "/version", "/tokenize", "/nothing",
    "http://localhost/v1/models", "http://localhost/health/../v1/models", "*",
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "BREW"])
def test_odd_spellings_do_not_bypass_authentication(keyed: ServerProcess, method: str) -> None:
    for target in SPELLINGS:
        data = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        with connect(keyed.url) as connection:
            connection.sendall(data)
            status = connection.makefile("rb").readline().split()[1]
        assert status in (b"401", b"400"), (target, status)


def test_only_the_routes_of_supervisors_are_public(keyed: ServerProcess) -> None:
    assert call(keyed.url, "GET", "/health").json() == {"status": "ok", "reason": None}
    expected = {"ready": True, "reason": None, "models": ["demo"], "shares_kv": False}
    assert call(keyed.url, "GET", "/ready").json() == expected
    assert call(keyed.url, "GET", "/metrics").body.startswith(b"# HELP")
    for path in ("/health", "/ready"):
        head = call(keyed.url, "HEAD", path)
        assert (head.status, head.body) == (200, b"")
    for path in OPEN:
        for method in ("POST", "OPTIONS", "PUT"):
            assert call(keyed.url, method, path).status in (401, 405)
    for key in KEYS:
        assert call(keyed.url, "GET", "/v1/models", headers=bearer(key)).status == 200


def test_metrics_can_need_a_key() -> None:
    metrics = SimpleNamespace(on_http=lambda *_: None, render=lambda _: (b"", "text/plain"))
    for args, status in ((ServerArgs(api_key=("k",), protect_metrics=True), 401), (ServerArgs(api_key=("k",)), 200)):
        app = create_app(cast(Service, SimpleNamespace(args=args, metrics=metrics)))
        assert asyncio.run(_status(app, "GET", "/metrics", [])) == status
        assert asyncio.run(_status(app, "GET", "/v1/models", [])) == 401
    with pytest.raises(ConfigError, match=r"protect_metrics needs a key .* set --api-key"):
        ServerArgs(protect_metrics=True).check()


def test_administration_has_a_separate_key(keyed: ServerProcess) -> None:
    for method, path in ADMIN_ROUTES:
        for key in KEYS:
            check_refused(call(keyed.admin_url, method, path, headers=bearer(key)))
    assert call(keyed.admin_url, "GET", "/drain", headers=bearer(ADMIN_KEY)).json()["draining"] is False
    assert call(keyed.admin_url, "POST", "/check_integrity", headers=bearer(ADMIN_KEY)).status == 200
    check_refused(call(keyed.url, "GET", "/v1/models", headers=bearer(ADMIN_KEY)))
    for keys in ((), ("k",)):
        with pytest.raises(ConfigError, match=r"admin_api_key|--admin-api-key"):
            ServerArgs(api_key=("k",), admin_port=0, admin_api_key=keys).check()
    ServerArgs(admin_port=0).check()


def test_pages_load_nothing_external_and_cannot_be_framed(local: ServerProcess, keyed: ServerProcess) -> None:
    for server, status in ((local, 200), (keyed, 401)):
        for path in ("/dashboard", "/docs"):
            page = call(server.url, "GET", path)
            assert page.status == status
            assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
            text = page.body.decode()
            assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", text), "it loads something from another host"
            assert "default-src 'none'" in text
    assert "/openapi.json" in call(local.url, "GET", "/docs").body.decode()
    assert call(local.url, "GET", "/openapi.json").json()["paths"]["/v1/chat/completions"]
    assert "content-security-policy" not in call(local.url, "GET", "/health").headers


WRONG = [
    "", "Bearer", "Bearer ", "Bearer first", "Bearer first-secret-ke", "Bearer first-secret-keyy",
    "Bearer FIRST-SECRET-KEY", "Basic first-secret-key", "first-secret-key",
    "Bearer first-secret-key,second-secret-key",
    "Bearer first-secret-key second-secret-key", "Bearer , ", "Bearer \xff\xfe", "Bearer " + "k" * 5000, "Bearer\tx",
    "Token first-secret-key", "Bearer \u00a0\u00bd",
]  # fmt: skip


@pytest.mark.parametrize("value", WRONG)
def test_wrong_keys(keyed: ServerProcess, value: str) -> None:
    for url in (keyed.url, keyed.admin_url):
        head = f"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: {value}\r\n\r\n"
        check_refused(send_raw(url, head.encode("latin-1")))
    for name in ("Api-Key", "X-Api-Key", "Cookie", "Proxy-Authorization"):
        check_refused(call(keyed.url, "GET", "/version", headers={name: KEYS[0]}))
    check_refused(call(keyed.url, "GET", f"/version?api_key={KEYS[0]}"))


def test_a_refused_body_is_not_read(keyed: ServerProcess) -> None:
    """A client without a key costs no memory, however large its requests are."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n"
    check_refused(send_raw(keyed.url, head))


def test_nothing_secret_is_logged(keyed: ServerProcess) -> None:
    prompt = "marmalade and saxophones"
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    text = call(keyed.url, "POST", COMPLETIONS, body, bearer(KEYS[0])).json()["choices"][0]["text"]
    for broken in ({**body, "max_tokens": -1}, {**body, "stop": [prompt] * 99}, {**body, "nothing": prompt}, [prompt]):
        assert call(keyed.url, "POST", COMPLETIONS, broken, bearer(KEYS[0])).status == 400
    call(keyed.url, "GET", f"/{KEYS[1]}", headers=bearer(KEYS[1]))
    send_raw(
        keyed.url, b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + KEYS[0].encode() + b"\r\n:\r\n\r\n"
    )
    log = "".join(keyed.log)
    assert not [secret for secret in (*KEYS, prompt, "marmalade", text.strip()) if secret in log]


# ---- Addresses and origins ----


def _listens_at(port: int | None) -> set[str]:
    """Returns the local addresses, in the kernel's notation, that have a listener at a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
    local = [row[1].split(":") for row in rows if row[3] == "0A"]
    return {address for address, number in local if int(number, 16) == port}


def test_administration_is_on_loopback_only(keyed: ServerProcess, local: ServerProcess) -> None:
    assert _listens_at(urlsplit(keyed.url).port) == {"00000000"}
    assert _listens_at(urlsplit(keyed.admin_url).port) == {"0100007F"}
    for method, path in ADMIN_ROUTES:
        assert call(keyed.url, method, path, headers=bearer(KEYS[0])).status == 404
        assert call(local.url, method, path).status == 404
    assert call(keyed.admin_url, "POST", COMPLETIONS, {"prompt": "a"}, bearer(ADMIN_KEY)).status == 404


HOSTS = {
    "localhost": 200, "localhost:8000": 200, "127.0.0.1": 200, "127.8.9.1:80": 200, "[::1]": 200, "[::1]:8000": 200,
    "example.com": 403, "example.com:8000": 403, "localhost.example.com": 403, "127.0.0.1.example.com": 403,
    "localhost:8000.example.com": 403, "example.com:localhost": 403, "localhost@example.com": 403, "0.0.0.0": 403,
    "192.168.0.1": 403, "[2001:db8::1]": 403, "localhost\tx": 403, "127.0.0.1\\@example.com": 403, "2130706433": 403,
    "[::1].example.com": 403, "localhost:80:80": 403, "example.com#localhost": 403, "localhost,example.com": 403,
}  # fmt: skip


def test_foreign_host_names_are_refused(local: ServerProcess) -> None:
    """This prevents DNS rebinding, by a web page whose own name resolves to 127.0.0.1."""
    for host, status in HOSTS.items():
        for url, path in ((local.url, "/health"), (local.url, "/v1/models"), (local.admin_url, "/drain")):
            data = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
            answer = send_raw(url, data)
            assert answer.status == status, (host, path)
    absolute = b"GET http://example.com/v1/models HTTP/1.1\r\nHost: example.com\r\n\r\n"
    assert send_raw(local.url, absolute).status == 403


def test_web_pages_cannot_act_through_the_browser(local: ServerProcess) -> None:
    """Requests that browsers send for any page without asking (no-cors) carry the page's origin."""
    for origin in ("https://evil.example", "http://localhost.evil.example", "null"):
        headers = {"Origin": origin, "Content-Type": "text/plain"}
        for method, path in ADMIN_ROUTES:
            if method == "POST":
                assert call(local.admin_url, method, path, headers=headers).status == 403, (origin, path)
        assert call(local.url, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1}, headers).status in (400, 403)
    assert call(local.admin_url, "GET", "/drain").json()["draining"] is False
    # The dashboard's own page, and scripts, which send no origin.
    body = {"prompt": "a", "max_tokens": 1}
    assert call(local.url, "POST", COMPLETIONS, body, {"Origin": local.url}).status == 200
    assert call(local.url, "POST", COMPLETIONS, body).status == 200


def test_other_origins_must_be_allowed(keyed: ServerProcess, local: ServerProcess) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = call(keyed.url, "OPTIONS", COMPLETIONS, headers={"Origin": ORIGIN, **ask})
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    assert {"authorization", "content-type"} <= set(
        preflight.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
    )
    answer = call(keyed.url, "GET", "/v1/models", headers={"Origin": ORIGIN, **bearer(KEYS[0])})
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    # A page must be able to read why it was refused.
    assert call(keyed.url, "GET", "/v1/models", headers={"Origin": ORIGIN}).headers["access-control-allow-origin"]
    for server, origin in ((keyed, "https://evil.example"), (keyed, f"{ORIGIN}.evil.example"), (local, ORIGIN)):
        for method, headers in (("OPTIONS", ask), ("GET", bearer(KEYS[0]))):
            refused = call(server.url, method, "/v1/models", headers={"Origin": origin, **headers})
            assert "access-control-allow-origin" not in refused.headers, (origin, method)
    assert (
        "access-control-allow-origin" not in call(keyed.admin_url, "GET", "/drain", headers={"Origin": ORIGIN}).headers
    )


# ---- Size limits ----


def test_bodies_are_limited(local: ServerProcess) -> None:
    answer = call(local.url, "POST", COMPLETIONS, b" " * MAX_BODY_BYTES + b"x")
    assert (answer.status, answer.headers["connection"]) == (413, "close")
    assert f"max_body_bytes={MAX_BODY_BYTES}" in answer.error["message"]
    # A client gets the answer even if it is still sending, because the server discards the rest for a moment.
    assert call(local.url, "POST", COMPLETIONS, b"x" * (4 * MAX_BODY_BYTES)).status == 413
    declared = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n"
    assert send_raw(local.url, declared).status == 413
    assert send_raw(local.url, declared.replace(b"999", b"0" * 5000 + b"999", 1)).status == 413
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"20000\r\n" + b"x" * 0x20000 + b"\r\n"
    assert send_raw(local.url, chunked + piece * 9).status == 413
    assert call(local.url, "POST", COMPLETIONS, b" " * (MAX_BODY_BYTES - 20) + b'{"prompt":"a"}').status == 200


def test_the_wait_for_a_body_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_SECONDS", 0.05)
    monkeypatch.setattr(middleware, "_LINGER_SECONDS", 0.05)
    sent: list[Message] = []
    pieces: list[Message] = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def never(*_: Any) -> None:
        raise AssertionError("the app was called")

    async def receive() -> Message:
        return pieces.pop() if pieces else await asyncio.Event().wait()  # pyright: ignore[reportReturnType]

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(BodyLimit(never, 100)({"type": "http", "headers": []}, receive, send))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]


def test_two_lengths_are_refused(local: ServerProcess) -> None:
    """The parser refuses requests that two chained servers could interpret differently."""
    for head in (b"Content-Length: 2\r\nTransfer-Encoding: chunked", b"Content-Length: 2\r\nContent-Length: 3"):
        data = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + head + b"\r\n\r\n{}\r\n0\r\n\r\n"
        assert send_raw(local.url, data).status == 400


# ---- Isolation between clients ----


def test_keys_do_not_share_a_prefix_cache(keyed: ServerProcess) -> None:
    def cached(key: str, **fields: Any) -> int:
        body = {"prompt": list(range(300, 420)), "max_tokens": 1, **fields}
        usage = call(keyed.url, "POST", COMPLETIONS, body, bearer(key)).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(KEYS[0]) == 0
    assert cached(KEYS[0]) > 0
    assert cached(KEYS[1]) == 0
    assert cached(KEYS[1]) > 0
    assert cached(KEYS[0], cache_salt="mine") == 0
    assert cached(KEYS[0], cache_salt="mine") > 0
    assert cached(KEYS[1], cache_salt="mine") == 0


def test_request_ids_cannot_be_guessed(local: ServerProcess) -> None:
    ids = [call(local.url, "POST", COMPLETIONS, {"prompt": "a", "max_tokens": 1}).json()["id"] for _ in range(8)]
    assert all(re.fullmatch(r"cmpl-[0-9a-f]{32}", name) for name in ids)
    assert len({name[:13] for name in ids}) == len(ids)


@pytest.mark.long
def test_clients_may_use_the_same_request_id(local: ServerProcess) -> None:
    """The id is in the answer and in its headers; the engine's own id of the request stays unique."""
    slow = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(call, local.url, "POST", COMPLETIONS, slow, {"X-Request-Id": "mine"}) for _ in range(4)]
        answers = [each.result() for each in asked]
    for answer in answers:
        assert (answer.status, answer.headers["x-request-id"], answer.json()["id"]) == (200, "mine", "cmpl-mine")
    body = {"prompt": "a", "max_tokens": 1, "request_id": "in-the-body"}
    given = call(local.url, "POST", COMPLETIONS, body, {"X-Request-Id": "in-the-header"})
    assert (given.headers["x-request-id"], given.json()["id"]) == ("in-the-body", "cmpl-in-the-body")
    wrong = call(local.url, "POST", COMPLETIONS, {"prompt": "a", "n": 0}, {"X-Request-Id": "wrong"})
    assert (wrong.status, wrong.headers["x-request-id"]) == (400, "wrong")
    for odd in ("a b", "x" * 300, "\xff"):
        answer = call(local.url, "GET", "/version", headers={"X-Request-Id": odd})
        assert (answer.status, answer.headers.get("x-request-id")) == (200, None)


# ---- TLS ----


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    certificate, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(make, check=True, capture_output=True)
    context = ssl.create_default_context(cafile=certificate)
    with serve("--ssl-certfile", certificate, "--ssl-keyfile", key) as server:
        assert server.url.startswith("https://")
        body = {"prompt": "a", "max_tokens": 2}
        assert call(server.url, "POST", COMPLETIONS, body, context=context).status == 200
        assert call(server.admin_url, "GET", "/drain", context=context).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            call(server.url, "GET", "/health", context=ssl.create_default_context())
        with connect(server.url) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert not plain.recv(100).startswith(b"HTTP")
        assert server.terminate(10) == 0


def test_tls_files_are_checked_before_the_model_is_loaded(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for certificate, reason in ((tmp_path / "missing.pem", "No such file"), (wrong, "PEM")):
        command = [
            sys.executable,
            "-m",
            "penstock.cli.main",
            "serve",
            "--port",
            "0",
            "--ssl-certfile",
            str(certificate),
        ]
        command += ["--ssl-keyfile", str(wrong)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert f"ssl_certfile={certificate}" in done.stderr
        assert reason in done.stderr
        assert "Loading" not in done.stdout + done.stderr


# ---- Malicious checkpoints ----

BOMBS = {
    "calls": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "empty pieces": "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{{ '' }}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "recursion": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "repeat": "{{ 'a' * 4000000000 }}",
    "repeat a list": "{{ [1] * 4000000000 }}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "double with ~": "{% set n = namespace(x='a' * 99) %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "double with +": "{% set n = namespace(x='a' * 99) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "pad": "{{ 'a'.ljust(4000000000) }}",
    "format": "{{ '%4000000000d' % 1 }}",
    "lorem ipsum": "{{ lipsum(n=3000000) }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_template_bombs(name: str) -> None:
    """Runs in a separate process with little memory and time, because a bomb that is not stopped takes both."""
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (10, 10))\n"
        "import penstock.tokenizer.chat_template as t\n"
        "from penstock.utils.errors import RequestError\n"
        "t._MAX_SECONDS = 0.3\n"
        "template = t.ChatTemplate(sys.argv[1], {})\n"
        "try:\n    template.render([{'role': 'user', 'content': 'a'}])\n"
        "except RequestError as error:\n    sys.exit('refused')\n"
    )
    command = [sys.executable, "-c", program, BOMBS[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.endswith("refused\n"), (done.returncode, done.stderr[-300:])


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ self._TemplateReference__context.environment }}",
    "{% include '/etc/passwd' %}",
    "{{ messages.append(1) }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_templates_cannot_escape_the_sandbox(source: str) -> None:
    template = ChatTemplate(source, {})
    try:
        text = template.render([{"role": "user", "content": "a"}])
    except RequestError:
        return
    assert not text.strip()


def test_other_processes_cannot_connect_to_the_core(local: ServerProcess) -> None:
    """A server listens only at its ports; it reaches the core through a socket pair without a name."""
    listening = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
    inodes = {row[9] for row in listening if row[3] == "0A"}
    for pid, num_ports in ((local.pid, 2), (local.core_pid, 0)):
        links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        own = [link for link in links if link.startswith("socket:[") and link[8:-1] in inodes]
        assert len(own) == num_ports


def test_templates_may_calculate() -> None:
    """The limits are on repetition; formatting a large number does not count."""
    template = ChatTemplate("{{ '%d' % 3000000 }} {{ 'a' + 'b' }} {{ 'x' * 3 }}", {})
    assert template.render([{"role": "user", "content": ""}]) == "3000000 ab xxx"
