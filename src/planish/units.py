"""Sizes as people write them: bytes with a unit in, whole numbers out, shown back in GiB."""

import re

_BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_COUNT_UNITS = {"": 1, "K": 2**10, "M": 2**20}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str, *, name: str) -> int:
    """Return the bytes that `text` names, such as `"4GB"` (4e9) or `"4 GiB"` (2^32).

    Args:
        text: A positive number and a unit (B, KB, MB, GB, TB, KiB, MiB, GiB, TiB).
        name: The argument as the user wrote it, for the message.

    Raises:
        ValueError: No number, no unit, an unknown unit, or nothing left after rounding down.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f'`{name}` must be a positive size such as "4GiB", got {text!r}.')
    number, unit = match.groups()
    if not unit:
        raise ValueError(
            f'`{name}` needs a unit, got {text!r}; write for example "{number if float(number) else 4}GiB".'
        )
    scale = _BYTE_UNITS.get(unit.upper())
    if scale is None:
        raise ValueError(
            f"`{name}` has an unknown unit {unit!r} in {text!r}; use KiB, MiB, GiB, TiB, KB, MB, GB or TB."
        )
    size = int(float(number) * scale)
    if size < 1:
        raise ValueError(f'`{name}` must be above zero, got {text!r}; write a size such as "4GiB".')
    return size


def parse_count(text: str, *, name: str) -> int:
    """Return the count that `text` names: a whole number, or one with K (1,024) or M (1,048,576).

    Raises:
        ValueError: Not a positive whole number.
    """
    match = _SIZE.fullmatch(text.replace("_", "").replace(",", ""))
    scale = _COUNT_UNITS.get(match.group(2).upper()) if match else None
    if match is None or scale is None:
        raise ValueError(f'`{name}` must be a whole number such as 4096 or "4K", got {text!r}.')
    count = float(match.group(1)) * scale
    if count < 1 or count != int(count):
        raise ValueError(f"`{name}` must be a positive whole number, got {text!r}.")
    return int(count)


def format_bytes(size_bytes: int) -> str:
    """Return `size_bytes` as people read it: GiB, or a smaller unit when it is small."""
    magnitude = abs(size_bytes)
    if magnitude >= 2**30 // 10:
        return f"{size_bytes / 2**30:.2f} GiB"
    if magnitude >= 2**20 // 10:
        return f"{size_bytes / 2**20:.1f} MiB"
    if magnitude >= 2**10:
        return f"{size_bytes / 2**10:.1f} KiB"
    return f"{size_bytes} B"
