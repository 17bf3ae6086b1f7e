"""Hosts: their form in URLs, their canonical form, and their validation."""

from __future__ import annotations

import pytest

from penstock.utils.hosts import canonical_host, in_url, is_host, is_local_host


@pytest.mark.parametrize(
    ("host", "spelled"), [("::1", "[::1]"), ("fe80::2", "[fe80::2]"), ("127.0.0.1", "127.0.0.1"), ("p-0.kv", "p-0.kv")]
)
def test_a_url_has_an_ipv6_address_in_brackets(host: str, spelled: str) -> None:
    assert in_url(host) == spelled


@pytest.mark.parametrize(
    ("host", "canonical"),
    [("0:0:0:0:0:0:0:1", "::1"), ("FE80::0002", "fe80::2"), ("P-0.KV.", "p-0.kv"), ("localhost", "127.0.0.1")],
)
def test_a_host_has_one_canonical_form(host: str, canonical: str) -> None:
    assert canonical_host(host) == canonical


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        *(("10.0.0.1", True), ("::1", True), ("p-0.kv.", True), ("10.0.0", False), ("a b", False), ("-a", False)),
        *(
            ("fe80::1%eth0.7", True),
            ("::1%", False),
            ("::1%a\0", False),
            ("::1%a/b", False),
            ("::1%" + "e" * 40, False),
        ),
    ],
)
def test_valid_and_invalid_hosts(host: str, is_one: bool) -> None:
    assert is_host(host) == is_one


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("localhost:8000", True), ("127.0.0.2", True), ("[::1]:80", True), ("10.0.0.1:80", False), ("example.org", False)],
)
def test_hosts_that_name_this_machine(host: str, is_local: bool) -> None:
    assert is_local_host(host) == is_local
