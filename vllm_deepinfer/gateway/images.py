"""Where images may come from: data URLs, and public addresses of allowed hosts.

A URL is fetched on a client's behalf, so it must not reach what the client cannot reach. Every address of
every hop is checked after the name has been resolved, and the connection goes to the address that was
checked: a redirect or a DNS answer into a private range is refused, and so is a second answer that differs.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from deepseek_recipe import ImageError, ReqwestImageFetcher

from vllm_deepinfer.gateway.errors import ApiError

MAX_IMAGE_BYTES = 20 << 20
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_V4_COMPATIBLE = ipaddress.ip_network("::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: str) -> bool:
    """Whether an IP address, as text, is one that anybody on the internet can reach.

    IPv6 forms that carry an IPv4 address count as that address. Text that is no address is not public.
    """
    try:
        parsed: Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    inner = _inner(parsed) if isinstance(parsed, ipaddress.IPv6Address) else None
    if inner is not None:
        return is_public(str(inner))
    return parsed.is_global and not (parsed.is_multicast or parsed.is_reserved or parsed.is_unspecified)


def _inner(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64 or address in _V4_COMPATIBLE:
        return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return None


class ImagePolicy:
    """Decides about image sources, and fetches the allowed ones.

    Args:
        hosts: host names that URLs may name; one that starts with a dot allows its subdomains; None: all.
        max_bytes: largest image.
    """

    def __init__(self, hosts: Sequence[str] | None = None, max_bytes: int = MAX_IMAGE_BYTES) -> None:
        self._hosts = None if hosts is None else tuple(host.lower().rstrip(".") for host in hosts)
        self._max_bytes = max_bytes
        fetcher = ReqwestImageFetcher.with_max_bytes(max_bytes)
        self._fetcher = fetcher.with_destination_filter(self.allows_destination)

    def allows_host(self, host: str) -> bool:
        """Whether a URL may name this host."""
        if self._hosts is None:
            return True
        name = host.lower().rstrip(".")
        return any(name == known or (known.startswith(".") and name.endswith(known)) for known in self._hosts)

    def allows_destination(self, host: str, address: str) -> bool:
        """Whether the fetcher may connect to this address of this host; asked for every hop."""
        return self.allows_host(host) and is_public(address)

    def check(self, url: str, where: str) -> None:
        """Refuse a source without fetching it. Raises: ApiError naming the place `where`."""
        if url[:5].lower() == "data:":
            if len(url) > self._max_bytes * 4 // 3 + 100:
                raise ApiError(
                    400, f"{where}: the image is larger than {self._max_bytes} bytes.", param=where
                )
            return
        try:
            parts = urlsplit(url)
            host, credentials = parts.hostname, parts.username or parts.password
        except ValueError:
            host, credentials = None, None
        if not host or parts.scheme not in ("http", "https"):
            raise ApiError(400, f"{where}: an image needs a data:, http: or https: URL.", param=where)
        if credentials:
            raise ApiError(400, f"{where}: an image URL must not hold credentials.", param=where)
        if not self.allows_host(host):
            raise ApiError(400, f"{where}: images from this host are not allowed.", param=where)
        literal = host.strip("[]")
        if _is_address(literal) and not is_public(literal):
            raise ApiError(400, f"{where}: the image's address is not public.", param=where)

    def fetch(self, url: str, where: str) -> bytes:
        """The bytes behind an http(s) URL. Blocking: call it in a thread. Raises: ApiError."""
        self.check(url, where)
        try:
            return self._fetcher.fetch(url)
        except ImageError as error:
            if error.kind == "DestinationRejected":
                message = f"{where}: the image's address is not public or not allowed."
            else:
                message = f"{where}: the image cannot be fetched ({error.kind})."
            raise ApiError(400, message, param=where) from None


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
