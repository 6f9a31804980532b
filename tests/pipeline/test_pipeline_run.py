"""Pipelines that run, on one to four gloo processes: the numbers of one process, flat memory, one error for all."""

import pytest

import ranks as pool
from pipeline import rank_pipeline

WAYS = [("1f1b", "vocab-1"), ("1f1b", "vocab-2"), ("v-half", "vocab-1"), ("v-half", "vocab-2")]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    found = pool.Ranks(tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()


def check(ranks, num_ranks, **how):
    """Compare with one process; return what the ranks say."""
    found = ranks.run(rank_pipeline.against_one_process, num_ranks, **how)
    for each in found:
        assert each["error"] < 1e-12
        assert each["losses"] == found[0]["losses"]  # the same bits
    return found


def check_flat(ranks, num_ranks, size, **how):
    """Compare the bytes of a step of `size` microbatches with those of twice as many, which may only hold less.

    A V of few microbatches may end in an order in which one more hidden state is alive.
    """
    for (peak, left), (peak_of_twice, left_of_twice) in ranks.run(
        rank_pipeline.live_bytes, num_ranks, sizes=[size, 2 * size], **how
    ):
        assert peak_of_twice - peak <= 8 * size  # the loss of each microbatch, and nothing else
        assert peak_of_twice > 0.95 * peak
        assert left == left_of_twice == 0


@pytest.mark.parametrize(("method", "head"), WAYS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_steps_add_up_to_what_one_process_computes(ranks, num_ranks, method, head):
    tied = num_ranks % 2 == 0
    sizes = [1, num_ranks + 1, 2 * num_ranks]
    found = check(ranks, num_ranks, method=method, head=head, sizes=sizes, tied=tied)
    runs = [sum(layers) for layers in zip(*(each["runs"] for each in found), strict=True)]
    assert runs == [3 * sum(sizes)] * 8  # forward, once more in backward, and held out


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("method", "head"), [*WAYS, ("v-min", "vocab-2"), ("interlaced", "vocab-1")])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_any_number_of_microbatches(ranks, num_ranks, method, head, tied):
    for size in range(1, 4 * num_ranks + 1):
        check(ranks, num_ranks, method=method, head=head, sizes=[size], tied=tied)


@pytest.mark.parametrize(("method", "head"), WAYS)
@pytest.mark.parametrize("vocab", [3, 101])
def test_uneven_and_empty_shards_with_a_bias_and_another_loss(ranks, method, head, vocab):
    objective = {"label_smoothing": 0.1, "z_loss": 1e-2}
    check(ranks, 4, method=method, head=head, sizes=[3], vocab=vocab, bias=True, objective=objective)


@pytest.mark.parametrize(("method", "head"), WAYS)
@pytest.mark.parametrize("tied", [False, True])
def test_what_is_said_after_a_prompt_is_what_one_process_says(ranks, method, head, tied):
    for said, expected in ranks.run(rank_pipeline.generate, 3, method=method, head=head, tied=tied):
        assert said == expected


@pytest.mark.parametrize(("method", "head"), WAYS)
def test_memory_does_not_grow_with_microbatches(ranks, method, head):
    check_flat(ranks, 3, 9, method=method, head=head, checkpointed=True)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("method", "head"), [*WAYS, ("v-min", "vocab-2")])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_memory_does_not_grow_on_any_number_of_ranks(ranks, num_ranks, method, head, checkpointed):
    check_flat(ranks, num_ranks, 3 * num_ranks, method=method, head=head, checkpointed=checkpointed)


def test_each_pass_is_watched_in_the_order_of_the_schedule(ranks):
    for seen, named in ranks.run(rank_pipeline.passes_seen, 3, method="v-half", head="vocab-1", microbatches=5):
        assert seen == named


def test_ranks_that_plan_otherwise_are_named_on_all(ranks):
    for name, sentence in ranks.run(rank_pipeline.other_plan, 3):
        assert name == "UsageError"
        assert sentence.startswith("rank 1 and rank 0 have different schedules of 5 microbatches;")
