"""HTTP requests to servers: keys, redirections, addresses, and endless answers."""

from __future__ import annotations

import contextlib
import gzip
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl_backends.empirical.sources.servers import network
from kcdsl_backends.empirical.sources.servers.network import HOSTS, Forbidden, destination
from kcdsl_backends.empirical.sources.servers.transport import Limits, Transport, key_of

QUICK = Limits(connect=2.0, answer=2.0, attempts=1, slow_attempts=1, pause=0.0)
Handler = Callable[[socket.socket, bytes], None]


@contextlib.contextmanager
def listening(handler: Handler) -> Iterator[tuple[int, list[bytes]]]:
    """Listen on this machine; yield the port and the heads of received requests."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.1)
    heads: list[bytes] = []
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(5)
                    head = b""
                    while b"\r\n\r\n" not in head:
                        part = connection.recv(4096)
                        if not part:
                            break
                        head += part
                    heads.append(head)
                    handler(connection, head)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield server.getsockname()[1], heads
    finally:
        over.set()
        thread.join()
        server.close()


def answering(connection: socket.socket, head: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")


def named(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
    """Resolve host names, `_` for `.`, to the address they spell, and all others as usual."""
    real = socket.getaddrinfo
    known = {name.replace("_", "."): text.split() for name, text in addresses.items()}

    def found(host: str, port: int, *more: Any, **other: Any) -> Any:
        if host not in known:
            return real(host, port, *more, **other)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in known[host]
        ]

    monkeypatch.setattr(socket, "getaddrinfo", found)


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv(HOSTS, raising=False)


def refused(url: str, key: str | None = None) -> str:
    with pytest.raises(Refusal) as caught:
        Transport(url, key, QUICK).get("/v1/models")
    (found,) = caught.value.diagnostics
    assert found.code.id == "KC651", found
    return found.message


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254", "2852039166", "0xa9fea9fe", "169.254.43518", "[fe80::1]",
        "[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]", "[2002:a9fe:a9fe::1]",
        "[fd00:ec2::254]", "100.100.100.200", "168.63.129.16", "0.0.0.0", "[::]", "224.0.0.1",
        "[::169.254.169.254]", "[::ffff:0:a9fe:a9fe]", "[64:ff9b:1:a9fe:a9:fe00::]",
        "[2001:db8::5efe:169.254.169.254]", "[2001:db8:64::a9fe:a9fe]", "[::6464:64c8]",
        "[fd00:ec2::23]", "[fec0::1]", "0.1.2.3", "255.255.255.255",
    ],
)  # fmt: skip
def test_link_local_and_metadata_addresses_are_refused(host: str) -> None:
    for scheme in ("http", "https"):
        assert "an address of the link or the like" in refused(f"{scheme}://{host}:1")


def test_host_name_is_checked_after_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(answering) as (port, heads):
        named(
            monkeypatch,
            metadata_example="169.254.169.254",
            both_example="127.0.0.1 169.254.169.254",
            mine_example="127.0.0.1",
            lab_example="10.11.12.13",
        )
        for name in ("metadata.example", "both.example"):
            assert "an address of the link" in refused(f"http://{name}:{port}")
        assert "without TLS" in refused(f"http://lab.example:{port}")
        assert heads == []
        assert Transport(f"http://mine.example:{port}", None, QUICK).get("/x") == {}
        assert len(heads) == 1


def test_dns_rebinding_does_not_change_the_connected_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The checked address is connected to: the name is not resolved again."""
    times: list[str] = []

    def changing(host: str, port: int, *more: Any, **other: Any) -> Any:
        if host != "rebound.example":
            return resolving(host, port, *more, **other)
        times.append(host)
        address = "127.0.0.1" if len(times) == 1 else "169.254.169.254"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    resolving = socket.getaddrinfo
    with listening(answering) as (port, heads):
        monkeypatch.setattr(socket, "getaddrinfo", changing)
        assert Transport(f"http://rebound.example:{port}", None, QUICK).get("/x") == {}
        assert times == ["rebound.example"]
        assert b"Host: rebound.example" in heads[0]


def test_hosts_listed_by_the_user_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    linked = ipaddress.ip_address("169.254.1.2")
    far = ipaddress.ip_address("10.11.12.13")
    for listed, url, key, allowed in (
        ("", "https://a.example", False, True),
        ("", "https://a.example", True, False),
        ("a.example", "https://a.example", True, True),
        ("A.Example:443", "https://a.example:443", True, True),
        ("a.example:444", "https://a.example:443", True, False),
        ("other.example, a.example", "https://a.example/v1", True, True),
        ("xa.example,example", "https://a.example", True, False),
        ("a.example", "http://a.example", False, False),
        ("http://a.example", "http://a.example:8000", False, True),
        ("http://a.example", "http://a.example:8000", True, False),
    ):
        monkeypatch.setenv(HOSTS, listed)
        place = destination(url, key)
        if allowed:
            place.refuse([far])
        else:
            with pytest.raises(Forbidden):
                place.refuse([far])
    monkeypatch.setenv(HOSTS, "169.254.1.2")
    destination("https://169.254.1.2", False).refuse([linked])


def test_key_is_sent_to_localhost_or_by_tls_to_a_listed_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with listening(answering) as (port, heads):
        here = Transport(f"http://127.0.0.1:{port}", "swordfish", QUICK)
        assert here.get("/x") == {}
        assert b"swordfish" in heads[0]
        named(monkeypatch, attacker_example="198.51.100.7")
        assert "a key goes" in refused("https://attacker.example", "swordfish")
        assert "a key goes" in refused("http://attacker.example", "swordfish")


@pytest.mark.parametrize(
    "name",
    [
        "PATH", "CLOUD_SECRET", "KCDSL_KEY_PASSWORD", "KCDSL_POLICY", "KCDSL_SERVER_HOSTS",
        "KCDSL_SERVER_KEYS", "KCDSL_SERVER_KEY_", "kcdsl_server_key", "KCDSL_SERVER_KEY_A\n",
    ],
)  # fmt: skip
def test_key_is_read_from_one_variable_only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name.strip(), "secret of another program")
    with pytest.raises(Refusal) as caught:
        key_of(name)
    assert "secret of another program" not in str(caught.value)


@pytest.mark.parametrize("value", ["a\r\nX-Other: b", "a\nb", "a\0b", "a\u00e4", "a\x7fb"])
def test_key_cannot_inject_headers(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr("os.environ", {"KCDSL_SERVER_KEY": value})
    with pytest.raises(Refusal, match="cannot be a key"):
        key_of("KCDSL_SERVER_KEY")


def test_redirection_does_not_forward_the_key() -> None:
    with listening(answering) as (other, elsewhere):

        def redirecting(connection: socket.socket, head: bytes) -> None:
            to = f"Location: http://127.0.0.1:{other}/x\r\nContent-Length: 0\r\n\r\n"
            connection.sendall(b"HTTP/1.1 307 Elsewhere\r\n" + to.encode())

        with listening(redirecting) as (port, heads), pytest.raises(Refusal, match="status 307"):
            Transport(f"http://127.0.0.1:{port}", "swordfish", QUICK).get("/x")
        assert (len(heads), elsewhere) == (1, [])


def endless_bytes(start: bytes) -> Handler:
    """Send a byte every 50 ms without end, after `start`."""

    def handler(connection: socket.socket, head: bytes) -> None:
        connection.sendall(start)
        begun = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - begun < 10:
                connection.sendall(b"a")
                time.sleep(0.05)

    return handler


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\nX-Long: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n",
        b"HTTP/1.1 200 ",
    ],
)
def test_endless_answer_is_aborted_in_time(start: bytes) -> None:
    """Applies to slow heads and bodies without end."""
    with listening(endless_bytes(start)) as (port, _):
        limits = Limits(connect=1.0, answer=1.0, attempts=1, slow_attempts=1)
        begun = time.monotonic()
        with pytest.raises(Refusal):
            Transport(f"http://127.0.0.1:{port}", None, limits).get("/x")
        assert time.monotonic() - begun < 5


def test_compressed_answer_has_a_size_limit() -> None:
    bomb = gzip.compress(b" " * 50_000_000)

    def handler(connection: socket.socket, head: bytes) -> None:
        lines = f"Content-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n"
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + lines.encode() + bomb)

    with listening(handler) as (port, heads), pytest.raises(Refusal, match="compressed"):
        Transport(f"http://127.0.0.1:{port}", None, QUICK).get("/x")
    assert b"Accept-Encoding: identity" in heads[0]


def test_proxy_is_used_within_the_same_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(answering) as (port, heads):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{port}")
        named(monkeypatch, lab_example="10.11.12.13", metadata_example="169.254.169.254")
        assert "an address of the link" in refused("http://metadata.example")
        assert "without TLS" in refused("http://lab.example")
        monkeypatch.setenv(HOSTS, "http://lab.example")
        assert Transport("http://lab.example", None, QUICK).get("/x") == {}
        assert heads[0].startswith(b"GET http://lab.example/x ")


def test_local_host_name_bypasses_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy would resolve it anew: the owner of the name would get the key, without TLS."""
    with listening(answering) as (proxy, seen), listening(answering) as (port, heads):
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy}")
        named(monkeypatch, mine_example="127.0.0.1")
        assert Transport(f"http://mine.example:{port}", "hidden", QUICK).get("/x") == {}
        assert seen == []
        assert len(heads) == 1


@pytest.mark.parametrize("url", ["http://[x", "https://xn--a.example"])
def test_invalid_host_name_is_refused(url: str) -> None:
    assert "no address of a server" in refused(url)


def test_http_library_without_an_address_hook_is_refused() -> None:
    class Other:
        class HTTPTransport:
            def __init__(self, proxy: str | None) -> None:
                self._pool = object()

    place = destination("https://a.example", False)
    with pytest.raises(Forbidden, match="this version of httpx"):
        network.client(Other, place, 1.0, 1.0, network.Deadline(1.0, time.monotonic))
