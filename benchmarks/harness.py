"""What every benchmark shares: interleaved timing, and results as JSON that says where, when and how they were made."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one variant, one entry a round.

    Attributes:
        wall_s: On the clock; contention shows here.
        cpu_s: Of all threads of the process.
    """

    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]

    def summary(self) -> dict[str, dict[str, float]]:
        """Return n, min, median and max of both."""
        return {"wall_s": spread(self.wall_s), "cpu_s": spread(self.cpu_s)}


def spread(values: tuple[float, ...]) -> dict[str, float]:
    """Return n, min, median and max of `values`."""
    return {"n": len(values), "min": min(values), "median": statistics.median(values), "max": max(values)}


def interleave(variants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """Return the times of each variant, which take turns, so that a busy moment meets all of them.

    Every variant runs once untimed; odd rounds go backwards.
    """
    for run in variants.values():
        run()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for number in range(rounds):
        names = list(variants)
        for name in reversed(names) if number % 2 else names:
            wall, cpu = time.perf_counter(), time.process_time()
            variants[name]()
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: Times(wall_s=tuple(wall for wall, _ in pairs), cpu_s=tuple(cpu for _, cpu in pairs))
        for name, pairs in taken.items()
    }


def write_result(name: str, figures: Mapping[str, Any], *, seed: int) -> Path:
    """Write `benchmarks/results/<name>.json`: `figures`, whose `Times` become their summaries, and their origin.

    Args:
        name: The benchmark.
        figures: Cases and variants, nested as one likes.
        seed: What random inputs were drawn from.
    """
    result = {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": {"python": platform.python_version(), **{each: version(each) for each in ("torch", "planish")}},
        "commit": _git("describe", "--always", "--dirty", "--abbrev=12"),
        "seed": seed,
        "command": " ".join(["python", Path(sys.argv[0]).resolve().relative_to(ROOT).as_posix(), *sys.argv[1:]]),
        "figures": _plain(figures),
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if sys.platform == "linux" else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout.strip()


def _plain(figures: Any) -> Any:
    if isinstance(figures, Times):
        return figures.summary()
    if isinstance(figures, Mapping):
        return {name: _plain(each) for name, each in figures.items()}
    return figures
