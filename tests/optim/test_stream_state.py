"""Streamed state in torch's layout: into plain AdamW and back mid-run, piece by piece, refused where it is foreign."""

import copy

import pytest
import torch

from planish.memory.ledger import Ledger
from planish.optim import StreamAdamW
from planish.peaks.optim.adamw import AdamW

OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PLACES = ["host", "disk", "both", "through slots", "half in place"]


def equal(ones, others):
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def take(optimizer, params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_run_goes_on_in_torch_and_comes_back_bit_for_bit(drawn, far, place, at):
    ours, theirs = drawn.parameters(), drawn.parameters()
    optimizer = StreamAdamW(ours, amsgrad=True, **OPTIONS, **far[place])
    reference = torch.optim.AdamW(theirs, amsgrad=True, fused=True, **OPTIONS)
    for step in range(1, at + 1):
        take(optimizer, ours, drawn.gradients(step))
    between = torch.optim.AdamW(ours, amsgrad=True, fused=True, **OPTIONS)
    between.load_state_dict(optimizer.state_dict())
    take(between, ours, drawn.gradients(at + 1))
    again = StreamAdamW(ours, lr=1.0, amsgrad=True, **far[place])
    again.load_state_dict(between.state_dict())
    for step in range(at + 2, at + 5):
        take(again, ours, drawn.gradients(step))
    for step in range(1, at + 5):
        take(reference, theirs, drawn.gradients(step))
    assert equal(ours, theirs)
    assert again.param_groups[0]["lr"] == OPTIONS["lr"]


@pytest.mark.parametrize("place", PLACES)
def test_a_bf16_run_goes_on_in_planish_adamw_and_comes_back(drawn, far, place, tmp_path):
    """Moments and masters stay fp32 on the way, through a file that holds no code."""
    ours, theirs = drawn.parameters(torch.bfloat16), drawn.parameters(torch.bfloat16)
    optimizer, reference = StreamAdamW(ours, **OPTIONS, **far[place]), AdamW(theirs, **OPTIONS)
    for step in range(1, 3):
        take(optimizer, ours, drawn.gradients(step, torch.bfloat16))
    between = AdamW(ours, **OPTIONS)
    between.load_state_dict(optimizer.state_dict())
    take(between, ours, drawn.gradients(3, torch.bfloat16))
    torch.save(between.state_dict(), tmp_path / "saved.pt")
    again = StreamAdamW(ours, **far[place])
    again.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True, mmap=True))
    assert all(again.state[param]["exp_avg"].dtype == torch.float32 for param in ours)
    take(again, ours, drawn.gradients(4, torch.bfloat16))
    for step in range(1, 5):
        take(reference, theirs, drawn.gradients(step, torch.bfloat16))
    assert equal(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(again.state[one][name].read(), reference.state[other][name])


def test_moments_that_torch_kept_in_bf16_are_widened_and_masters_are_the_weights(drawn, far):
    params = drawn.parameters(torch.bfloat16)
    plain = torch.optim.AdamW(params, **OPTIONS)
    take(plain, params, drawn.gradients(1, torch.bfloat16))
    optimizer = StreamAdamW(params, **far["disk"])
    optimizer.load_state_dict(plain.state_dict())
    for param in params:
        assert torch.equal(optimizer.state[param]["exp_avg"].read(), plain.state[param]["exp_avg"].float())
        assert torch.equal(optimizer.state[param]["master"].read(), param.detach().float())


def test_what_was_saved_before_the_first_step_is_loaded_over_later_state(drawn, far):
    """Parameters without saved state begin anew."""
    ours, theirs = drawn.parameters(), drawn.parameters()
    optimizer = StreamAdamW(ours, **OPTIONS, **far["disk"])
    empty = torch.optim.AdamW(drawn.parameters(), fused=True, **OPTIONS).state_dict()
    take(optimizer, ours, drawn.gradients(9))
    with torch.no_grad():
        for param, before in zip(ours, drawn.parameters(), strict=True):
            param.copy_(before)
    optimizer.load_state_dict(empty)
    reference = torch.optim.AdamW(theirs, fused=True, **OPTIONS)
    take(optimizer, ours, drawn.gradients(1))
    take(reference, theirs, drawn.gradients(1))
    assert equal(ours, theirs)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("steps", [0, 2])
def test_pieces_are_the_tensor_and_fill_takes_it_back(drawn, far, place, steps):
    """Through chunks that were never written too, and pieces that begin anywhere in a page."""
    params = drawn.parameters(torch.bfloat16)
    optimizer = StreamAdamW(params, **far[place])
    for step in range(1, steps + 1):
        take(optimizer, params, drawn.gradients(step, torch.bfloat16))
    other = StreamAdamW(params, **far[place])
    for index, param in enumerate(params):
        for name, each in optimizer.state[param].items():
            if name != "step":
                whole = each.read()
                pieces = [piece.clone() for piece in each.pieces()]
                assert whole.shape == each.shape == each.stand_in().shape
                assert torch.equal(torch.cat([*pieces, torch.empty(0)]), whole.flatten())
                assert whole.count_nonzero() == 0 or steps or name == "master"
                drawn_anew = drawn.tensor(whole.shape, 7 * index)
                other.state[param][name].fill(drawn_anew)
                assert torch.equal(other.state[param][name].read(), drawn_anew)
    assert torch.equal(other.state[params[0]]["exp_avg_sq"].read(), drawn.tensor(params[0].shape, 0))


def test_a_tensor_whose_dimensions_are_turned_is_saved_in_its_shape(far):
    param = torch.randn(40, 60).t().requires_grad_()
    plain = param.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    optimizer, reference = (
        StreamAdamW([param], **OPTIONS, **far["disk"]),
        torch.optim.AdamW([plain], fused=True, **OPTIONS),
    )
    for step in range(3):
        grad = torch.randn(60, 40, generator=torch.Generator().manual_seed(step))
        param.grad, plain.grad = grad, grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(param, plain)
    (pieces,) = optimizer.state[param]["exp_avg"].pieces()
    assert torch.equal(pieces, reference.state[plain]["exp_avg"].flatten())
    optimizer.load_state_dict(reference.state_dict())
    assert torch.equal(optimizer.state[param]["exp_avg"].read(), reference.state[plain]["exp_avg"])


def test_saving_piece_by_piece_and_loading_hold_nothing_beside_the_slots(drawn, far):
    params = drawn.parameters()
    saved = torch.optim.AdamW(params, **OPTIONS)
    take(saved, params, drawn.gradients(1))
    saved = saved.state_dict()
    with Ledger() as ledger:
        optimizer = StreamAdamW(params, **far["disk"])
        steps = 4 * len(params)
        before = ledger.live_bytes
        assert before == steps + far["disk"]["slots"] * far["disk"]["chunk_bytes"] + 2 * 2**20 + 4096
        ledger.start_step(1)
        with ledger.phase("resume"):
            optimizer.load_state_dict(saved)
            for param in params:
                for name in ("exp_avg", "exp_avg_sq"):
                    assert sum(piece.numel() for piece in optimizer.state[param][name].pieces()) == param.numel()
        assert ledger.peak_bytes["resume"] == before


@pytest.mark.parametrize(("change", "message"), [
    (lambda saved: saved["param_groups"][0]["params"].pop(), "other parameter groups"),
    (lambda saved: saved["state"][0].pop("exp_avg"), "parameter 0 has .* another optimizer's"),
    (lambda saved: saved["state"][0].update(momentum_buffer=torch.ones(1)), "parameter 0 has .* another optimizer's"),
    (lambda saved: saved["state"][2].update(exp_avg=torch.ones(5)), r"has `exp_avg` \[5\] .* another model"),
    (lambda saved: saved["param_groups"][0].update(amsgrad=True), "`amsgrad` of group 0 is False here and True"),
    (lambda saved: saved["param_groups"][0].update(decoupled_weight_decay=False), "is Adam's"),
])  # fmt: skip
def test_a_foreign_state_is_refused_and_changes_nothing(drawn, far, change, message):
    params = drawn.parameters()
    optimizer = StreamAdamW(params, **OPTIONS, **far["disk"])
    take(optimizer, params, drawn.gradients(1))
    before = optimizer.state_dict()
    foreign = copy.deepcopy(before)
    change(foreign)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(foreign)
    after = optimizer.state_dict()
    assert all(equal(before["state"][index].values(), after["state"][index].values()) for index in range(len(params)))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.75, 1.0])
def test_the_split_of_a_hybrid_is_measured_once_and_saved(drawn, far, share):
    """Chunks that stay are spread evenly; a resumed run splits as the saved one, whatever it would measure itself."""
    ours, theirs = drawn.parameters(torch.bfloat16), drawn.parameters(torch.bfloat16)
    small = {"chunk_bytes": far["host"]["chunk_bytes"], "slots": 2}
    measured = StreamAdamW(ours, engine="hybrid", **OPTIONS, **small)
    assert 0 < measured.cpu_share < 1
    first = StreamAdamW(ours, engine="hybrid", cpu_share=share, **OPTIONS, **small)
    staying = [chunk.resident is not None for chunk in first._shelves[0].chunks]
    assert sum(staying) == int(share * len(staying))
    take(first, ours, drawn.gradients(1, torch.bfloat16))
    measured.load_state_dict(first.state_dict())
    assert measured.cpu_share == share
    assert [chunk.resident is not None for chunk in measured._shelves[0].chunks] == staying
    reference = AdamW(theirs, **OPTIONS)
    take(measured, ours, drawn.gradients(2, torch.bfloat16))
    for step in (1, 2):
        take(reference, theirs, drawn.gradients(step, torch.bfloat16))
    assert equal(ours, theirs)
