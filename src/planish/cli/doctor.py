"""`planish doctor`: what this machine has, and what planish will use of it."""

import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from planish.cli.options import parse_plain
from planish.units import format_bytes

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "scipy")
_EXTRAS = {"parquet": "pyarrow", "plots": "matplotlib", "tensorboard": "tensorboard", "triton": "triton"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Show what this machine has and what planish will use of it."""


def main(words: list[str]) -> int:
    """Run the verb."""
    parse_plain(Options, words, verb="doctor")
    width = max(len(name) for name, _ in findings())
    sys.stdout.write("".join(f"{name:<{width}}  {value}\n" for name, value in findings()))
    return 0


def findings() -> list[tuple[str, str]]:
    """Return (subject, what was found), a line each."""
    import torch

    from planish.kernels import bitmap_native, softmax
    from planish.memory import allocator
    from planish.memory.meter import ProcessMeter
    from planish.models.builtin import BUILT_IN, cache_folder
    from planish.price.processor import has_products

    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    cached = [name for name in BUILT_IN if (cache_folder() / name / "config.json").is_file()]
    return [
        ("python", platform.python_version()),
        *((name, metadata.version(name)) for name in _PACKAGES),
        *((f"extra {extra}", _version(package)) for extra, package in _EXTRAS.items()),
        (
            "processor",
            f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        ),
        ("bf16 products", "by its own instructions" if has_products("bfloat16") else "slow here; fp32 trains faster"),
        ("bitmap kernels", bitmap_native.describe()),
        ("softmax kernels", softmax.describe()),
        ("memory", format_bytes(pages * page_bytes)),
        ("peak reset", "yes" if ProcessMeter().resettable else "no: VmHWM is the peak since the process began"),
        ("malloc", allocator.describe()),
        ("device", _devices()),
        (
            "built-in models",
            ", ".join(f"{name} ({'ready' if name in cached else 'fetched on first use'})" for name in BUILT_IN),
        ),
        ("cache", str(cache_folder())),
        ("here", f"{format_bytes(_free_bytes(Path.cwd()))} free"),
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu (no CUDA device)"
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return ", ".join(f"{each.name} {format_bytes(each.total_memory)}" for each in names)


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
