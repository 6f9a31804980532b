"""Rows of an embedding over one to four processes: torch's embedding, bit for bit forward."""

import numpy as np
import pytest
import torch
from torch.nn.functional import embedding

from vocab import ring_work


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("block", [1, 5, None])
@pytest.mark.parametrize(("vocab", "padding_idx"), [(50, None), (50, 20), (3, 0)])
def test_rows_and_gradients_are_those_of_one_process(pool, size, block, vocab, padding_idx):
    """Some ids come often: all ranks ask one of them for the same row."""
    tokens = [14, 0, 9, 3][:size]
    problem = {"tokens": tokens, "vocab": vocab, "padding_idx": padding_idx}
    answers = pool.run(ring_work.look_up, size, block=block, **problem)
    ids, weight, upstream = ring_work.draw_ids(tokens, vocab)
    weight.requires_grad_()
    rows = [embedding(each, weight, padding_idx=padding_idx) for each in ids]
    (expected,) = torch.autograd.grad(sum((row * up).sum() for row, up in zip(rows, upstream, strict=True)), weight)
    for (found, _), row in zip(answers, rows, strict=True):
        assert np.array_equal(found, row.detach())
    np.testing.assert_allclose(np.concatenate([each for _, each in answers]), expected, rtol=1e-12, atol=1e-12)


def test_an_id_out_of_range_is_refused_by_all(pool):
    answers = pool.run(ring_work.look_up, 3, tokens=[4, 4, 4], vocab=50, padding_idx=None, block=None, wrong=71)
    assert answers == ["`ids` must be in [0, 50), got 71 on rank 1."] * 3
