"""Shards of one vocabulary in one process: every loss and gradient against full logits in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.memory.ledger import Ledger
from planish.peaks.vocab import reference
from planish.peaks.vocab.blocked import Objective
from planish.peaks.vocab.inputs import Options
from planish.peaks.vocab.losses import linear_logprob
from planish.peaks.vocab.plain import plain_cross_entropy
from planish.peaks.vocab.shard import Shard, ShardedHead, shard_ranges
from planish.peaks.vocab.sharded import combine_shards, rescale, s_pass, t_pass, to_tokens
from planish.price.vocab_sharded import (
    rescale_peak_bytes,
    scan_pass,
    scan_peak_bytes,
    sweep_pass,
    sweep_peak_bytes,
    waiting_bytes,
)

SMALLEST_TILE = pytest.mark.filterwarnings("ignore:`tile_bytes`")


def cut(weight, bias, starts):
    """Return the shards of a weight that begin at `starts`."""
    stops = [*starts[1:], len(weight)]
    return [
        Shard(weight=weight[a:b], start=a, vocab_size=len(weight), bias=None if bias is None else bias[a:b])
        for a, b in zip(starts, stops, strict=True)
    ]


def step(shards, hidden, target, upstream, *, barriers, objective, grad_dtype=None, **options):
    """Run one microbatch over all shards as the stages of a pipeline would; return losses, dX, dW and db.

    The losses and `upstream` are those of the valid tokens.
    """
    heads = [ShardedHead(shard=x, objective=objective, options=Options(ignore_index=-100, **options)) for x in shards]
    scans = [s_pass(head, hidden, target, product=barriers == 1) for head in heads]
    names = heads[0].statistics(labelled=True)
    whole = combine_shards(torch.stack([scan.statistics for scan in scans]), names)
    if barriers == 1:
        shares = [rescale(head, scan, whole, upstream) for head, scan in zip(heads, scans, strict=True)]
    weight_grads = [torch.zeros_like(x.weight, dtype=grad_dtype) for x in shards]
    bias_grads = [None if x.bias is None else torch.zeros_like(x.bias) for x in shards]
    made = [
        t_pass(head, scan.tokens, whole, upstream, weight_grad=dw, bias_grad=db, hidden_grad=barriers == 2)
        for head, scan, dw, db in zip(heads, scans, weight_grads, bias_grads, strict=True)
    ]
    if barriers == 2:
        shares = made
    else:
        assert made == [None] * len(shards)
    d_hidden = to_tokens(
        torch.stack(shares).sum(0).to(hidden.dtype), scans[0].tokens.index, num_tokens=hidden[..., 0].numel()
    ).view_as(hidden)
    d_bias = None if shards[0].bias is None else torch.cat(bias_grads)
    return whole.losses(objective), d_hidden, torch.cat(weight_grads), d_bias


@st.composite
def problems(draw):
    """Draw sizes, cuts (uneven, empty, more shards than classes) and settings."""
    vocab = draw(st.sampled_from([1, 3, 7, 50, 2500]))
    num_shards = draw(st.integers(1, 5))
    if draw(st.booleans()):
        starts = [each.start for each in shard_ranges(vocab, num_shards)]
    else:
        starts = [0, *sorted(draw(st.lists(st.integers(0, vocab), min_size=num_shards - 1, max_size=num_shards - 1)))]
    return {
        "tokens": draw(st.sampled_from([0, 1, 5, 37])),
        "vocab": vocab,
        "starts": starts,
        "with_bias": draw(st.booleans()),
        "ignored": draw(st.sampled_from(["none", "some", "all"])),
        "seed": draw(st.integers(0, 2**20)),
        "logits": {
            "softcap": draw(st.sampled_from([None, 2.0])),
            "logit_scale": draw(st.sampled_from([1.0, 0.3])),
        },
        "tile_bytes": draw(st.sampled_from([None, 1])),
        "loss": {
            "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
            "z_loss": draw(st.sampled_from([0.0, 1e-2])),
        },
    }


def draw_tensors(problem, width=6, dtype=torch.float64):
    torch.manual_seed(problem["seed"])
    hidden = torch.randn(problem["tokens"], width, dtype=dtype, requires_grad=True)
    weight = torch.randn(problem["vocab"], width, dtype=dtype, requires_grad=True)
    bias = torch.randn(problem["vocab"], dtype=dtype, requires_grad=True) if problem["with_bias"] else None
    target = torch.randint(0, problem["vocab"], (problem["tokens"],))
    if problem["ignored"] != "none":
        target[:: 1 if problem["ignored"] == "all" else 3] = -100
    return hidden, weight, bias, target


@SMALLEST_TILE
@pytest.mark.parametrize("barriers", [1, 2])
@settings(deadline=None, max_examples=80)
@given(problem=problems())
def test_loss_and_gradients_equal_full_logits(barriers, problem):
    hidden, weight, bias, target = draw_tensors(problem)
    valid = target != -100
    upstream = torch.randn(int(valid.sum()), dtype=torch.float64)
    logits = reference.logits(hidden, weight, bias, **problem["logits"])
    losses = reference.cross_entropy(logits, target, **problem["loss"])[valid]
    wanted = torch.autograd.grad((losses * upstream).sum(), [hidden, weight] + ([] if bias is None else [bias]))
    found = step(
        cut(weight, bias, problem["starts"]),
        hidden,
        target,
        upstream,
        barriers=barriers,
        objective=Objective(**problem["loss"]),
        tile_bytes=problem["tile_bytes"],
        **problem["logits"],
    )
    torch.testing.assert_close(found[0], losses, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(found[1:], wanted, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@SMALLEST_TILE
@settings(deadline=None, max_examples=40)
@given(problem=problems())
def test_one_barrier_equals_two(problem):
    hidden, weight, bias, target = draw_tensors(problem)
    shards = cut(weight, bias, problem["starts"])
    settings = {"objective": Objective(**problem["loss"]), "tile_bytes": problem["tile_bytes"], **problem["logits"]}
    one, two = (step(shards, hidden, target, 0.7, barriers=barriers, **settings) for barriers in (1, 2))
    assert torch.equal(one[0], two[0])
    for a, b in zip(one[1:], two[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


class ShardedLoss(torch.autograd.Function):
    """The summed loss of all shards as one function of hidden and the whole weight, for gradcheck."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, starts, settings):
        ctx.arguments = cut(weight, bias, starts), hidden, target, settings
        return step(*ctx.arguments[:3], 1.0, **settings)[0].sum()

    @staticmethod
    def backward(ctx, upstream):
        shards, hidden, target, settings = ctx.arguments
        return *step(shards, hidden, target, upstream, **settings)[1:], None, None, None


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradcheck(barriers, softcap):
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*n, dtype=torch.float64, requires_grad=True) for n in ((4, 3), (7, 3), (7,)))
    settings = {"barriers": barriers, "softcap": softcap, "logit_scale": 0.7}
    settings["objective"] = Objective(label_smoothing=0.2, z_loss=0.1)
    target = torch.tensor([3, -100, 6, 0])
    assert torch.autograd.gradcheck(
        lambda *x: ShardedLoss.apply(*x, target, [0, 3, 3, 5], settings), (hidden, weight, bias)
    )


def test_one_shard_is_the_head_of_one_device():
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(50, 24), torch.randn(3000, 24), torch.randint(0, 3000, (50,))
    target[::4] = -100
    losses = step(cut(weight, None, [0]), hidden, target, 1.0, barriers=1, objective=Objective())[0]
    assert torch.equal(losses, linear_logprob(hidden, weight, target).nll[target != -100])


@pytest.mark.parametrize("barriers", [1, 2])
def test_a_shard_masked_throughout_is_as_if_it_were_not_there(barriers):
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, dtype=torch.float64), torch.randn(40, 8, dtype=torch.float64)
    target = torch.randint(0, 30, (9,))
    bias = torch.zeros(40, dtype=torch.float64).index_fill_(0, torch.arange(30, 40), -torch.inf)
    padded = step(cut(weight, bias, [0, 15, 30]), hidden, target, 0.3, barriers=barriers, objective=Objective())
    real = step(cut(weight[:30], bias[:30], [0, 15]), hidden, target, 0.3, barriers=barriers, objective=Objective())
    torch.testing.assert_close(padded[:2], real[:2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(padded[2][:30], real[2], rtol=1e-12, atol=1e-12)
    assert not padded[2][30:].any()


@pytest.mark.parametrize("barriers", [1, 2])
def test_logits_of_ten_thousand_do_not_overflow(barriers):
    torch.manual_seed(0)
    hidden, weight = 100 * torch.randn(20, 16), 25 * torch.randn(90, 16)
    target = torch.randint(0, 90, (20,))
    assert (hidden @ weight.t()).abs().max() > 1e4
    found = step(cut(weight, None, [0, 20, 60]), hidden, target, 1.0, barriers=barriers, objective=Objective())
    y = reference.logits(hidden, weight)
    torch.testing.assert_close(found[0].double(), reference.cross_entropy(y, target), rtol=1e-6, atol=1e-2)
    assert all(each.isfinite().all() for each in found[:3])


@SMALLEST_TILE
@settings(deadline=None, max_examples=40)
@given(problem=problems(), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_without_labels_the_shards_agree_on_the_most_likely_class(problem, dtype):
    hidden, weight, bias, _ = draw_tensors(problem)
    heads = [
        ShardedHead(shard=x, options=Options(ignore_index=0, tile_bytes=problem["tile_bytes"], **problem["logits"]))
        for x in cut(weight.to(dtype), None if bias is None else bias.to(dtype), problem["starts"])
    ]
    gathered = torch.stack([s_pass(head, hidden.to(dtype)).statistics for head in heads])
    whole = combine_shards(gathered, heads[0].statistics(labelled=False))
    y = reference.logits(hidden, weight, bias, **problem["logits"])
    best = y.gather(1, whole.argmax.unsqueeze(1)).squeeze(1)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(best, y.amax(1), **tolerance)
    torch.testing.assert_close((whole.max - whole.lse).double(), torch.log_softmax(y, -1).amax(1), **tolerance)
    assert whole.argmax.dtype == torch.long


def test_of_equal_classes_in_two_shards_the_first_is_named():
    weight = torch.ones(7, 2)
    heads = [ShardedHead(shard=x) for x in cut(weight, None, [0, 0, 3])]
    gathered = torch.stack([s_pass(head, torch.ones(4, 2)).statistics for head in heads])
    assert combine_shards(gathered, heads[0].statistics(labelled=False)).argmax.tolist() == [0] * 4


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "autocast"),
    [
        (torch.bfloat16, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, False),
        (torch.float16, torch.float16, False),
        (torch.float32, torch.float32, False),
        (torch.float32, torch.float32, True),
    ],
)
def test_low_precision_is_no_worse_than_full_logits(dtype, grad_dtype, autocast, barriers):
    torch.manual_seed(0)
    hidden, weight = torch.randn(96, 32).to(dtype), torch.randn(3000, 32).to(dtype).mul_(0.3)
    target = torch.randint(0, 3000, (96,))
    target[::5] = -100
    valid = target != -100

    def plain(cast, loss):
        inputs = [cast(each).clone().requires_grad_() for each in (hidden, weight)]
        losses = loss(*inputs)
        return losses.detach(), *torch.autograd.grad(losses.sum(), inputs)

    exact = plain(torch.Tensor.double, lambda h, w: reference.cross_entropy(reference.logits(h, w), target))
    with torch.autocast("cpu", enabled=autocast):
        theirs = plain(lambda x: x, lambda h, w: plain_cross_entropy(h, w, target, reduction="none"))
        ours = step(
            cut(weight, None, [0, 700, 701]),
            hidden,
            target,
            1.0,
            barriers=barriers,
            objective=Objective(),
            grad_dtype=grad_dtype,
        )
    for a, b, c in zip(ours, (theirs[0][valid], *theirs[1:]), (exact[0][valid], *exact[1:]), strict=False):
        ulp = torch.finfo(a.dtype).eps * c.abs().max()
        assert (a.double() - c).abs().max() <= 2 * (b.double() - c).abs().max() + ulp


def test_microbatches_add_up_in_one_gradient():
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(64, 16).bfloat16(), torch.randn(500, 16).bfloat16(), torch.arange(290, 354)
    head = ShardedHead(shard=cut(weight, None, [0, 300])[1])
    narrow, wide, parts = torch.zeros(200, 16).bfloat16(), torch.zeros(200, 16), []
    for half in (slice(0, 32), slice(32, 64)):
        scan = s_pass(head, hidden[half], target[half])
        whole = combine_shards(scan.statistics[None], head.statistics(labelled=True))
        parts.append(torch.zeros(200, 16))
        for gradient in (narrow, wide, parts[-1]):
            t_pass(head, scan.tokens, whole, 1.0, weight_grad=gradient, hidden_grad=False)
    assert torch.equal(wide, parts[0] + parts[1])
    assert torch.equal(narrow, (parts[0].bfloat16() + parts[1]).bfloat16())


def test_a_frozen_weight_still_passes_the_gradient_of_hidden():
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(8, 4), torch.randn(30, 4), torch.randint(0, 30, (8,))
    head = ShardedHead(shard=cut(weight, None, [0])[0])
    scan = s_pass(head, hidden, target, product=True)
    whole = combine_shards(scan.statistics[None], head.statistics(labelled=True))
    assert t_pass(head, scan.tokens, whole, 1.0, weight_grad=None, hidden_grad=False) is None
    share = t_pass(head, scan.tokens, whole, 1.0, weight_grad=None, hidden_grad=True)
    torch.testing.assert_close(share, rescale(head, scan, whole, 1.0))


def peak(work, ledger=None):
    """Return what `work` returns, the peak of the bytes that it makes, and those that it leaves."""
    with Ledger() as ledger, ledger.phase("head"):
        result = work()
        left = ledger.live_bytes
    return result, ledger.peak_bytes["head"], left


TILE_BYTES = 2**20


@pytest.mark.filterwarnings("ignore:`tile_bytes`")
@pytest.mark.parametrize("product", [False, True])
@pytest.mark.parametrize(
    ("loss", "extra"),
    [
        ({}, ""),
        ({"label_smoothing": 0.1}, "bias"),
        ({"z_loss": 0.1}, ""),
        ({"z_loss": 0.1}, "softcap"),
        ({"label_smoothing": 0.1}, "softcap"),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ],
)
@pytest.mark.parametrize(("tokens", "rows", "width", "ignored"), [(300, 2400, 32, True), (40, 700, 16, False)])
def test_every_pass_peaks_at_its_price(tokens, rows, width, dtype, grad_dtype, extra, loss, ignored, product):
    torch.manual_seed(0)
    hidden, weight = torch.randn(tokens, width).to(dtype), torch.randn(rows, width).to(dtype)
    bias = torch.randn(rows).to(dtype) if extra == "bias" else None
    target = torch.randint(0, 3 * rows, (tokens,))
    if ignored:
        target[::3] = -100
    num_valid = int((target != -100).sum())
    head = ShardedHead(
        shard=Shard(weight=weight, start=rows, vocab_size=3 * rows, bias=bias),
        objective=Objective(**loss),
        options=Options(ignore_index=-100, softcap=3.0 if extra == "softcap" else None, tile_bytes=TILE_BYTES),
    )
    scan, scan_peak, left = peak(lambda: s_pass(head, hidden, target, product=product))
    sizes = scan.tokens.sizes
    assert left == waiting_bytes(sizes, num_valid=num_valid, product=product)
    plan = scan_pass(sizes, product=product, tile_bytes=TILE_BYTES)
    assert scan_peak == scan_peak_bytes(plan, num_valid=num_valid)
    whole = combine_shards(scan.statistics[None], head.statistics(labelled=True))
    if product:
        made = peak(lambda: rescale(head, scan, whole, 0.1))
        assert made[1:] == (rescale_peak_bytes(sizes, num_valid=num_valid), 0)
    grads = {"weight_grad": torch.zeros(rows, width, dtype=grad_dtype)}
    grads["bias_grad"] = None if bias is None else torch.zeros(rows, dtype=dtype)
    _, found, _ = peak(lambda: t_pass(head, scan.tokens, whole, 0.1, hidden_grad=not product, **grads))
    narrow = grad_dtype == torch.bfloat16
    plan = sweep_pass(sizes, narrow=narrow, bias=bias is not None, tile_bytes=TILE_BYTES)
    assert ("column_grads" in plan.buffers) == narrow
    z_loss = "z_loss" in loss
    assert found == sweep_peak_bytes(plan, num_valid=num_valid, hidden_grad=not product, z_loss=z_loss)


@pytest.mark.parametrize("product", [False, True])
def test_no_pass_grows_with_the_shard_beyond_its_tiles(product):
    hidden, target, peaks = torch.randn(1024, 16), torch.zeros(1024, dtype=torch.long), []
    for rows in (4096, 16384):
        head = ShardedHead(
            shard=Shard(weight=torch.randn(rows, 16), start=0, vocab_size=rows),
            options=Options(ignore_index=-100, tile_bytes=2 * TILE_BYTES),
        )
        scan, found, left = peak(lambda: s_pass(head, hidden, target, product=product))  # noqa: B023
        whole = combine_shards(scan.statistics[None], head.statistics(labelled=True))
        grad = torch.zeros_like(head.shard.weight)
        sweep = {"weight_grad": grad, "hidden_grad": not product}
        share, swept, _ = peak(lambda: t_pass(head, scan.tokens, whole, 1.0, **sweep))  # noqa: B023
        peaks.append((found - left, swept - (0 if share is None else share.nbytes)))
        assert max(peaks[-1]) < 1024 * rows * 4 / 4
    assert max(max(pair) for pair in peaks) <= 2 * TILE_BYTES + 1024 * (8 + 4 + 28)


@pytest.mark.parametrize("barriers", [1, 2])
def test_a_dry_run_on_fakes_weighs_the_same(barriers):
    def run():
        hidden, weight, target = torch.randn(70, 16), torch.randn(2100, 16), torch.zeros(70, dtype=torch.long)
        objective = Objective(label_smoothing=0.1)
        return step(cut(weight, None, [0, 1000, 1000]), hidden, target, 1.0, barriers=barriers, objective=objective)

    _, real, _ = peak(run)
    with FakeTensorMode():
        _, fake, _ = peak(run)
    assert fake == real


def test_mistakes_are_named():
    weight, hidden, target = torch.randn(10, 4), torch.randn(3, 4), torch.tensor([0, 9, 12])
    with pytest.raises(ValueError, match="rows 5 to 15"):
        Shard(weight=weight, start=5, vocab_size=12)
    with pytest.raises(ValueError, match="`bias` must have the shard's 10 rows"):
        Shard(weight=weight, start=0, vocab_size=12, bias=torch.zeros(9))
    shard = Shard(weight=weight, start=0, vocab_size=12)
    with pytest.raises(ValueError, match="`strategy`"):
        ShardedHead(shard=shard, options=Options(ignore_index=-100, strategy="recompute"))
    with pytest.raises(ValueError, match="`num_valid` differs"):
        ShardedHead(shard=shard, options=Options(ignore_index=-100, num_valid=3))
    head = ShardedHead(shard=shard)
    with pytest.raises(ValueError, match=r"in \[0, 12\)"):
        s_pass(head, hidden, target)
    with pytest.raises(ValueError, match="`num_valid` must be the number"):
        s_pass(head, hidden, target.clamp(max=11), num_valid=2)
    with pytest.raises(ValueError, match="`product` is for a gradient"):
        s_pass(head, hidden, product=True)
    with pytest.raises(ValueError, match="`num_valid` counts targets"):
        s_pass(head, hidden, num_valid=3)
    with pytest.raises(ValueError, match="at most 2\\^24"):
        s_pass(ShardedHead(shard=Shard(weight=weight, start=0, vocab_size=2**24 + 1)), hidden)
    scan = s_pass(head, hidden, target.clamp(max=11))
    whole = combine_shards(scan.statistics[None], head.statistics(labelled=True))
    with pytest.raises(ValueError, match="no product"):
        rescale(head, scan, whole, 1.0)
    with pytest.raises(ValueError, match="shape of the shard"):
        t_pass(head, scan.tokens, whole, 1.0, weight_grad=torch.zeros(9, 4), hidden_grad=False)
    with pytest.raises(TypeError, match="`weight_grad` must be"):
        t_pass(head, scan.tokens, whole, 1.0, weight_grad=torch.zeros(10, 4).bfloat16(), hidden_grad=False)
    with pytest.raises(ValueError, match="no target"):
        t_pass(head, s_pass(head, hidden).tokens, whole, 1.0, weight_grad=None, hidden_grad=True)
    with pytest.warns(UserWarning, match="below the smallest tile for this shard"):
        s_pass(ShardedHead(shard=shard, options=Options(ignore_index=-100, tile_bytes=1)), hidden)
