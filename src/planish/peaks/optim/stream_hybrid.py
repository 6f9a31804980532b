"""Two places of update at once: of the chunks on the host a share is updated there, the others stream to the device."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from planish.memory.far_host import HostSlab
from planish.peaks.optim.stream_layout import Chunk

_OPTIONS: dict[str, Any] = {
    "amsgrad": False,
    "beta1": 0.9,
    "beta2": 0.999,
    "lr": 0.0,
    "weight_decay": 0.0,
    "eps": 1e-8,
    "maximize": False,
}
_ROUNDS = 3


def split(chunks: Sequence[Chunk], share: float) -> None:
    """Let `share` of the chunks on the host, spread evenly, be updated where they lie, and the others stream.

    Nothing moves: a chunk is where it was, and nothing may be under way.
    """
    host = [chunk for chunk in chunks if chunk.tier is not None and isinstance(chunk.tier.medium, HostSlab)]
    for number, chunk in enumerate(host):
        stays = int((number + 1) * share) > int(number * share)
        chunk.resident = _in_place(chunk) if stays else None


def measured_share(chunk: Chunk, device: torch.device) -> float:
    """Return the share of chunks that the CPU should update for both to end together: r_cpu / (r_cpu + r_device).

    The CPU's rate is that of an update in host memory; the device's that of the slowest of fetching a chunk, updating
    it and writing it back. Each is the best of three. The chunk must be fresh, since its bytes are overwritten.

    Memory: while it measures, the arrays of one chunk and its gradient on both sides.
    """
    assert chunk.tier is not None
    tier, regions = chunk.tier, chunk.regions
    here, there = (_arrays(chunk, each) for each in (torch.device("cpu"), device))

    def fetch() -> None:
        for region, array in zip(regions, there, strict=False):
            tier.read(region, array).wait()

    def write_back() -> None:
        for region, array in zip(regions, there, strict=False):
            tier.write(region, array).wait()

    cpu_s = _best_s(lambda: _update(here), torch.device("cpu"))
    device_s = max(_best_s(each, device) for each in (write_back, fetch, lambda: _update(there)))
    return device_s / (cpu_s + device_s)


def _in_place(chunk: Chunk) -> dict[str, Tensor]:
    assert chunk.tier is not None
    assert isinstance(chunk.tier.medium, HostSlab)
    like = torch.empty((), dtype=chunk.dtype).expand(chunk.numel)
    views = [chunk.tier.medium.view(region.offset, like) for region in chunk.regions]
    return dict(zip(chunk.kept.names, views, strict=True))


def _arrays(chunk: Chunk, device: torch.device) -> list[Tensor]:
    return [torch.zeros(chunk.numel, dtype=chunk.dtype, device=device) for _ in range(4)]


def _update(arrays: list[Tensor]) -> None:
    weight, grad, exp_avg, exp_avg_sq = arrays
    step = torch.zeros((), dtype=torch.float32, device=weight.device)
    adamw([weight], [grad], [exp_avg], [exp_avg_sq], [], [step], fused=True, **_OPTIONS)


def _best_s(work: Callable[[], None], device: torch.device) -> float:
    taken = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        taken.append(time.perf_counter() - started)
    return min(taken)
