"""Who may speak on a channel: anyone on the loopback; beyond it holders of the cluster's keys (CurveZMQ)."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq

from vllm_deepinfer.errors import UserError


class ChannelError(UserError):
    """An address or key with which a channel cannot be opened."""


@dataclass(frozen=True, slots=True)
class ChannelKeys:
    """One Curve25519 pair for all replicas and one for all gateways of a cluster. Never logged.

    The control plane makes them when the cluster starts and hands each process its part.
    """

    replica_public: bytes
    gateway_public: bytes
    replica_secret: bytes = field(repr=False)
    gateway_secret: bytes = field(repr=False)

    @classmethod
    def make(cls) -> ChannelKeys:
        """Fresh keys."""
        replica, gateway = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(replica[0], gateway[0], replica[1], gateway[1])


def check_address(address: str, keys: ChannelKeys | None) -> None:
    """Refuse an address that others could reach without keys.

    Raises:
        ChannelError: One sentence.
    """
    parts = urlsplit(address)
    if parts.scheme == "ipc":
        return
    if parts.scheme != "tcp" or not parts.hostname:
        raise ChannelError(f"the channel address {address!r} is neither tcp://HOST:PORT nor ipc://PATH")
    if keys is None and not _is_loopback(parts.hostname):
        raise ChannelError(
            f"the channel address {address} is not on the loopback: give the channel keys, or write 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
