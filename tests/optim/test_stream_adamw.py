"""StreamAdamW against torch's AdamW, bit for bit: every chunk and slot count, place of state, dtype and option."""

import itertools

import pytest
import torch
from torch import nn

from planish.optim import StreamAdamW

PLACES = ["host", "disk", "both", "through slots", "half in place"]
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def equal(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def same_state(ours, optimizer, theirs, reference):
    for one, other in zip(ours, theirs, strict=True):
        saved = reference.state.get(other, {})
        for name, tensor in saved.items():
            own = optimizer.state[one][name]
            assert torch.equal(own if name == "step" else own.read(), tensor), name


def take(optimizer, params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("math", ["torch", "fused"])
@pytest.mark.parametrize("more", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
def test_fp32_is_bitwise_torch(drawn, far, place, math, more):
    ours, theirs = drawn.parameters(), drawn.parameters()
    optimizer = StreamAdamW(ours, math=math, **OPTIONS, **more, **far[place])
    reference = torch.optim.AdamW(theirs, fused=math == "fused", **OPTIONS, **more)
    for step in range(1, 5):
        take(optimizer, ours, drawn.gradients(step))
        take(reference, theirs, drawn.gradients(step))
    assert len(optimizer.chunks) > 3
    assert equal(ours, theirs)
    same_state(ours, optimizer, theirs, reference)


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("math", ["torch", "fused"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_without_a_master_are_bitwise_torch(drawn, far, place, math, dtype):
    ours, theirs = drawn.parameters(dtype), drawn.parameters(dtype)
    optimizer = StreamAdamW(ours, math=math, master=False, **OPTIONS, **far[place])
    reference = torch.optim.AdamW(theirs, fused=math == "fused", **OPTIONS)
    for step in range(1, 4):
        take(optimizer, ours, drawn.gradients(step, dtype))
        take(reference, theirs, drawn.gradients(step, dtype))
    assert equal(ours, theirs)
    same_state(ours, optimizer, theirs, reference)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("math", ["torch", "fused"])
def test_bf16_follows_fp32_masters_bit_for_bit(drawn, far, place, math):
    ours = drawn.parameters(torch.bfloat16)
    masters = [param.detach().float().requires_grad_() for param in ours]
    optimizer = StreamAdamW(ours, math=math, **OPTIONS, **far[place])
    reference = torch.optim.AdamW(masters, fused=math == "fused", **OPTIONS)
    for step in range(1, 5):
        grads = drawn.gradients(step, torch.bfloat16)
        take(optimizer, ours, grads)
        take(reference, masters, [grad.float() for grad in grads])
        assert equal([param.grad for param in ours], grads)
    for param, master in zip(ours, masters, strict=True):
        assert torch.equal(param, master.to(torch.bfloat16))
        assert torch.equal(optimizer.state[param]["master"].read(), master)
    same_state(ours, optimizer, masters, reference)


def test_the_loop_and_foreach_agree(drawn):
    """So that "torch" stands for both."""
    ones, others = drawn.parameters(), drawn.parameters()
    loop, foreach = (
        torch.optim.AdamW(params, foreach=kind, **OPTIONS) for params, kind in ((ones, False), (others, True))
    )
    for step in range(1, 4):
        take(loop, ones, drawn.gradients(step))
        take(foreach, others, drawn.gradients(step))
    assert equal(ones, others)


@pytest.mark.parametrize(("chunk_kib", "slots"), [
    (8, 1), (8, 4), (24, 2), (40, 3), (1024, 1), *(
        pytest.param(kib, slots, marks=pytest.mark.slow)
        for kib, slots in itertools.product((8, 12, 20, 28, 44, 60, 100), (1, 2, 3, 5))
    ),
])  # fmt: skip
def test_no_chunk_and_no_slot_count_changes_a_bit(drawn, far, chunk_kib, slots):
    ours, theirs = drawn.parameters(), drawn.parameters()
    options = far["disk"] | {"chunk_bytes": chunk_kib * 2**10, "slots": slots}
    optimizer, reference = StreamAdamW(ours, **OPTIONS, **options), torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    for step in range(1, 4):
        take(optimizer, ours, drawn.gradients(step))
        take(reference, theirs, drawn.gradients(step))
    assert equal(ours, theirs)
    same_state(ours, optimizer, theirs, reference)


class Tied(nn.Module):
    """An embedding that is the head too, a frozen layer, one that is not always used, and one that is transposed."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(70, 33)
        self.frozen = nn.Linear(33, 33)
        self.frozen.requires_grad_(False)
        self.idle = nn.Linear(33, 33)
        self.turned = nn.Parameter(torch.randn(33, 40).t().contiguous().t() * 0.1)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids, use_idle):
        hidden = self.frozen(self.embedding(ids))
        hidden = self.idle(hidden) if use_idle else hidden
        hidden = torch.relu(hidden @ self.turned) @ self.turned.t() * self.scale
        return nn.functional.cross_entropy(hidden @ self.embedding.weight.t(), ids.roll(-1))


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize(("microbatches", "clip"), [(1, None), (2, 0.5), (3, 0.5), (3, None)])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_model_trains_bitwise_with_accumulation_and_clipping(far, place, microbatches, clip, in_backward):
    """With what is tied, frozen, transposed, of no dimension, and without a gradient in some steps."""
    if in_backward and clip:
        pytest.skip("no gradient waits for the norm")

    def train(make, stream):
        torch.manual_seed(0)
        model = Tied()
        optimizer = make([
            {"params": [each for each in model.parameters() if each.ndim >= 2]},
            {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0, "lr": 1e-2},
        ])  # fmt: skip
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=4)
        for step in range(4):
            for number in range(microbatches):
                ids = torch.randint(0, 70, (24,), generator=torch.Generator().manual_seed(10 * step + number))
                loss = model(ids, use_idle=step % 2 == 1 and number == 0)
                if stream and in_backward and number == microbatches - 1:
                    with optimizer.update_in_backward():
                        loss.backward()
                else:
                    loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()  # finds no gradient where they were taken in backward
            optimizer.zero_grad()
            schedule.step()
        return model, optimizer

    ours, optimizer = train(lambda groups: StreamAdamW(groups, **OPTIONS, **far[place]), True)
    theirs, reference = train(lambda groups: torch.optim.AdamW(groups, fused=True, **OPTIONS), False)
    assert equal(ours.parameters(), theirs.parameters())
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        for name, tensor in reference.state.get(other, {}).items():
            own = optimizer.state[one][name]
            assert torch.equal(own if name == "step" else own.read(), tensor), name


def test_gradients_are_free_once_backward_is_over(far):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = StreamAdamW(model.parameters(), **far["disk"])
    alive = []
    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(each.grad is not None for each in model.parameters()))
        )
    with optimizer.update_in_backward():
        model(torch.randn(8, 64)).sum().backward()
    assert all(each.grad is None for each in model.parameters())
    assert max(alive) < 10  # of twelve: chunks hold less than the model, and two wait in slots
    assert all(state["step"] == 1 for state in optimizer.state.values())


@pytest.mark.parametrize("place", ["host", "disk"])
def test_the_gradient_scaler_skips_what_overflowed(drawn, far, place):
    ours, theirs = drawn.parameters(), drawn.parameters()
    optimizer = StreamAdamW(ours, math="torch", **OPTIONS, **far[place])
    reference = torch.optim.AdamW(theirs, **OPTIONS)
    for params, each in ((ours, optimizer), (theirs, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(1, 5):
            scaler.scale(torch.ones(()))
            for param, grad in zip(params, drawn.gradients(step), strict=True):
                param.grad = grad * scaler.get_scale()
            if step == 2:
                params[0].grad[0, 0] = torch.inf
            scaler.step(each)
            scaler.update()
    assert equal(ours, theirs)
    assert optimizer.state[ours[0]]["step"] == 3


def test_a_closure_and_a_learning_rate_in_a_tensor_work_as_in_torch(drawn):
    ours, theirs = drawn.parameters(), drawn.parameters()
    options = OPTIONS | {"lr": torch.tensor(3e-3)}
    optimizer, reference = StreamAdamW(ours, **options), torch.optim.AdamW(theirs, fused=True, **options)
    for params, each in ((ours, optimizer), (theirs, reference)):

        def closure(params=params, each=each):
            each.zero_grad()
            loss = sum(param.square().sum() for param in params)
            loss.backward()
            return loss

        first = each.step(closure)
        assert each.step(closure) < first
    assert equal(ours, theirs)


def test_groups_that_come_later_get_memory_of_their_own(drawn, far):
    ours, theirs = drawn.parameters(), drawn.parameters(torch.bfloat16)
    theirs = [param.detach().float().requires_grad_() for param in theirs]
    ours[3:] = [param.detach().bfloat16().requires_grad_() for param in ours[3:]]
    theirs[:3] = [param.detach().clone().requires_grad_() for param in ours[:3]]
    optimizer = StreamAdamW(ours[:3], **OPTIONS, **far["both"])
    reference = torch.optim.AdamW(theirs[:3], fused=True, **OPTIONS)
    for step in range(1, 5):
        if step == 2:
            for each, params in ((optimizer, ours), (reference, theirs)):
                each.add_param_group({"params": params[3:], "lr": 1e-2})
        for one, other, grad in zip(ours, theirs, drawn.gradients(step, torch.bfloat16), strict=True):
            one.grad, other.grad = grad.to(one.dtype), grad.float()
        optimizer.step()
        reference.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other.to(one.dtype))


def test_parameters_without_a_gradient_keep_their_count(drawn, far):
    ours, theirs = drawn.parameters(), drawn.parameters()
    optimizer, reference = StreamAdamW(ours, **OPTIONS, **far["disk"]), torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    for step in range(1, 6):
        for index, (one, other, grad) in enumerate(zip(ours, theirs, drawn.gradients(step), strict=True)):
            one.grad = other.grad = None
            if (index + step) % 3:
                one.grad, other.grad = grad.clone(), grad.clone()
        optimizer.step()
        reference.step()
    assert equal(ours, theirs)
    same_state(ours, optimizer, theirs, reference)
