"""What a processor multiplies is read from the kernel, without torch, and is what torch then does."""

import platform

import pytest
import torch

from planish.price import processor


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch asks other processors in other ways")
def test_torch_has_products_for_the_same_dtypes():
    assert (processor.product_dtype("bfloat16") == "bfloat16") == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert (processor.product_dtype("float16") == "float16") == torch.ops.mkldnn._is_mkldnn_fp16_supported()


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        ({"avx2", "fma"}, ("float32", "float32")),
        ({"avx512bw", "avx512dq", "avx512vl"}, ("bfloat16", "float32")),
        ({"avx512bw", "avx512dq", "avx512vl", "avx512_fp16"}, ("bfloat16", "float16")),
        ({"bf16", "sve"}, ("bfloat16", "float32")),
    ],
)
def test_narrow_numbers_are_raised_without_instructions(monkeypatch, instructions, expected):
    monkeypatch.setattr(processor, "instruction_sets", lambda: frozenset(instructions))
    assert (processor.product_dtype("bfloat16"), processor.product_dtype("float16")) == expected
    assert [processor.product_dtype(each) for each in ("float32", "float64")] == ["float32", "float64"]
