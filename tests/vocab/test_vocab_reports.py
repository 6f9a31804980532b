"""Faults that users reported of other implementations, each tried on ours; named after the report."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from forks import run_in_child
from planish.peaks.vocab import reference
from planish.peaks.vocab.losses import linear_cross_entropy, linear_logprob
from planish.peaks.vocab.plain import plain_cross_entropy

STRATEGIES = ("gradients-in-forward", "recompute")
both_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def dense(head, **how):
    """Return the mean loss of full logits in float64."""
    y = reference.logits(head.hidden, head.weight, head.bias, **how)
    return F.cross_entropy(y, head.target)


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


@both_strategies
@pytest.mark.parametrize("width", [512, 1024, 4096])
def test_apple_52_bias_counts_once_in_wide_heads(draw_head, strategy, width):
    head = draw_head(12, width, 200, bias=True, scale=0.1)
    torch.testing.assert_close(
        linear_cross_entropy(*head.operands, bias=head.bias, strategy=strategy), dense(head), rtol=1e-12, atol=1e-12
    )


@both_strategies
def test_apple_14_weight_gradient_of_many_bf16_tokens(draw_head, strategy):
    head = draw_head(8192, 128, 32, dtype=torch.bfloat16, frozen=("hidden",))
    [ours] = head.gradients(linear_cross_entropy(*head.operands, strategy=strategy))
    [plain] = head.gradients(plain_cross_entropy(*head.operands, reduction="mean"))
    [exact] = head.gradients(dense(head))
    assert relative_error(ours, exact) <= 2 * relative_error(plain, exact)


def test_apple_31_sharded_weight(draw_head):
    head = draw_head(4, 6, 10, dtype=torch.float32)

    def of_a_group():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        weight = DTensor.from_local(head.weight.detach(), DeviceMesh("cpu", [0]), [Shard(0)])
        with pytest.raises(TypeError, match="`weight` must be a plain tensor, got DTensor"):
            linear_cross_entropy(head.hidden, weight, head.target)

    run_in_child(of_a_group)  # what is left of a gloo group cannot end in the forks of later tests


def test_liger_968_upstream_of_each_token(draw_head, assert_all_close):
    head = draw_head(8, 10, 15)
    head.target[0] = -100
    upstream = torch.randn(8, dtype=torch.float64)
    ours = linear_cross_entropy(*head.operands, reduction="none")
    theirs = F.cross_entropy(reference.logits(head.hidden, head.weight), head.target, reduction="none")
    assert_all_close(head.gradients((ours * upstream).sum()), head.gradients((theirs * upstream).sum()), 1e-10)


@both_strategies
def test_liger_frozen_hidden_still_trains_the_head(draw_head, assert_all_close, strategy):
    head = draw_head(20, 6, 40, bias=True, frozen=("hidden",))
    ours = linear_cross_entropy(*head.operands, bias=head.bias, strategy=strategy)
    assert_all_close(head.gradients(ours), head.gradients(dense(head)), 1e-10)


@both_strategies
def test_liger_512_weight_gradient_is_as_good_from_many_row_groups_as_from_one(draw_head, strategy):
    head = draw_head(512, 64, 1000, dtype=torch.bfloat16, frozen=("hidden",))
    [exact] = head.gradients(dense(head))
    errors = []
    for tile_bytes in (2**20, 2**26):
        [ours] = head.gradients(linear_cross_entropy(*head.operands, strategy=strategy, tile_bytes=tile_bytes))
        errors.append(relative_error(ours, exact))
    assert errors[0] <= 1.5 * errors[1]


@both_strategies
def test_megatron_7464_smoothing_takes_the_whole_vocabulary_and_survives_large_logits(draw_head, strategy):
    head = draw_head(6, 4, 8, scale=10.0)
    ours = linear_cross_entropy(*head.operands, label_smoothing=0.1, strategy=strategy)
    theirs = F.cross_entropy(reference.logits(head.hidden, head.weight), head.target, label_smoothing=0.1)
    assert ours.isfinite()
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@both_strategies
def test_trl_4612_adapters_on_the_head_are_trained(draw_head, strategy):
    head = draw_head(20, 6, 40, frozen=("hidden", "weight"))
    a = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    b = torch.randn(40, 2, dtype=torch.float64, requires_grad=True)
    ours = linear_cross_entropy(head.hidden, head.weight + b @ a, head.target, strategy=strategy)
    theirs = F.cross_entropy(head.hidden @ (head.weight + b @ a).t(), head.target)
    for mine, other in zip(torch.autograd.grad(ours, (a, b)), torch.autograd.grad(theirs, (a, b)), strict=True):
        assert mine.norm() > 0
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@both_strategies
def test_nemo_rl_2363_tied_weight_sums_both_uses(draw_head, strategy):
    weight = draw_head(1, 6, 40).weight
    ids = torch.arange(39)
    hidden = torch.tanh(F.embedding(ids, weight))
    ours = linear_cross_entropy(hidden, weight, ids + 1, strategy=strategy)
    theirs = F.cross_entropy(torch.tanh(F.embedding(ids, weight)) @ weight.t(), ids + 1)
    [mine], [other] = (torch.autograd.grad(each, weight) for each in (ours, theirs))
    torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@both_strategies
@pytest.mark.parametrize("tokens", [0, 7])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_automodel_3796_nothing_to_learn_is_a_connected_zero(draw_head, strategy, tokens, reduction):
    head = draw_head(tokens, 4, 30, bias=True, ignored=1.1)
    strategy = "auto" if reduction == "none" else strategy
    loss = linear_cross_entropy(
        *head.operands, bias=head.bias, reduction=reduction, strategy=strategy, label_smoothing=0.1, z_loss=0.1
    ).sum()
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(leaf.grad, torch.zeros_like(leaf)) for leaf in head.leaves)


def test_trl_6859_weight_that_is_sharded_away(draw_head):
    head = draw_head(4, 6, 10)
    with pytest.raises(ValueError, match="must be gathered first"):
        linear_cross_entropy(head.hidden, torch.empty(0, dtype=torch.float64), head.target)


def test_unsloth_zoo_708_logits_in_the_place_of_hidden(draw_head):
    head = draw_head(4, 6, 10)
    with pytest.raises(ValueError, match="look like logits"):
        linear_logprob(reference.logits(head.hidden, head.weight), head.weight, head.target)


def test_unsloth_4137_target_on_another_device(draw_head):
    head = draw_head(4, 6, 10)
    with pytest.raises(ValueError, match="`target` is on meta and `weight` on cpu"):
        linear_cross_entropy(head.hidden, head.weight, head.target.to("meta"))


@pytest.mark.parametrize("wrong", [10, 15, -1])
def test_axolotl_2864_class_outside_the_vocabulary(draw_head, wrong):
    head = draw_head(4, 6, 10)
    head.target[2] = wrong
    with pytest.raises(ValueError, match=rf"`target` must be in \[0, 10\) .*got {wrong} at token 2"):
        linear_cross_entropy(*head.operands)


@both_strategies
def test_torch_bf16_loss_is_summed_in_float32(draw_head, strategy):
    head = draw_head(512, 64, 1000, dtype=torch.bfloat16)
    ours = linear_cross_entropy(*head.operands, reduction="sum", strategy=strategy, tile_bytes=2**20)
    assert ours.dtype == torch.float32
    exact = linear_logprob(*head.operands).nll.double().sum()
    assert ours.item() == pytest.approx(exact.item(), rel=1e-6)


def test_torch_rows_of_a_tile_do_not_grow_with_tokens():
    """torch's own chunks take 48.8 GiB of logits at this size; see tests/price for the same over all sizes."""
    from planish.price.vocab import Head, choose_tiling

    head = Head(tokens=2**20, hidden_size=7168, vocab_size=200_000)
    for strategy in ("auto", *STRATEGIES):
        tiling = choose_tiling(head, tile_bytes=2**26, strategy=strategy)
        assert tiling.workspace_bytes(head) <= 2**26


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_pytorch_141639_compiles_without_a_break(draw_head, assert_all_close, reduction):
    head = draw_head(30, 8, 50, ignored=0.3)

    def both(hidden, weight):
        loss = linear_cross_entropy(hidden, weight, head.target, reduction=reduction).sum()
        found = linear_logprob(hidden, weight, head.target, want=("nll", "entropy"), temperature=0.7)
        several = linear_logprob(hidden, weight, head.target.clamp(min=0)[:, None].expand(30, 3))
        return loss + (found.nll - 0.1 * found.entropy).sum() + several.nll.sum()

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(head.hidden, head.weight)
    eager = both(head.hidden, head.weight)
    assert_all_close([compiled, *head.gradients(compiled)], [eager, *head.gradients(eager)], 1e-10)


@both_strategies
def test_arctic_258_evaluation_modes(draw_head, strategy):
    head = draw_head(30, 4, 40, ignored=0.3)
    expected = linear_cross_entropy(*head.operands, strategy=strategy)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = linear_cross_entropy(*head.operands, strategy=strategy)
        assert not loss.requires_grad
        torch.testing.assert_close(loss.clone(), expected.detach(), rtol=1e-12, atol=1e-12)


@both_strategies
def test_trl_5575_scale_and_cap_in_that_order_on_both_paths(draw_head, assert_all_close, strategy):
    head = draw_head(30, 8, 40, scale=8.0)
    how = {"logit_scale": 0.0625, "softcap": 30.0}
    ours, theirs = linear_cross_entropy(*head.operands, strategy=strategy, **how), dense(head, **how)
    assert_all_close([ours, *head.gradients(ours)], [theirs, *head.gradients(theirs)], 1e-10)


@both_strategies
def test_deepspeed_tiled_loss_scales_both_gradients(draw_head, assert_all_close, strategy):
    head = draw_head(30, 8, 40)
    ours, theirs = linear_cross_entropy(*head.operands, strategy=strategy) / 4, dense(head) / 4
    assert_all_close(head.gradients(ours), head.gradients(theirs), 1e-10)


@both_strategies
@pytest.mark.parametrize("masked", [slice(256, 384), slice(0, 1024), slice(1024, 2048), slice(1, 3000)])
def test_apple_whole_blocks_masked_by_the_bias(draw_head, assert_all_close, strategy, masked):
    head = draw_head(10, 8, 3000, bias=True)
    with torch.no_grad():
        head.bias[masked] = -torch.inf
    head.target.fill_(0 if masked.start else 2999)
    ours, theirs = linear_cross_entropy(*head.operands, bias=head.bias, strategy=strategy), dense(head)
    assert_all_close([ours, *head.gradients(ours)], [theirs, *head.gradients(theirs)], 1e-10)


def test_apple_whole_blocks_masked_leave_the_entropy_finite(draw_head):
    head = draw_head(10, 8, 3000, bias=True)
    with torch.no_grad():
        head.bias[500:2900] = -torch.inf
    head.target.fill_(0)
    found = linear_logprob(*head.operands, bias=head.bias, want=("entropy",))
    expected = reference.logprob(reference.logits(head.hidden, head.weight, head.bias), head.target)["entropy"]
    torch.testing.assert_close(found.entropy, expected, rtol=1e-12, atol=1e-12)
    assert all(each.isfinite().all() for each in head.gradients(found.entropy.sum()))
