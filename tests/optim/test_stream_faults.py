"""What StreamAdamW refuses, by name and before a number changes; and disks that fail in the middle of a step."""

import errno
import gc
import os
import threading

import pytest
import torch
from torch import nn

from planish.errors import UsageError, WorldFailed
from planish.optim import StreamAdamW

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def take(optimizer, params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()


def weight(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, dtype=dtype, device=device, requires_grad=True)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: StreamAdamW([weight(4)], math="numpy"), '`math` must be "torch" or "fused", got \'numpy\''),
    (lambda: StreamAdamW([weight(4)], engine="gpu"), '`engine` must be "auto", "cpu", "device" or "hybrid"'),
    (lambda: StreamAdamW([weight(4)], cpu_share=0.5), '`cpu_share` is for `engine` = "hybrid", got \'auto\''),
    (lambda: StreamAdamW([weight(4)], engine="hybrid", cpu_share=2.0), r"`cpu_share` must be in \[0, 1\], got 2.0"),
    (lambda: StreamAdamW([weight(4)], slots=0), "`slots` must be 1 or more, got 0"),
    (lambda: StreamAdamW([weight(4)], chunk_bytes=4096), r"`chunk_bytes` \(4096\) must .* 8192 is the least"),
    (lambda: StreamAdamW([weight(4)], lr=-1.0), "`lr` of group 0 must be 0 or more, got -1.0"),
    (lambda: StreamAdamW([weight(4)], betas=(0.9, 1.0)), r"`betas` of group 0 must be in \[0, 1\), got \(0.9, 1.0\)"),
    (lambda: StreamAdamW([{"params": [weight(4)], "capturable": True}]), "`capturable` of group 0 is True"),
    (lambda: StreamAdamW([{"params": [weight(4)], "differentiable": True}]), "`differentiable` of group 0 is True"),
    (lambda: StreamAdamW([{"params": [weight(4)], "fused": True}]), "`fused` of group 0 is True.*set `math`"),
    (lambda: StreamAdamW([weight(4, dtype=torch.complex64)]), "parameter 0 of group 0 has numbers of torch.complex64"),
    (lambda: StreamAdamW([torch.ones(8, 8)[:, ::2].requires_grad_()]), "parameter 0 of group 0 do not lie side"),
    (lambda: StreamAdamW([weight(4), weight(4, device="meta")]), "must be on one device, got cpu, meta"),
    (lambda: StreamAdamW([weight(4096)], disk=2**20), "`disk` needs `folder`"),
    (lambda: StreamAdamW([weight(4096)], host=2**14, disk=2**12, chunk_bytes=2**13),
     r'32.0 KiB, 12.0 KiB more than .* disk = "16KiB" would do'),
    (lambda: StreamAdamW([weight(4096)], host=2**13), 'disk = "32KiB" would do'),
])  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_disk_without_the_space_is_refused_at_launch(tmp_path):
    with pytest.raises(UsageError, match=r"does not fit in .*free some or ask for less"):
        StreamAdamW([torch.empty(2**45, device="meta").requires_grad_()], disk=2**60, folder=tmp_path)


def test_sparse_gradients_are_refused_and_nothing_changes(far):
    embedding, linear = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 8)
    optimizer = StreamAdamW([*linear.parameters(), *embedding.parameters()], **far["disk"])
    before = linear.weight.detach().clone()
    linear(embedding(torch.arange(5))).sum().backward()
    with pytest.raises(ValueError, match="is sparse; StreamAdamW takes dense ones"):
        optimizer.step()
    assert torch.equal(linear.weight, before)
    embedding.weight.grad = embedding.weight.grad.to_dense()
    optimizer.step()
    assert not torch.equal(linear.weight, before)


def test_a_parameter_that_was_frozen_at_launch_has_no_room(far):
    frozen, trained = torch.ones(4, 4), weight(4, 4)
    optimizer = StreamAdamW([frozen, trained], **far["host"])
    frozen.requires_grad_().grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match=r"a parameter \[4, 4\] has a gradient and was frozen"):
        optimizer.step()


def test_a_group_that_is_refused_is_not_there_afterwards(far):
    optimizer = StreamAdamW([weight(64)], host=2**14, chunk_bytes=2**14)
    with pytest.raises(UsageError, match="would do"):
        optimizer.add_param_group({"params": [weight(2**14)]})
    assert len(optimizer.param_groups) == 1


@pytest.fixture
def failing(monkeypatch):
    """Return (function of `os`, calls that still work) -> the next one of the disk's fails for want of space."""

    def arm(name, left):
        real = getattr(os, name)
        calls = iter(range(left))

        def maybe(*args):
            if next(calls, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args)

        monkeypatch.setattr(f"planish.memory.far_disk.os.{name}", maybe)
        return lambda: monkeypatch.setattr(f"planish.memory.far_disk.os.{name}", real)

    return arm


@pytest.mark.parametrize("left", [0, 1, 3, 7])
def test_a_step_whose_reads_fail_is_refused_or_never_began(drawn, far, failing, left):
    """After it nothing is handed out that is half; a checkpoint in both, and the run goes on as if nothing was."""
    ours, theirs = drawn.parameters(), drawn.parameters()
    optimizer = StreamAdamW(ours, **OPTIONS, **far["disk"])
    reference = torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    take(optimizer, ours, drawn.gradients(1))
    take(reference, theirs, drawn.gradients(1))
    saved, weights = optimizer.state_dict(), [param.detach().clone() for param in ours]
    mend = failing("preadv", left)
    with pytest.raises(WorldFailed, match="No space left on device; the last checkpoint is intact"):
        take(optimizer, ours, drawn.gradients(2))
    mend()
    changed = any(not torch.equal(param, before) for param, before in zip(ours, weights, strict=True))
    if changed:
        for refused in (optimizer.step, optimizer.state_dict, optimizer.state[ours[0]]["exp_avg"].read):
            with pytest.raises(WorldFailed, match="weights and state are of two steps"):
                refused()
        with torch.no_grad():
            for param, before in zip(ours, weights, strict=True):
                param.copy_(before)
        optimizer.load_state_dict(saved)
    assert changed == (left > 1)  # the first chunk takes two reads
    for step in (2, 3):
        take(optimizer, ours, drawn.gradients(step))
        take(reference, theirs, drawn.gradients(step))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_write_back_that_fails_is_told_by_whoever_waits(drawn, far, failing):
    params = drawn.parameters()
    optimizer = StreamAdamW(params, **OPTIONS, **far["disk"])
    take(optimizer, params, drawn.gradients(1))
    optimizer.settle()
    saved = optimizer.state_dict()
    mend = failing("pwrite", 6)

    def step_and_settle():
        take(optimizer, params, drawn.gradients(2))
        optimizer.settle()

    with pytest.raises(WorldFailed, match="No space left on device"):
        step_and_settle()
    mend()
    with pytest.raises(WorldFailed):
        optimizer.state_dict()
    with pytest.raises(WorldFailed):
        take(optimizer, params, drawn.gradients(3))
    optimizer.load_state_dict(saved)
    for index, param in enumerate(params):
        assert torch.equal(optimizer.state[param]["exp_avg"].read(), saved["state"][index]["exp_avg"])


def test_an_interrupt_between_chunks_is_no_half_step(drawn, far, monkeypatch):
    params = drawn.parameters()
    optimizer = StreamAdamW(params, **OPTIONS, **far["both"])
    chunks = iter(range(2))
    real = optimizer._work

    def interrupted(*args, **kwargs):
        real(*args, **kwargs)
        if next(chunks, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(optimizer, "_work", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take(optimizer, params, drawn.gradients(1))
    with pytest.raises(WorldFailed, match="of two steps"):
        optimizer.step()


def test_a_backward_pass_that_fails_after_a_chunk_was_updated_is_refused(far):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = StreamAdamW(model.parameters(), **far["host"])

    def fail(_):
        raise RuntimeError("out of luck")

    for at, half in ((5, False), (0, True)):
        handle = model[at].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="out of luck"), optimizer.update_in_backward():
            model(torch.randn(8, 64)).sum().backward()
        handle.remove()
        optimizer.zero_grad()
        if half:
            with pytest.raises(WorldFailed, match="of two steps"):
                optimizer.step()
        else:
            optimizer.step()


def test_threads_end_with_the_optimizer(drawn, far):
    gc.collect()
    before = threading.active_count()
    params = drawn.parameters()
    optimizer = StreamAdamW(params, **far["disk"])
    take(optimizer, params, drawn.gradients(1))
    assert threading.active_count() == before + 2
    del optimizer
    gc.collect()
    assert threading.active_count() == before
