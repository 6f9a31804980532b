"""The process meter: what the operating system, and on CUDA the allocator, say a run holds and held at most."""

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterReading:
    """Bytes at one moment; the peaks are those since the last reset.

    Attributes:
        resident_bytes: Resident memory of the process now (VmRSS).
        resident_peak_bytes: Its most (VmHWM).
        device_bytes: Bytes of live CUDA tensors now; None on CPU.
        device_peak_bytes: Their most; None on CPU.
        device_reserved_peak_bytes: The most that the CUDA allocator took from the device; None on CPU.
    """

    resident_bytes: int
    resident_peak_bytes: int
    device_bytes: int | None = None
    device_peak_bytes: int | None = None
    device_reserved_peak_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The peak that a budget bounds: of the tensors on a CUDA device, of the whole process on CPU."""
        return self.resident_peak_bytes if self.device_peak_bytes is None else self.device_peak_bytes


class ProcessMeter:
    """Reads the memory of this process, and of `device` if it is a CUDA device, as the system counts it.

    Attributes:
        baseline_bytes: Resident bytes when the meter was made: interpreter, libraries, whatever was there before.
        resettable: Whether `reset` starts a new resident peak; if the kernel refuses that (or there is no /proc),
            `resident_peak_bytes` is the most since the process began.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._cuda = device if device is not None and device.type == "cuda" else None
        self.baseline_bytes = _resident()[0]
        self.resettable = _reset_resident_peak()

    def reset(self) -> None:
        """Start new peaks."""
        if self.resettable:
            _reset_resident_peak()
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)

    def read(self) -> MeterReading:
        """Return what is held now, and was at most since the last reset."""
        now_bytes, peak_bytes = _resident()
        if self._cuda is None:
            return MeterReading(resident_bytes=now_bytes, resident_peak_bytes=peak_bytes)
        return MeterReading(
            resident_bytes=now_bytes,
            resident_peak_bytes=peak_bytes,
            device_bytes=torch.cuda.memory_allocated(self._cuda),
            device_peak_bytes=torch.cuda.max_memory_allocated(self._cuda),
            device_reserved_peak_bytes=torch.cuda.max_memory_reserved(self._cuda),
        )


def _resident() -> tuple[int, int]:
    """Return the resident bytes of this process now and at most."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        unit = 1 if sys.platform == "darwin" else 2**10
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return peak_bytes, peak_bytes
    fields = dict(line.split(":", 1) for line in lines)
    now_bytes, peak_bytes = (int(fields[name].split()[0]) * 2**10 for name in ("VmRSS", "VmHWM"))
    return now_bytes, peak_bytes


def _reset_resident_peak() -> bool:
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return False
    return True
