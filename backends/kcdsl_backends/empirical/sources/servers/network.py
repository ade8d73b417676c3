"""Addresses of servers: those that the contract names, if the user allows them.

A contract is untrusted text that names an address and a variable. So keys are in dedicated
variables and are sent only to hosts that the user listed, a host name is resolved once and the
checked address is the one that is connected to, and every byte of an answer must arrive before the
deadline.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    import httpx

HOSTS = "KCDSL_SERVER_HOSTS"
"""The environment variable with the hosts that the user allows, separated by commas."""
_LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
_METADATA = tuple(
    map(
        ipaddress.ip_network,
        ("100.100.100.200", "168.63.129.16", "192.0.0.192", "fd00:ec2::/32", "fd20:ce::254"),
    )
)
"""Metadata addresses of clouds outside the link-local range."""
_UNROUTED = tuple(
    map(ipaddress.ip_network, ("0.0.0.0/8", "255.255.255.255", "fec0::/10", "64:ff9b:1::/48"))
)
"""Addresses of no single machine, of deprecated site-local networks, and of a local translator,
whose destination is unknown."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Forbidden(Exception):
    """A request to an address that the user did not allow."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The server that a contract names. `listed`: the user listed its host, `plain`: also without
    TLS; `with_key`: a key is sent."""

    url: str
    with_key: bool
    listed: bool
    plain: bool

    @property
    def parts(self) -> SplitResult:
        """Return the parts of the address."""
        return urlsplit(self.url)

    @property
    def host(self) -> str:
        """Return the name or the address of the host."""
        return self.parts.hostname or ""

    @property
    def proxy(self) -> str | None:
        """Return the proxy of the environment; None for this machine."""
        if self.host in _LOCAL_NAMES or proxy_bypass(self.host):
            return None
        return getproxies().get(self.parts.scheme)

    def refuse(self, addresses: Iterable[_Address]) -> None:
        """Raise Forbidden for addresses that the user did not allow."""
        found = tuple(addresses)
        here = _is_here(found)
        if not self.listed:
            for address in found:
                if _is_special(address):
                    raise Forbidden(f"{self.host} is {address}, an address of the link or the like")
        if self.parts.scheme != "https" and not here:
            if self.with_key:
                raise Forbidden("a key goes nowhere without TLS but to this machine")
            if not self.plain:
                raise Forbidden(
                    f"without TLS only servers on this machine are allowed, and "
                    f"{self.host} is another one"
                )
        if self.with_key and not here and not self.listed:
            raise Forbidden(f"a key goes to this machine and to hosts of {HOSTS} alone")


def destination(url: str, with_key: bool) -> Destination:
    """Return the server of a contract, with the user's permissions for it."""
    parts = urlsplit(url)
    listed = [
        entry.scheme
        for entry in map(_entry, os.environ.get(HOSTS, "").split(","))
        if entry.hostname == parts.hostname and _port(entry) in (None, _port(parts))
    ]
    return Destination(url, with_key, bool(listed), "http" in listed)


def _entry(text: str) -> SplitResult:
    text = text.strip().lower()
    return urlsplit(text if "://" in text else f"https://{text}")


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError:
        return -1


def resolve(host: str, port: int) -> tuple[_Address, ...]:
    """Return the addresses of a host; empty if it has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(ipaddress.ip_address(item[4][0]) for item in found))


def _is_here(addresses: tuple[_Address, ...]) -> bool:
    """Return whether all addresses are of this machine."""
    return bool(addresses) and all(address.is_loopback for address in addresses)


def _is_special(address: _Address) -> bool:
    """Return whether an address is link-local, of a cloud's metadata, multicast, or unrouted."""
    # Most forms of IPv6 that embed an IPv4 address have it at their end:
    # compatible, translated, ISATAP, and a translator's own prefix.
    end = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return _is_secret(end) or any(
        _is_secret(one)
        or one.is_multicast
        or one.is_unspecified
        or any(one in network for network in _UNROUTED)
        for one in (address, *_inside(address))
    )


def _is_secret(address: _Address) -> bool:
    return address.is_link_local or any(address in network for network in _METADATA)


def _inside(address: _Address) -> Iterable[_Address]:
    """Yield the IPv4 addresses that an IPv6 address embeds."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            yield address.ipv4_mapped
        if address.sixtofour is not None:
            yield address.sixtofour
        if address.teredo is not None:
            yield from address.teredo
        if address in _NAT64:
            yield ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time of `clock` until which bytes may arrive; `came` is called on each arrival."""

    until: float
    clock: Callable[[], float]
    came: Callable[[], None] = lambda: None

    def left(self, timeout: float | None) -> float:
        """Return the remaining time; raises ReadTimeout if there is none."""
        import httpcore

        left = self.until - self.clock()
        if left <= 0:
            raise httpcore.ReadTimeout("the time for the whole answer is over")
        return left if timeout is None else min(left, timeout)


def client(
    library: Any, place: Destination, connect: float, whole: float, deadline: Deadline
) -> httpx.Client:
    """Return a client that connects only to the server of a contract, with a deadline.

    Raises Forbidden.
    """
    proxy = place.proxy
    if proxy is not None:
        addresses = resolve(place.host, _port(place.parts) or 443)
        place.refuse(addresses)
        if _is_here(addresses):
            proxy = None  # it might resolve the name to another machine
    transport = library.HTTPTransport(proxy=proxy)
    pool = transport._pool
    if not hasattr(pool, "_network_backend"):
        raise Forbidden("this version of httpx does not allow addresses to be checked")
    pool._network_backend = _Guard(place if proxy is None else None, deadline)
    made: httpx.Client = library.Client(
        transport=transport,
        timeout=library.Timeout(whole, connect=connect),
        follow_redirects=False,
        trust_env=False,
    )
    return made


class _Guard:
    """A network backend of httpcore that connects to checked addresses, until a deadline."""

    def __init__(self, place: Destination | None, deadline: Deadline) -> None:
        self.place, self.deadline = place, deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> Any:
        import httpcore

        addresses = resolve(host, port)
        if not addresses:
            raise httpcore.ConnectError(f"{host} has no address")
        if self.place is not None:
            self.place.refuse(addresses)
        last: Exception | None = None
        for address in addresses:
            try:
                stream = httpcore.SyncBackend().connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
                continue
            return _Timed(stream, self.deadline)
        assert last is not None
        raise last

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class _Timed:
    """A connection whose every read and write ends before the deadline."""

    def __init__(self, stream: Any, deadline: Deadline) -> None:
        self.stream, self.deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data: bytes = self.stream.read(max_bytes, self.deadline.left(timeout))
        self.deadline.came()
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self.stream.write(buffer, self.deadline.left(timeout))

    def close(self) -> None:
        self.stream.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> Any:
        inner = self.stream.start_tls(ssl_context, server_hostname, self.deadline.left(timeout))
        return _Timed(inner, self.deadline)

    def get_extra_info(self, info: str) -> Any:
        return self.stream.get_extra_info(info)
