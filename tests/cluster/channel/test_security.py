"""Addresses that may be opened, and keys that are not shown."""

from __future__ import annotations

import pytest

from vllm_deepinfer.cluster.channel.security import ChannelError, ChannelKeys, check_address


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:5555", "tcp://localhost:*", "tcp://[::1]:5555", "tcp://127.8.8.8:1", "ipc:///tmp/x"],
)
def test_the_loopback_needs_no_keys(address: str) -> None:
    check_address(address, None)


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://10.0.0.1:1", "tcp://host:1"]
)
def test_beyond_it_keys_are_needed(address: str) -> None:
    with pytest.raises(ChannelError, match="give the channel keys"):
        check_address(address, None)
    check_address(address, ChannelKeys.make())


@pytest.mark.parametrize("address", ["", "127.0.0.1:5", "http://127.0.0.1:5", "tcp://", "inproc://x"])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(ChannelError, match="neither tcp"):
        check_address(address, ChannelKeys.make())


def test_secrets_are_not_shown() -> None:
    keys = ChannelKeys.make()
    shown = repr(keys) + str(keys)
    assert keys.replica_secret.decode() not in shown and keys.gateway_secret.decode() not in shown
    assert len({keys.replica_secret, keys.gateway_secret, keys.replica_public, keys.gateway_public}) == 4
