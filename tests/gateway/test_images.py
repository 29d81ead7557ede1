"""Where images may come from; the fetcher against a server that redirects."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.gateway.errors import ApiError
from vllm_deepinfer.gateway.images import ImagePolicy, is_public

PRIVATE = """
0.0.0.0 10.0.0.1 100.64.0.1 127.0.0.1 127.255.255.254 169.254.169.254 172.16.0.1 172.31.255.255 192.0.0.1
192.0.2.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 240.0.0.1 255.255.255.255
:: ::1 fe80::1 fe80::1%eth0 fc00::1 fd12:3456::1 ff02::1 2001:db8::1 ::ffff:10.0.0.1 ::ffff:169.254.169.254
::7f00:1 64:ff9b::a00:1 64:ff9b::7f00:1 2002:a00:1:: 2002:7f00:1:: 2001:0:0:0:0:0:f5ff:fffe
"""
PUBLIC = """
1.1.1.1 8.8.8.8 93.184.216.34 172.32.0.1 2606:4700:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::
"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_private_addresses(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC.split())
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("text", ["", "localhost", "1.2.3", "1.1.1.1:80", "0x7f.1", "2130706433", "1.1.1.1 "])
def test_what_is_no_address_is_not_public(text: str) -> None:
    assert not is_public(text)


@given(st.integers(0, 2**24 - 1))
def test_no_embedding_makes_ten_slash_eight_public(rest: int) -> None:
    inner = (10 << 24) | rest
    high, low = inner >> 16, inner & 0xFFFF
    for prefix in ("::ffff:", "::", "64:ff9b::"):
        assert not is_public(f"{prefix}{high:x}:{low:x}")
    assert not is_public(f"2002:{high:x}:{low:x}::1")


def test_hosts() -> None:
    policy = ImagePolicy(["img.example.com", ".cdn.example"])
    for host in ("img.example.com", "IMG.example.COM.", "a.cdn.example", "b.a.cdn.example"):
        assert policy.allows_host(host)
    for host in ("example.com", "evilimg.example.com", "img.example.com.evil", "cdn.example", "xcdn.example"):
        assert not policy.allows_host(host)
    assert ImagePolicy().allows_host("anything.example")
    assert policy.allows_destination("a.cdn.example", "8.8.8.8")
    assert not policy.allows_destination("a.cdn.example", "10.0.0.1")
    assert not policy.allows_destination("other.example", "8.8.8.8")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file:///etc/passwd", "needs a data:, http: or https: URL"),
        ("ftp://8.8.8.8/a.png", "needs a data:, http: or https: URL"),
        ("gopher://8.8.8.8/", "needs a data:, http: or https: URL"),
        ("//8.8.8.8/a.png", "needs a data:, http: or https: URL"),
        ("http://", "needs a data:, http: or https: URL"),
        ("http://[::1", "needs a data:, http: or https: URL"),
        ("http://user:pw@8.8.8.8/", "must not hold credentials"),
        ("http://127.0.0.1/", "address is not public"),
        ("http://[::1]:8000/", "address is not public"),
        ("http://169.254.169.254/latest/meta-data/", "address is not public"),
    ],
)
def test_urls_that_are_not_even_tried(url: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        ImagePolicy().check(url, "messages[0]")
    assert caught.value.status == 400 and caught.value.message.startswith("messages[0]: ")


def test_data_urls_are_allowed_up_to_their_size() -> None:
    policy = ImagePolicy(max_bytes=1000)
    policy.check("data:image/png;base64," + "A" * 1000, "x")
    with pytest.raises(ApiError, match="larger than 1000 bytes"):
        policy.check("data:image/png;base64," + "A" * 2000, "x")


class Site(http.server.BaseHTTPRequestHandler):
    """Serves three bytes; /away redirects to another name of the same machine; /big is too big."""

    hits: list[str]

    def do_GET(self) -> None:
        type(self).hits.append(self.path)
        if self.path == "/away":
            self.send_response(302)
            host = self.headers["host"].replace("127.0.0.1", "localhost")
            self.send_header("location", f"http://{host}/secret")
            self.end_headers()
            return
        body = b"x" * 5000 if self.path == "/big" else b"png"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site() -> Iterator[tuple[str, list[str]]]:
    Site.hits = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", Site.hits
    server.shutdown()
    server.server_close()


class TrustsOneName(ImagePolicy):
    """As if 127.0.0.1 were a public host; everything else is judged as ever."""

    def allows_destination(self, host: str, address: str) -> bool:
        return host == "127.0.0.1" or super().allows_destination(host, address)

    def check(self, url: str, where: str) -> None:
        pass


def test_a_name_that_resolves_to_a_private_address_is_refused(site: tuple[str, list[str]]) -> None:
    url, hits = site
    with pytest.raises(ApiError, match="not public or not allowed"):
        ImagePolicy().fetch(url.replace("127.0.0.1", "localhost") + "/a.png", "x")
    assert hits == []


def test_a_redirect_to_a_private_address_is_refused(site: tuple[str, list[str]]) -> None:
    url, hits = site
    policy = TrustsOneName()
    assert policy.fetch(f"{url}/a.png", "x") == b"png"
    with pytest.raises(ApiError, match="not public or not allowed"):
        policy.fetch(f"{url}/away", "x")
    assert hits == ["/a.png", "/away"]


def test_an_image_that_is_too_large_is_not_kept(site: tuple[str, list[str]]) -> None:
    url, _ = site
    with pytest.raises(ApiError, match="cannot be fetched"):
        TrustsOneName(max_bytes=1000).fetch(f"{url}/big", "x")


def test_a_host_that_is_not_there(site: tuple[str, list[str]]) -> None:
    with pytest.raises(ApiError, match=r"cannot be fetched|not public"):
        ImagePolicy().fetch("http://no-such-host.invalid/a.png", "x")
