"""A shuffled order that is computed place by place, so that nothing is stored and any place can be reached at once."""

from hashlib import blake2b

_ROUNDS = 6


def shuffled(place: int, size: int, key: tuple[int, ...]) -> int:
    """Return which of `size` things comes at `place` in the order that `key` stands for.

    A Feistel network permutes the smallest even number of bits that holds `size`; results outside are permuted again
    until they fall inside, so the map from places to things is one to one. It depends on `key` alone: not on a
    library's generator, so a position taken today is the same position in every later version.

    Example:
        >>> sorted(shuffled(place, 5, (7, 0)) for place in range(5))
        [0, 1, 2, 3, 4]
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(_ROUNDS):
            digest = blake2b(repr((key, turn, right)).encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        place = left << half | right
        if place < size:
            return place
