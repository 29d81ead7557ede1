"""What travels beside vLLM's own messages survives the way."""

from __future__ import annotations

import pickle

import msgspec
import pytest

messages = pytest.importorskip("vllm_deepinfer_plugins.hand_over.messages")
metadata = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata")


def test_a_pledge_survives_the_request_s_parameters() -> None:
    pledge = messages.Pledge(9, {"0:0": 1 << 40, "0:1": 5})
    params = msgspec.msgpack.decode(msgspec.msgpack.encode({messages.PLEDGE: pledge.as_params()}))
    assert messages.Pledge.of(params) == pledge
    assert messages.Pledge.of({"do_remote_prefill": True}) is None


def test_peers_read_our_handshake_as_vllm_s() -> None:
    wire = msgspec.msgpack.encode(messages.HandOverPayload("hash", b"meta", 1 << 40))
    theirs = msgspec.msgpack.Decoder(metadata.NixlHandshakePayload).decode(wire)
    assert (theirs.compatibility_hash, theirs.agent_metadata_bytes) == ("hash", b"meta")


def test_the_metadata_are_vllm_s_and_ours() -> None:
    stock = metadata.NixlConnectorMetadata()
    stock.reqs_in_batch = {"a"}
    ours = messages.HandOverMetadata(stock)
    ours.released = {"b"}
    back = pickle.loads(pickle.dumps(ours))
    assert isinstance(back, metadata.NixlConnectorMetadata)
    assert (back.reqs_in_batch, back.released, back.pledges, back.checks) == ({"a"}, {"b"}, {}, {})


def test_stats_carry_events_and_are_empty_without() -> None:
    stats, worker = messages.HandOverStats(), messages.HandOverStats()
    assert stats.is_empty()
    stats.data[messages.RELEASED].append("a")
    worker.data[messages.STUCK].append("b")
    worker.record_kv_expired_req()
    both = worker.aggregate(stats).to_dict()
    assert (both[messages.RELEASED], both[messages.STUCK], both[messages.EXPIRED]) == (["a"], ["b"], [1])
    taken = stats.clone_and_reset()
    assert stats.is_empty() and not taken.is_empty()
    assert messages.HandOverStats(data=taken.data).data is taken.data
    assert messages.HandOverStats().reduce()["Num successful transfers"] == 0
