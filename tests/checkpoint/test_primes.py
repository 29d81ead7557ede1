from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_deepinfer.checkpoint.primes import bucket_primes, is_prime


def by_trial_division(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


def by_scanning(*, layers: int, max_ngram: int, heads: int, base: int) -> list[list[int]]:
    """The definition: each n-gram size starts over at the base and takes the next primes nobody has."""
    taken: list[int] = []
    tables = []
    for _ in range(layers):
        table: list[int] = []
        for _ in range(max_ngram - 1):
            found: list[int] = []
            number = base
            while len(found) < heads:
                if by_trial_division(number) and number not in taken:
                    found.append(number)
                    taken.append(number)
                number += 1
            table += found
        tables.append(table)
    return tables


def test_every_number_below_five_thousand() -> None:
    assert [n for n in range(5000) if is_prime(n)] == [n for n in range(5000) if by_trial_division(n)]


@given(st.integers(0, 10**7))
def test_any_number_like_trial_division(number: int) -> None:
    assert is_prime(number) == by_trial_division(number)


def test_numbers_that_fool_weaker_tests() -> None:
    carmichael = [561, 1105, 1729, 2465, 6601, 8911, 41041, 825265, 321197185]
    strong_to_few_witnesses = [2047, 1373653, 25326001, 3215031751, 2152302898747, 3474749660383]
    assert not any(is_prime(number) for number in carmichael + strong_to_few_witnesses)


def test_large_primes_and_their_products() -> None:
    first, second = 2**61 - 1, 16_000_057
    assert is_prime(first)
    assert is_prime(second)
    assert not is_prime(first * second)
    assert not is_prime(second * second)


def test_as_many_buckets_as_a_config_may_have() -> None:
    primes = bucket_primes(layers=2, max_ngram=2049, heads=2, base=300)
    assert [len(table) for table in primes] == [4096, 4096]
    assert (primes[0][0], primes[0][-1] < primes[1][0]) == (307, True)


@given(
    layers=st.integers(1, 3), max_ngram=st.integers(2, 4), heads=st.integers(1, 4), base=st.integers(1, 2000)
)
def test_buckets_like_the_definition(layers: int, max_ngram: int, heads: int, base: int) -> None:
    primes = bucket_primes(layers=layers, max_ngram=max_ngram, heads=heads, base=base)
    assert [list(table) for table in primes] == by_scanning(
        layers=layers, max_ngram=max_ngram, heads=heads, base=base
    )
    used = [prime for table in primes for prime in table]
    assert len(set(used)) == len(used)


def test_small_example() -> None:
    # Two layers of bigrams and trigrams with two heads each, from 10 upwards.
    assert bucket_primes(layers=2, max_ngram=3, heads=2, base=10) == ((11, 13, 17, 19), (23, 29, 31, 37))


def test_the_released_tables_have_exactly_the_rows_of_their_buckets() -> None:
    primes = bucket_primes(layers=2, max_ngram=4, heads=8, base=16_000_000)
    assert [sum(table) for table in primes] == [384_006_168, 384_016_682]


def test_no_layer_no_table() -> None:
    assert bucket_primes(layers=0, max_ngram=4, heads=8, base=300) == ()
