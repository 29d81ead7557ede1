"""The prime bucket counts of Engram's hash tables."""

from itertools import count, islice

_SMALL = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(number: int) -> bool:
    """Miller-Rabin with the first twelve primes as witnesses.

    Exact below 3.3e24 (Sorenson and Webster, "Strong pseudoprimes to twelve prime bases", 2015).
    """
    if number < 2:
        return False
    for prime in _SMALL:
        if number % prime == 0:
            return number == prime
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(witness, number, odd, twos) for witness in _SMALL)


def _passes(witness: int, number: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def bucket_primes(*, layers: int, max_ngram: int, heads: int, base: int) -> tuple[tuple[int, ...], ...]:
    """Bucket counts per Engram layer, [layers][(max_ngram - 1) * heads], n-gram sizes 2, 3, ... in turn.

    Each n-gram size of each layer searches upwards from ``base`` again, and a prime is used once in the whole
    model, so that no two hash heads share a modulus. What is taken is therefore always the first primes from
    ``base`` on, and one search that goes on where it stopped finds the same.
    """
    columns = (max_ngram - 1) * heads
    primes = islice(filter(is_prime, count(base)), layers * columns)
    return tuple(tuple(islice(primes, columns)) for _ in range(layers))
