"""BlockPool against a model: references, prefix hits, eviction order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_deepinfer.engine.simulated.kv import BlockPool, block_key


def test_blocks_are_taken_shared_and_released() -> None:
    pool = BlockPool(4)
    first = pool.take(3)
    assert (pool.used, pool.free) == (3, 1)
    pool.share(first[:1])
    pool.release(first)
    assert (pool.used, pool.free) == (1, 3)
    pool.release(first[:1])
    assert pool.used == 0


def test_a_released_prefix_is_found_until_its_block_is_taken() -> None:
    pool = BlockPool(3)
    blocks = pool.take(2)
    for block, key in zip(blocks, (b"1", b"2"), strict=True):
        pool.publish(block, key)
    pool.release(blocks)
    assert pool.lookup([b"1", b"2", b"3"]) == blocks
    pool.take(1)  # the block that never held anything
    assert pool.lookup([b"1", b"2"]) == blocks
    pool.take(1)  # now the end of the prefix, before its beginning
    assert pool.lookup([b"1", b"2"]) == blocks[:1]
    pool.take(1)
    assert pool.lookup([b"1", b"2"]) == []


def test_lookup_stops_at_the_first_gap() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    pool.publish(blocks[0], b"1")
    pool.publish(blocks[2], b"3")
    assert pool.lookup([b"1", b"2", b"3"]) == [blocks[0]]


def test_a_prefix_has_one_block() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, b"1")
    pool.publish(second, b"1")
    assert pool.lookup([b"1"]) == [first]
    pool.release([second])
    pool.take(1)
    assert pool.lookup([b"1"]) == [first], "taking the other one does not forget the key"


@given(st.lists(st.integers(0, 2**40), max_size=8), st.lists(st.integers(0, 2**40), max_size=8))
def test_keys_depend_on_every_token_and_on_what_is_before(left: list[int], right: list[int]) -> None:
    assert (block_key(b"", left) == block_key(b"", right)) == (left == right)
    assert block_key(b"salt", left) != block_key(b"", left)
    assert (block_key(block_key(b"", left), [1]) == block_key(block_key(b"", right), [1])) == (left == right)


class PoolStates(RuleBasedStateMachine):
    """Holders take, share and release at random; references are counted beside the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.holders: list[list[int]] = []
        self.published = 0

    @rule(count=st.integers(0, 4))
    def take(self, count: int) -> None:
        if count <= self.pool.free:
            held = {block for holder in self.holders for block in holder}
            taken = self.pool.take(count)
            assert len(set(taken)) == count and not held & set(taken)
            self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish_and_share(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if holder:
            key = str(self.published).encode()
            self.published += 1
            self.pool.publish(holder[0], key)
            found = self.pool.lookup([key])
            assert found in ([holder[0]], [])
            self.pool.share(found)
            self.holders.append(found)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def counts_agree(self) -> None:
        held = {block for holder in self.holders for block in holder}
        assert self.pool.used == len(held)
        assert self.pool.free == 8 - len(held)


TestPoolStates = PoolStates.TestCase
