"""Registries with wrong, slow or misdirected answers."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kcdsl.release.oci import transport
from kcdsl.release.oci.certificates import BUNDLE_TYPE
from tests.support.registries import FakeRegistry, artefacts, digest_of

pytestmark = pytest.mark.usefixtures("while_valid")


@pytest.fixture
def known(
    while_valid: None, plain: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Make the registry ask for a token, and provide its credentials."""
    plain.token = "secret"
    file = tmp_path / "auth.json"
    file.write_text(json.dumps({"auths": {plain.host: {"auth": "dXNlcjpwYXNz"}}}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(file))


def head(status: str, *lines: str) -> bytes:
    """Return the head of an answer."""
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode("latin-1")


def only(method: str, part: str, *pieces: bytes) -> Any:
    """Return a hook that sends these pieces to requests with one method and a part of the path."""

    def raw(verb: str, path: str) -> Iterable[bytes] | None:
        return pieces if verb == method and part in path else None

    return raw


@pytest.mark.usefixtures("known")
def test_read_only_token_is_replaced_for_writing(
    plain: FakeRegistry, attach: Any, check: Any
) -> None:
    image, plain.scopes = plain.image(), True
    ran = attach(image)
    assert ran.code == 0, ran.stderr
    assert check(image).code == 0


ODD = [
    "http://[x",
    "//[",
    "http://localhost:99999/v2/x",
    "http://localhost:port/",
    "http://\x9b2J/",
]


@pytest.mark.parametrize("place", ODD)
@pytest.mark.parametrize(
    ("method", "part", "status", "name"),
    [
        ("POST", "/uploads/", "202 Accepted", "Location: {}"),
        ("GET", "/blobs/", "307 Temporary Redirect", "Location: {}"),
        (
            "GET",
            "/referrers/",
            "401 Unauthorized",
            'WWW-Authenticate: Bearer realm="{}",service="s"',
        ),
    ],
    ids=["upload", "redirect", "realm"],
)
def test_invalid_address_is_a_wrong_answer(
    plain: FakeRegistry, attach: Any, check: Any, place: str, method: str, part: str, status: str,
    name: str,
) -> None:  # fmt: skip
    image = plain.image()
    if method == "GET":
        assert attach(image).code == 0
    plain.raw = only(method, part, head(status, name.format(place), "Content-Length: 0"))
    ran = check(image) if method == "GET" else attach(image)
    assert ran.code == 2
    assert "error[KC65" in ran.stderr
    assert "\x9b" not in ran.stderr


@pytest.mark.parametrize("place", ODD)
def test_invalid_next_page_is_a_wrong_answer(
    plain: FakeRegistry, attach: Any, check: Any, place: str
) -> None:
    image = plain.image()
    assert attach(image).code == 0
    data = plain.referrers(image.rpartition("@")[2])
    more = f'Link: <{place}>; rel="next"', f"Content-Length: {len(data)}"
    plain.raw = only("GET", "/referrers/", head("200 OK", *more), data)
    ran = check(image)
    assert ran.code == 2
    assert "error[KC65" in ran.stderr


@pytest.mark.usefixtures("certificate")
def test_invalid_port_is_refused(check: Any) -> None:
    ran = check("localhost:99999/llm/tiny@sha256:" + "ab" * 32)
    assert ran.code == 2
    assert "error[KC6" in ran.stderr


def drip(start: bytes, piece: bytes) -> Iterator[bytes]:
    """Yield a piece repeatedly, without end within the time of a test."""
    yield start
    for _ in range(400):
        time.sleep(0.05)
        yield piece


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"HTTP/1.1 ", b"2"),
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (head("200 OK", "Content-Length: 1000000"), b" "),
        (head("200 OK", "Transfer-Encoding: chunked"), b"1\r\n \r\n"),
    ],
    ids=["status", "headers", "continue", "body", "chunks"],
)
@pytest.mark.parametrize("part", ["/manifests/", "/blobs/"])
def test_endless_answer_is_aborted_in_time(
    plain: FakeRegistry, attach: Any, check: Any, monkeypatch: pytest.MonkeyPatch, part: str,
    start: bytes, piece: bytes,
) -> None:  # fmt: skip
    image = plain.image()
    assert attach(image).code == 0
    monkeypatch.setattr(transport, "SECONDS", 0.3)
    plain.raw = lambda method, path: drip(start, piece) if part in path else None
    begun = time.monotonic()
    ran = check(image)
    assert time.monotonic() - begun < 10
    assert ran.code == 2
    assert "error[KC65" in ran.stderr


def test_referrers_of_other_kinds_are_ignored(plain: FakeRegistry, attach: Any, check: Any) -> None:
    image = plain.image()
    assert attach(image).code == 0
    listed = json.loads(plain.referrers(image.rpartition("@")[2]))
    strange: list[Any] = [
        {"mediaType": "x", "digest": f"sha512:{'ab' * 64}", "size": 1, "artifactType": "sbom"},
        {"mediaType": "x", "digest": f"sha256:{'ab' * 32}", "size": 1, "artifactType": None},
        {"mediaType": "x", "digest": f"sha256:{'ab' * 32}", "size": -1},
        {"artifactType": ["x"]},
        "text",
        None,
    ]
    data = json.dumps({**listed, "manifests": [*strange, *listed["manifests"], *strange]}).encode()
    plain.changed = lambda path, found: data if path == "referrers" else found
    ran = check(image)
    assert ran.code == 0, ran.stderr


def pages(registry: FakeRegistry, image: str, status: str, *links: str) -> Any:
    """Return a hook with an empty first page, and a status for the next one."""
    empty = json.dumps({"schemaVersion": 2, "manifests": []}).encode()
    data = registry.referrers(image.rpartition("@")[2])

    def raw(method: str, path: str) -> Iterable[bytes] | None:
        if "/referrers/" not in path:
            return None
        if "page=2" in path:
            return head(status, f"Content-Length: {len(data)}"), data
        return head("200 OK", *links, f"Content-Length: {len(empty)}"), empty

    return raw


@pytest.mark.parametrize(
    "links",
    [
        ('Link: <?page=2>; rel="next"',),
        ("Link: <?page=2>; rel=next",),
        ('Link: <?page=1>; rel="first", <?page=2>; title="a, b"; rel="next"',),
        ('Link: <?page=1>; rel="first"', 'Link: <?page=2> ; REL="next"'),
        ('Link: <?page=2>; rel="last next"',),
    ],
)
def test_next_page_is_found_among_other_links(
    plain: FakeRegistry, attach: Any, check: Any, links: tuple[str, ...]
) -> None:
    image = plain.image()
    assert attach(image).code == 0
    plain.raw = pages(plain, image, "200 OK", *links)
    ran = check(image)
    assert ran.code == 0, ran.stderr


def test_interrupted_list_has_no_fallback(plain: FakeRegistry, attach: Any, check: Any) -> None:
    image = plain.image()
    plain.lists_referrers = False
    assert attach(image).code == 0  # so that the tag has a list
    plain.lists_referrers = True
    plain.raw = pages(plain, image, "404 Not Found", 'Link: <?page=2>; rel="next"')
    ran = check(image)
    assert ran.code == 2
    assert "error[KC6" in ran.stderr


def test_tag_that_is_not_a_list_is_not_overwritten(
    plain: FakeRegistry, attach: Any, check: Any
) -> None:
    image, plain.lists_referrers = plain.image(), False
    tag = image.rpartition("@")[2].replace(":", "-")
    other = ("application/vnd.oci.image.manifest.v1+json", json.dumps({"layers": []}).encode())
    plain.documents[tag] = other
    for ran in (attach(image), check(image)):
        assert ran.code == 2
        assert "error[KC655]" in ran.stderr
    assert plain.documents[tag] == other


def test_concurrent_list_updates_keep_both_entries(
    plain: FakeRegistry, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, plain.lists_referrers = plain.image(), False
    tag = image.rpartition("@")[2].replace(":", "-")
    theirs = {"mediaType": "x", "digest": f"sha256:{'cd' * 32}", "size": 3, "artifactType": "sbom"}
    left = 3

    def another(seconds: float) -> None:
        nonlocal left
        left -= 1
        if left > 0:
            index = {"schemaVersion": 2, "manifests": [theirs]}
            kind = "application/vnd.oci.image.index.v1+json"
            plain.documents[tag] = (kind, json.dumps(index).encode())

    monkeypatch.setattr("kcdsl.release.oci.repository.sleep", another)
    ran = attach(image)
    assert ran.code == 0, ran.stderr
    listed = [each["digest"] for each in json.loads(plain.documents[tag][1])["manifests"]]
    assert listed == [theirs["digest"], *artefacts(plain)]


@pytest.mark.parametrize("odd", ["1.5", '"\\ud800"', "NaN", "1e999"])
def test_list_with_unexpected_values_is_kept_or_refused(
    plain: FakeRegistry, attach: Any, odd: str
) -> None:
    image, plain.lists_referrers = plain.image(), False
    tag = image.rpartition("@")[2].replace(":", "-")
    kind = "application/vnd.oci.image.index.v1+json"
    before = f'{{"schemaVersion": 2, "manifests": [{{"digest": {odd}}}]}}'.encode()
    plain.documents[tag] = (kind, before)
    ran = attach(image)
    if odd in ("NaN", "1e999"):
        assert ran.code == 2
        assert "error[KC655]" in ran.stderr
        assert plain.documents[tag] == (kind, before)
        return
    assert ran.code == 0, ran.stderr
    first, own = json.loads(plain.documents[tag][1])["manifests"]
    assert first == {"digest": json.loads(odd)}
    assert [own["digest"]] == artefacts(plain)


@pytest.mark.usefixtures("known")
def test_messages_contain_no_secrets_and_terminal_controls(
    plain: FakeRegistry, attach: Any, check: Any
) -> None:
    image = plain.image()
    realm = f"http://{plain.host}/token#\x1b[2J"
    asked = f'WWW-Authenticate: Bearer realm="{realm}",service="s",scope="pull"'
    plain.token = "secret"
    plain.raw = only("GET", "/manifests/", head("401 Unauthorized", asked, "Content-Length: 0"))
    ran = attach(image)
    assert ran.code == 2
    for secret in ("dXNlcjpwYXNz", "secret", "pass", "\x1b[2J"):
        assert secret not in ran.stderr + ran.stdout


@pytest.mark.usefixtures("certificate")
def test_stalled_tls_handshake_is_aborted_in_time(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "SECONDS", 0.3)

    class Slow(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                for piece in drip(b"\x16\x03\x03\x40\x00", b"\x00"):
                    self.request.sendall(piece)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        begun = time.monotonic()
        image = f"localhost:{server.server_address[1]}/llm/tiny@sha256:{'ab' * 32}"
        ran = check(image, plain_http=False)
        server.shutdown()
    assert time.monotonic() - begun < 10
    assert ran.code == 2
    assert "error[KC65" in ran.stderr


# --- artefacts ------------------------------------------------------------------------------------


Layers = list[dict[str, Any]]


def changed_layers(registry: FakeRegistry, change: Callable[[Layers], object]) -> None:
    """Replace the only artefact by one with other layers."""
    (own,) = artefacts(registry)
    kind, data = registry.documents.pop(own)
    artefact = json.loads(data)
    change(artefact["layers"])
    changed = json.dumps(artefact).encode()
    registry.documents[digest_of(changed)] = (kind, changed)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda layers: layers.pop(0), "0 bundles in one artefact"),
        (lambda layers: layers.append(layers[0]), "2 bundles in one artefact"),
        (lambda layers: layers.clear(), "0 bundles in one artefact"),
        (lambda layers: layers[0].update(size=2**40), f"{2**40} bytes, more than"),
    ],
)
def test_malformed_artefact_is_refused_before_its_blobs_are_read(
    plain: FakeRegistry, attach: Any, check: Any, change: Any, words: str
) -> None:
    image = plain.image()
    assert attach(image).code == 0
    changed_layers(plain, change)
    ran = check(image)
    assert ran.code == 2
    assert "error[KC655]" in ran.stderr
    assert words in ran.stderr
    assert not any("/blobs/" in path for path in plain.sent("GET"))


@pytest.mark.parametrize(
    "fields",
    [
        {"mediaType": None},
        {"mediaType": [BUNDLE_TYPE]},
        {"digest": None},
        {"digest": "sha256:../../../manifests"},
        {"digest": f"sha256:{'AB' * 32}"},
        {"digest": f"sha512:{'ab' * 64}"},
        {"size": None},
        {"size": -1},
        {"size": True},
        {"size": "9"},
        {"size": 9.5},
        {"annotations": {"org.opencontainers.image.title": ["x"]}},
        {"artifactType": 3},
    ],
)
def test_malformed_descriptor_is_refused(
    plain: FakeRegistry, attach: Any, check: Any, fields: dict[str, Any]
) -> None:
    image = plain.image()
    assert attach(image).code == 0
    changed_layers(plain, lambda layers: layers[-1].update(fields))
    ran = check(image)
    assert ran.code == 2
    assert "no mediaType, sha256 digest and size" in ran.stderr


@pytest.mark.parametrize(("ours", "others"), [(101, 0), (1, 10_000)])
def test_too_many_referrers_are_refused(
    plain: FakeRegistry, attach: Any, check: Any, ours: int, others: int
) -> None:
    image = plain.image()
    assert attach(image).code == 0
    (own,) = json.loads(plain.referrers(image.rpartition("@")[2]))["manifests"]
    more = [{**own, "digest": f"sha256:{i:064x}"} for i in range(ours - 1)]
    data = json.dumps({"manifests": [own, *more, *[{}] * others]}).encode()
    plain.changed = lambda path, found: data if path == "referrers" else found
    ran = check(image)
    assert ran.code == 2
    assert f"{ours} certificates among {ours + others} referrers" in ran.stderr


# --- credentials ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("certificate")
def test_forbidden_image_needs_other_credentials(plain: FakeRegistry, check: Any) -> None:
    plain.raw = only("GET", "/manifests/", head("403 Forbidden", "Content-Length: 0"))
    ran = check(plain.image())
    assert ran.code == 2
    assert f"the registry {plain.host} wants other credentials" in ran.stderr


def demands(registry: FakeRegistry, challenge: str, wanted: str) -> Any:
    """Return a hook that answers requests with another `Authorization` with a challenge."""

    def raw(method: str, path: str) -> Iterable[bytes] | None:
        if registry.requests[-1][2] == wanted or path.startswith("/token"):
            return None
        return [head("401 Unauthorized", f"WWW-Authenticate: {challenge}", "Content-Length: 0")]

    return raw


@pytest.mark.usefixtures("known")
def test_basic_credentials_are_sent_on_demand(plain: FakeRegistry, attach: Any, check: Any) -> None:
    image, plain.token = plain.image(), ""
    plain.raw = demands(plain, 'Basic realm="all"', "Basic dXNlcjpwYXNz")
    assert attach(image).code == 0
    assert check(image).code == 0


@pytest.mark.parametrize(
    "challenge",
    [
        "",
        'Digest realm="{}/token"',
        'Basic realm="{}/token"',
        'Bearer realm="file:///etc/hostname"',
        'Bearer realm="ftp://localhost/token"',
        'Bearer realm="data:,"',
    ],
)
@pytest.mark.usefixtures("certificate")
def test_unusable_challenge_needs_other_credentials(
    plain: FakeRegistry, check: Any, challenge: str
) -> None:
    plain.raw = demands(plain, challenge.format(f"http://{plain.host}"), "Bearer secret")
    ran = check(plain.image())
    assert ran.code == 2
    assert f"the registry {plain.host} wants other credentials" in ran.stderr
    assert len(plain.requests) == 1


@pytest.mark.parametrize(
    "answer", [{}, {"token": 3}, {"token": ""}, {"token": "a b"}, {"access_token": "a\r\nX: b"}]
)
@pytest.mark.usefixtures("known")
def test_unusable_token_is_a_wrong_answer(
    plain: FakeRegistry, attach: Any, answer: dict[str, Any]
) -> None:
    data = json.dumps(answer).encode()
    plain.raw = only("GET", "/token", head("200 OK", f"Content-Length: {len(data)}"), data)
    ran = attach(plain.image())
    assert ran.code == 2
    assert "it sent no token" in ran.stderr


@pytest.mark.usefixtures("known")
def test_upload_is_sent_again_from_its_start(
    plain: FakeRegistry, attach: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry demands a token after the file was sent."""
    monkeypatch.setattr(transport, "SECONDS", 10.0)
    image, plain.token = plain.image(), ""
    asked = f'Bearer realm="http://{plain.host}/token",service="s",scope="pull"'
    again = head("401 Unauthorized", f"WWW-Authenticate: {asked}", "Content-Length: 0")
    sent: set[str] = set()

    def raw(method: str, path: str) -> Iterable[bytes] | None:
        if method != "PUT" or "/uploads/" not in path or path in sent:
            return None
        sent.add(path)
        plain.token = f"token{len(sent)}"
        return [again]

    plain.raw = raw
    ran = attach(image)
    assert ran.code == 0, ran.stderr
    assert len(sent) == len(plain.blobs)


def test_connection_after_the_deadline_is_shut_down() -> None:
    watch = transport.ConnectionTimer(0.0)
    watch._end()
    here, there = socket.socketpair()
    with here, there:
        there.settimeout(10)
        watch.hold(here)
        assert there.recv(1) == b""
