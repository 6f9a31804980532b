"""The head's kernels for CUDA devices, where there is none: in Triton's interpreter, and compiled ahead of time."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planish.kernels.vocab import head_kernels


def test_there_are_none_for_a_cpu():
    assert head_kernels(torch.device("cpu")) is None


def test_in_the_interpreter_over_ragged_sizes():
    pytest.importorskip("triton", reason="the `triton` extra is not installed")
    script = Path(__file__).with_name("process_vocab_triton.py")
    command = ["env", "TRITON_INTERPRET=1", sys.executable, str(script)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "checked\n"


def test_they_compile_for_hopper_without_libdevice():
    pytest.importorskip("triton", reason="the `triton` extra is not installed")
    script = Path(__file__).with_name("process_vocab_compile.py")
    assert (
        subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout == "compiled\n"
    )
