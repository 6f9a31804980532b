"""Faults that users reported of heads over several ranks, each tried on ours; named after the report."""

import numpy as np
import pytest

from vocab import ring_work
from vocab.test_vocab_ring import check

MODES = ["weights", "hidden", "gather"]
every_mode = pytest.mark.parametrize("mode", MODES)


def test_apple_pr_42_gradient_of_hidden_is_summed_over_ranks(pool):
    check(pool, 4, tokens=[252] * 4, vocab=507, width=123, mode="replicated")


@pytest.mark.parametrize("mode", [*MODES, "replicated"])
def test_apple_pr_59_targets_of_another_rank_behind_a_ragged_tile(pool, mode):
    tokens = [40, 40] if mode == "replicated" else [40, 23]
    check(pool, 2, tokens=tokens, vocab=2 * 1024 + 154, width=5, mode=mode)


@pytest.mark.parametrize("mode", [*MODES, "replicated"])
def test_megatron_7464_smoothing_over_the_whole_vocabulary_with_large_logits(pool, mode):
    check(pool, 2, tokens=[6, 6], vocab=8, width=4, mode=mode, scale=10.0, settings={"label_smoothing": 0.1})


def test_megatron_7452_a_whole_weight_in_the_place_of_a_shard(pool):
    """Rank 1 gives all rows: the loss would be too large by up to log(2)."""
    answers = pool.run(ring_work.mistake, 2, change={"rows": 43}, vocab_size=43)
    assert {kind for kind, _ in answers} == {"ValueError"}


@every_mode
@pytest.mark.parametrize("second", [0, 7])
def test_megatron_7513_means_divide_by_the_tokens_of_all_ranks(pool, mode, second):
    """One token that counts on rank 0; none or seven on rank 1."""
    check(pool, 2, tokens=[1, 7], vocab=30, width=4, mode=mode, ignored="none" if second else 1)


@every_mode
def test_verl_3723_sequence_shards_keep_each_token_s_own_label(pool, mode):
    check(pool, 3, tokens=[5, 5, 6], vocab=30, width=4, mode=mode, settings={"reduction": "none"})


@every_mode
def test_ms_swift_9947_rows_that_own_no_target_still_learn(pool, mode):
    answers = check(pool, 4, tokens=[2, 0, 1, 0], vocab=400, width=4, mode=mode, ignored="none")
    for _, grads in answers:
        assert np.abs(grads["weight"]).min() > 0


@every_mode
@pytest.mark.parametrize("silent", [0, 1, "all"])
def test_automodel_3796_a_rank_with_nothing_to_learn_takes_part(pool, mode, silent):
    answers = check(pool, 2, tokens=[5, 6], vocab=30, width=4, mode=mode, ignored=silent)
    assert all(np.isfinite(loss) for loss, _ in answers)
