"""One training step of a deep stack in a process of its own, its boundaries on the device or on disk; prints bytes.

Arguments: folder of the disk tier, or "plain". Imports neither pytest nor hypothesis.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from planish.memory.allocator import fix_malloc_thresholds
from planish.memory.meter import ProcessMeter
from planish.peaks.boundary.offload import FarBudget, open_store
from planish.peaks.boundary.remembered import PLAIN
from planish.price.boundary import Depth

LAYERS, TOKENS, WIDTH = 20, 16384, 128
NBYTES = TOKENS * WIDTH * 4


def main(folder: str) -> None:
    fix_malloc_thresholds()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    checkpoints, store = [PLAIN] * LAYERS, None
    if folder != "plain":
        budget = FarBudget(disk_bytes=2**30, folder=Path(folder))
        device = torch.device("cpu")
        store = open_store(Depth(num_boundaries=LAYERS, boundary_bytes=NBYTES), budget, device=device)
        checkpoints = [store.checkpoint(index) for index in range(LAYERS)]
    torch.ones(64, 64).matmul(torch.ones(64, 64))
    meter = ProcessMeter()
    for _ in range(2):
        hidden = torch.randn(TOKENS, WIDTH, requires_grad=True) * 1.0
        for layer, run in zip(layers, checkpoints, strict=True):
            hidden = hidden + run(layer, hidden)
        hidden.square().sum().backward()
        del hidden
    if store is not None:
        store.close()
    total = sum(parameter.grad.double().sum().item() for layer in layers for parameter in layer.parameters())
    reading = meter.read()
    print(reading.resident_peak_bytes - meter.baseline_bytes, total.hex())


if __name__ == "__main__":
    main(sys.argv[1])
