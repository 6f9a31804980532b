"""Which numbers this processor multiplies by instructions of their own; the others it is quicker to raise to float32.

Without such instructions torch multiplies narrow matrices one number at a time: products of bf16 then take from five to
eighty times as long as the same in float32.
"""

import functools
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_INSTRUCTIONS = {
    "bfloat16": ({"avx512bw", "avx512dq", "avx512vl"}, {"avx_ne_convert", "avx_vnni_int8"}, {"bf16", "sve"}),
    "float16": ({"avx512_fp16"}, {"avx_ne_convert", "avx_vnni_int8"}),
}


@functools.cache
def instruction_sets() -> frozenset[str]:
    """Return what the processor says that it can do, by the kernel's names; nothing where no kernel tells."""
    if not _CPUINFO.exists():
        return frozenset()
    lines = (line.partition(":") for line in _CPUINFO.read_text(encoding="utf-8").splitlines())
    return frozenset(word for key, _, value in lines if key.strip() in ("flags", "Features") for word in value.split())


def has_products(dtype: str) -> bool:
    """Return whether this CPU multiplies `dtype` by instructions of its own."""
    return dtype not in _INSTRUCTIONS or any(each <= instruction_sets() for each in _INSTRUCTIONS[dtype])


def product_dtype(dtype: str) -> str:
    """Return in which dtype a CPU makes products of `dtype`: its own if it has instructions for it, else float32."""
    return dtype if has_products(dtype) else "float32"
