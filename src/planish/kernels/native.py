"""The libraries that are compiled with the package, where a C++ compiler was there."""

import ctypes
import functools
import importlib.machinery
import warnings
from pathlib import Path

LEVELS = ("portable", "AVX2", "AVX-512")
"""What a kernel's `level` means."""


@functools.cache
def load(name: str, *, without: str) -> ctypes.CDLL | None:
    """Return the library `name`, or None where it was not built, which is said once.

    Args:
        name: As in `kernels/<name>.cpp`.
        without: What serves in its place, the sentence's second half.
    """
    path = library_path(name)
    if path is None:
        warnings.warn(
            f"planish was installed without a C++ compiler: {without}; install a compiler and reinstall planish.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return ctypes.CDLL(str(path))


def library_path(name: str) -> Path | None:
    """Return where the library lies, None where it was not built."""
    folder = Path(__file__).parent
    paths = [folder / f"_{name}{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in paths if path.is_file()), None)
