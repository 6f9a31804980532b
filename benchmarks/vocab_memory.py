"""Claim: beside operands, gradients and the float32 sums that are counted, the head takes at most 64 MiB, at any size.

Each case runs in a process of its own: one small head first, so that libraries are loaded, then forward and backward of
the mean loss, 10 % of the targets ignored, and the kernel's own peak of the process (VmHWM) less what it held before.
From this the gradients and the float32 sums of `GradientsInForward` or `Recompute` are taken; what is left are the
working buffers (`TILE_BYTES`), a few bytes a token, and what the library holds inside one product. Each size is
measured with a number of tokens and with twice as many.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch

from harness import write_result
from planish.memory.meter import ProcessMeter
from planish.units import format_bytes
from vocab_speed import DTYPES, SEED, TILE_BYTES, Operands, ours

CASES = {
    "2048x512x32768": ("gradients-in-forward", "recompute"),
    "4096x576x49152": ("auto",),
    "256x2304x256000": ("auto",),
}
BOUND_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes of one process above what it held before the loss.

    Attributes:
        peak_bytes: All.
        gradient_bytes: Of them the gradients.
        sum_bytes: Of them the float32 sum of a gradient of a narrower tensor.
        above_bytes: The rest, at most `BOUND_BYTES`.
    """

    peak_bytes: int
    gradient_bytes: int
    sum_bytes: int
    above_bytes: int


def measure(tokens: int, width: int, vocab: int, dtype: str, strategy: str) -> Peak:
    """Return the peak of one forward and backward in this process."""
    torch.set_num_threads(1)
    meter = ProcessMeter()
    Operands.draw(64, 64, 3000, DTYPES[dtype]).step(ours(strategy))()
    operands = Operands.draw(tokens, width, vocab, DTYPES[dtype])
    step = operands.step(ours(strategy))
    before = meter.read().resident_bytes
    meter.reset()
    step()
    peak = meter.read().resident_peak_bytes - before
    gradients = operands.hidden.grad.nbytes + operands.weight.grad.nbytes
    sums = _sum_bytes(operands, dtype, strategy)
    return Peak(peak_bytes=peak, gradient_bytes=gradients, sum_bytes=sums, above_bytes=peak - gradients - sums)


def _sum_bytes(operands: Operands, dtype: str, strategy: str) -> int:
    """Return the bytes of the float32 sum that the tiling chosen for `operands` takes beside its working buffers."""
    tiling = operands.tiling(strategy)
    if dtype == "float32":
        return 0
    if tiling.keeps_tiles:
        return operands.weight.numel() * 4
    return int((operands.target != -100).sum()) * operands.hidden.shape[1] * 4 if tiling.sweeps == 1 else 0


def in_a_fresh_process(*case: str) -> Peak:
    """Return the peak of `case` as a new process measures it."""
    command = [sys.executable, __file__, "--case", *case]
    return Peak(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))


def main() -> None:
    """Measure every case, print what is left of its peak and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--case", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        *size, dtype, strategy = options.case
        print(json.dumps(asdict(measure(*map(int, size), dtype, strategy))))
        return
    figures = {}
    for size in options.size:
        tokens, width, vocab = map(int, size.split("x"))
        for dtype in options.dtype:
            for strategy in CASES[size]:
                for count in (tokens, 2 * tokens):
                    name = f"{count}x{width}x{vocab} {dtype} {strategy}"
                    peak = in_a_fresh_process(str(count), str(width), str(vocab), dtype, strategy)
                    figures[name] = asdict(peak)
                    print(f"{name:50s} {format_bytes(peak.above_bytes)} of {format_bytes(peak.peak_bytes)}", flush=True)
    print(write_result("vocab_memory", {"bound_bytes": BOUND_BYTES, "tile_bytes": TILE_BYTES, **figures}, seed=SEED))


if __name__ == "__main__":
    main()
