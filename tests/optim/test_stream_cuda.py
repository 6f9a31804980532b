"""On a CUDA device: state in page-locked host memory, through streams, bit for bit torch's fused AdamW there."""

import pytest
import torch

from planish.optim import StreamAdamW

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def parameters(drawn, dtype):
    return [param.detach().to("cuda").requires_grad_() for param in drawn.parameters(dtype)]


def take(optimizer, params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to("cuda")
    optimizer.step()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("disk", [False, True])
def test_the_device_engine_is_bitwise_torch_fused(drawn, tmp_path, slots, disk):
    ours, theirs = parameters(drawn, torch.float32), parameters(drawn, torch.float32)
    place = {"host": 2**15, "disk": 2**21, "folder": tmp_path} if disk else {}
    optimizer = StreamAdamW(ours, chunk_bytes=2**14, slots=slots, **OPTIONS, **place)
    reference = torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    for step in range(1, 7):
        take(optimizer, ours, drawn.gradients(step))
        take(reference, theirs, drawn.gradients(step))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"].read(), reference.state[other]["exp_avg"].cpu())


@pytest.mark.parametrize("engine", ["cpu", "hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cpu_s_share_is_bitwise_torch_fused_on_a_cpu(drawn, engine, dtype):
    """With a share of one: every chunk where it lies; gradients come, weights go."""
    ours = parameters(drawn, dtype)
    theirs = [param.detach().cpu().float().requires_grad_() for param in ours]
    share = {"cpu_share": 1.0} if engine == "hybrid" else {}
    optimizer = StreamAdamW(ours, engine=engine, chunk_bytes=2**14, **OPTIONS, **share)
    reference = torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    for step in range(1, 5):
        grads = drawn.gradients(step, dtype)
        take(optimizer, ours, grads)
        for param, grad in zip(theirs, grads, strict=True):
            param.grad = grad.float()
        reference.step()
    assert all(torch.equal(one.cpu(), other.to(dtype)) for one, other in zip(ours, theirs, strict=True))
