"""The head's Triton kernels in Triton's interpreter, which must be chosen before Triton is imported."""

import itertools

import torch

from planish.kernels import vocab_triton
from planish.peaks.vocab import reference, tiles
from planish.peaks.vocab.losses import linear_cross_entropy
from planish.price.vocab import BLOCK

FLOOR = -1e38


def draw(tokens, width, vocab, dtype, *, biased=False):
    generator = torch.Generator().manual_seed(tokens + width + vocab)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    target = torch.randint(-1, vocab, (tokens,), generator=generator)
    return normal(tokens, width), normal(vocab, width) * width**-0.5, normal(vocab) if biased else None, target


def check(tokens, width, vocab, *, dtype=torch.float32, biased=False, softcap=None, logit_scale=1.0):
    rows, weight, bias, target = draw(tokens, width, vocab, dtype, biased=biased)
    y = reference.logits(rows, weight, bias, logit_scale=logit_scale, softcap=softcap)
    blocks = max(1, vocab // BLOCK)
    top, total = torch.full((tokens, blocks), 7.0), torch.full((tokens, blocks), 7.0)
    how = {"logit_scale": logit_scale, "softcap": softcap}
    hits = vocab_triton.fold(rows, weight, bias, target, top, total, block=BLOCK, floor=FLOOR, **how)
    lse = torch.logsumexp(top.double() + total.double().log(), 1)
    torch.testing.assert_close(lse, torch.logsumexp(y, 1), rtol=1e-5, atol=1e-5)
    picked = y.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1).where(target >= 0, 0.0)
    torch.testing.assert_close(hits.double(), picked, rtol=1e-5, atol=1e-5)
    softmax, hit, uniform = torch.rand(3, tokens)
    one_hot = torch.zeros(tokens, vocab, dtype=torch.float64)
    one_hot[target >= 0, target[target >= 0]] = 1.0
    for slopes in (
        {"softmax": None, "hit": hit, "uniform": None},
        {"softmax": softmax, "hit": None, "uniform": uniform},
    ):
        out = torch.full((tokens, vocab), 7.0, dtype=dtype)
        vocab_triton.derive(rows, weight, bias, target, lse.float(), out, **slopes, **how)
        factors = [0.0 if each is None else each.double().unsqueeze(1) for each in slopes.values()]
        expected = torch.softmax(y, 1) * (1.0 if slopes["softmax"] is None else factors[0])
        expected = expected - factors[1] * one_hot - factors[2]
        expected = expected if softcap is None else expected * (1 - (y / softcap) ** 2)
        tolerance = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-5)


def check_masked_block():
    """A canonical block that is -inf throughout adds nothing, and its maximum is finite."""
    rows, weight, bias, target = draw(5, 9, 2 * BLOCK, torch.float32, biased=True)
    bias[:BLOCK] = -torch.inf
    top, total = torch.empty(2, 5, 2)
    vocab_triton.fold(rows, weight, bias, target, top, total, block=BLOCK, floor=FLOOR, logit_scale=1.0, softcap=None)
    assert (top[:, 0] == FLOOR).all()
    assert (total[:, 0] == 0).all()
    assert total[:, 1].isfinite().all()


def check_head(**how):
    """The whole head by these kernels, as a CUDA device has it."""
    hidden, weight, bias, target = draw(70, 33, 2500, torch.float32, biased=True)
    target[::5] = -100
    target[target == -1] = 0
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(
        hidden, weight, target, bias=bias, reduction="none", ignore_index=-100, tile_bytes=2**19, **how
    )
    names = {name: how[name] for name in ("softcap", "logit_scale") if name in how}
    exact = reference.cross_entropy(reference.logits(hidden, weight, bias, **names), target)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(70)
    ours, theirs = (torch.autograd.grad((each * upstream).sum(), leaves) for each in (loss, exact))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    for vocab, width, tokens in itertools.product((1, 127, 129, 1001), (1, 123, 257, 1024), (0, 1, 129)):
        check(tokens, width, vocab, biased=tokens == 1)
    check(40, 33, 2 * BLOCK + 77, biased=True, softcap=2.0, logit_scale=0.5)
    # The interpreter multiplies the bit patterns of bf16 numbers, so that float16 stands for both here.
    check(40, 33, 300, dtype=torch.float16, softcap=2.0, logit_scale=-4.0)
    check(40, 33, 300, softcap=0.2)
    check_masked_block()
    calls = []

    class Spy:
        """The kernels, counted."""

        def __getattr__(self, name):
            calls.append(name)
            return getattr(vocab_triton, name)

    tiles.head_kernels = lambda device: Spy()
    check_head()
    check_head(softcap=2.0, logit_scale=0.5)
    assert calls.count("fold") > 2
    assert calls.count("derive") > 2
    print("checked")
