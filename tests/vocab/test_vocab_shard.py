"""The embedding on shards of its rows, and one weight tied to the head, against torch on the whole weight."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.memory.ledger import Ledger
from planish.peaks.vocab import reference
from planish.peaks.vocab.blocked import Objective
from planish.peaks.vocab.inputs import Options
from planish.peaks.vocab.shard import Rows, Shard, ShardedHead, embed, embed_backward, shard_ranges
from planish.peaks.vocab.sharded import combine_shards, rescale, s_pass, t_pass, to_tokens


def shards_of(weight, num_shards):
    ranges = shard_ranges(len(weight), num_shards)
    return [Shard(weight=weight[each], start=each.start, vocab_size=len(weight)) for each in ranges]


@given(vocab=st.integers(1, 40), num_shards=st.integers(1, 9))
def test_ranges_are_those_of_torch_chunk(vocab, num_shards):
    ranges = shard_ranges(vocab, num_shards)
    chunks = [chunk.tolist() for chunk in torch.arange(vocab).chunk(num_shards)]
    assert [list(range(vocab))[each] for each in ranges] == chunks + [[]] * (num_shards - len(chunks))


@settings(deadline=None)
@given(
    vocab=st.integers(1, 30),
    num_shards=st.integers(1, 5),
    tokens=st.integers(0, 20),
    padding=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_embedding_and_its_gradient_are_those_of_the_whole_weight(vocab, num_shards, tokens, padding, seed):
    torch.manual_seed(seed)
    weight = torch.randn(vocab, 3, dtype=torch.float64, requires_grad=True)
    ids, upstream = torch.randint(0, vocab, (tokens,)), torch.randn(tokens, 3, dtype=torch.float64)
    padding_idx = vocab // 2 if padding else None
    whole = F.embedding(ids, weight, padding_idx=padding_idx)
    (wanted,) = torch.autograd.grad(whole, weight, upstream)
    found, grads = torch.zeros_like(whole), []
    for shard in shards_of(weight, num_shards):
        rows = embed(shard, ids)
        assert torch.equal(rows.index, shard.owned(ids))
        assert torch.equal(embed(shard, ids, owned=rows.index).values, rows.values)
        found += rows.dense(tokens)
        given_back = Rows(index=rows.index, values=upstream[rows.index])
        touched = embed_backward(shard, ids, given_back, padding_idx=padding_idx)
        assert len(touched.index.unique()) == len(touched.index)
        assert len(touched.index) == len(ids[rows.index].unique())
        grads.append(torch.zeros_like(shard.weight))
        touched.add_to(grads[-1])
    assert torch.equal(found, whole)
    torch.testing.assert_close(torch.cat(grads), wanted, rtol=1e-10, atol=1e-10)


def test_gradients_of_one_id_are_rounded_once():
    shard = Shard(weight=torch.zeros(4, 1).bfloat16(), start=2, vocab_size=6)
    grads = Rows(index=torch.arange(1002), values=torch.ones(1002, 1).bfloat16())
    total = torch.full((4, 1), 5.0).bfloat16()
    embed_backward(shard, torch.tensor([3] * 1002 + [0]), grads).add_to(total)
    # 5 + 1002 = 1007 lies between 1004 and 1008; 1002 alone would have become 1000, and one by one 256
    assert total.flatten().tolist() == [5.0, 1008.0, 5.0, 5.0]


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("num_shards", [1, 3, 5])
def test_a_tied_weight_gets_the_gradients_of_both_its_uses(num_shards, barriers):
    torch.manual_seed(0)
    vocab, width = 13, 6
    weight = torch.randn(vocab, width, dtype=torch.float64, requires_grad=True)
    layer = torch.randn(width, width, dtype=torch.float64)
    ids, target = torch.randint(0, vocab, (2, 9)), torch.randint(0, vocab, (2, 9))
    target[0, :4] = -100
    losses = reference.cross_entropy(
        reference.logits(torch.tanh(F.embedding(ids, weight) @ layer), weight, softcap=4.0), target, z_loss=0.01
    )
    (wanted,) = torch.autograd.grad(losses.sum() / 14, weight)

    owned = [torch.nn.Parameter(weight.detach()[each]) for each in shard_ranges(vocab, num_shards)]
    for each in owned:
        each.grad = torch.zeros_like(each)
    starts = [each.start for each in shard_ranges(vocab, num_shards)]
    shards = [Shard(weight=w, start=start, vocab_size=vocab) for w, start in zip(owned, starts, strict=True)]
    gradients = [each.grad for each in owned]
    looked_up = [embed(shard, ids) for shard in shards]
    embedded = sum(rows.dense(18) for rows in looked_up).view(2, 9, width).requires_grad_()
    hidden = torch.tanh(embedded @ layer)
    options = Options(ignore_index=-100, softcap=4.0)
    heads = [ShardedHead(shard=shard, objective=Objective(z_loss=0.01), options=options) for shard in shards]
    scans = [s_pass(head, hidden, target, product=barriers == 1) for head in heads]
    whole = combine_shards(torch.stack([scan.statistics for scan in scans]), heads[0].statistics(labelled=True))
    shares = [rescale(h, s, whole, 1 / 14) if barriers == 1 else None for h, s in zip(heads, scans, strict=True)]
    for i, (head, scan, gradient) in enumerate(zip(heads, scans, gradients, strict=True)):
        share = t_pass(head, scan.tokens, whole, 1 / 14, weight_grad=gradient, hidden_grad=barriers == 2)
        shares[i] = share if barriers == 2 else shares[i]
    hidden.backward(to_tokens(sum(shares), scans[0].tokens.index, num_tokens=hidden[..., 0].numel()).view_as(hidden))
    d_embedded = embedded.grad.view(-1, width)
    for shard, rows, gradient in zip(shards, looked_up, gradients, strict=True):
        embed_backward(shard, ids, Rows(index=rows.index, values=d_embedded[rows.index])).add_to(gradient)
    torch.testing.assert_close(torch.cat(gradients), wanted, rtol=1e-10, atol=1e-10)


def test_a_dry_run_plans_for_a_shard_that_owns_every_token():
    def run():
        shard = Shard(weight=torch.zeros(8, 5), start=4, vocab_size=16)
        ids = torch.arange(4, 12)
        rows = embed(shard, ids)
        touched = embed_backward(shard, ids, Rows(index=rows.index, values=torch.ones_like(rows.values)))
        touched.add_to(torch.zeros(8, 5))
        return rows.values.shape, touched.values.shape

    with Ledger() as real, real.phase("head"):
        assert run() == ((8, 5), (8, 5))
    with FakeTensorMode(), Ledger() as fake, fake.phase("head"):
        assert run() == ((8, 5), (8, 5))
    assert fake.peak_bytes == real.peak_bytes


@pytest.mark.parametrize("wrong", [-1, 16])
def test_an_id_that_no_shard_owns_is_refused(wrong):
    shard = Shard(weight=torch.zeros(8, 5), start=0, vocab_size=16)
    with pytest.raises(ValueError, match=rf"`ids` must be in \[0, 16\), got {wrong}"):
        embed(shard, torch.tensor([3, wrong]))
