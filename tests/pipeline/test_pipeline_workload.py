"""What a step takes, from a model's sizes and from measured times."""

from dataclasses import replace

import pytest

from planish.errors import UsageError
from planish.pipeline.actions import Head, Kind
from planish.pipeline.workload import Times, Workload, workload
from planish.price.config import read_config

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
STEP = {"context": 100, "microbatches": 8, "recompute": False}
# Products of a token in a layer: q and o 64 x 64, k and v 64 x 32, three of 64 x 160, two norms; scores and their
# product with v for the 50.5 keys that a token sees on average, 4 heads of 16 + 16.
WEIGHTS, FFN, SCORES = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64, 3 * 64 * 160, 4 * 32 * 50.5


def test_the_head_is_weighed_in_layers_by_its_products():
    found = workload(read_config(LLAMA), **STEP)
    assert found.head == pytest.approx(64 * 1000 / (WEIGHTS + SCORES))
    assert (found.layers, found.microbatches, found.layer_backward, found.unit) == (6, 8, 2.0, "forwards of a layer")


def test_a_window_bounds_the_keys():
    """Tokens 1 to 10 see themselves and all before them, the others 10 keys: 9.55 on average over 100."""
    found = workload(read_config(LLAMA | {"model_type": "mistral", "sliding_window": 10}), **STEP)
    assert found.head == pytest.approx(64 * 1000 / (WEIGHTS + 4 * 32 * 9.55))


def test_a_mixture_counts_the_experts_that_a_token_meets():
    dense = workload(read_config(LLAMA), **STEP, experts_per_token=2)
    assert dense.head == pytest.approx(64 * 1000 / (WEIGHTS + FFN + SCORES))
    experts = LLAMA | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    mixture = workload(read_config(experts), **STEP)
    assert mixture.head == pytest.approx(64 * 1000 / (WEIGHTS + FFN + 8 * 64 + SCORES))


def test_measured_times_take_the_place_of_products():
    shape = read_config(LLAMA)
    assert workload(shape, **STEP | {"recompute": True}).layer_backward == 3.0
    found = workload(shape, **STEP, times=Times(layer_s=0.01))
    by_products = workload(shape, **STEP)
    assert (found.layer, found.layer_backward, found.unit) == (0.01, 0.02, "seconds")
    assert found.head == pytest.approx(0.01 * by_products.head)
    assert found.transfer == pytest.approx(0.01 * by_products.transfer)
    times = Times(layer_s=0.01, layer_backward_s=0.015, head_s=0.3, embedding_s=0.001, transfer_s=0.002)
    found = workload(shape, **STEP, times=times)
    assert (found.layer_backward, found.head, found.embedding, found.transfer) == (0.015, 0.3, 0.001, 0.002)


@pytest.mark.parametrize("head", Head)
def test_every_pass_of_the_step_is_paid_once(head):
    work = Workload(layers=9, microbatches=4, layer_backward=3.0, head=2.0, embedding=0.5)
    costs = work.costs(work.spread(3, head), head, 3)
    stages = sum(sum(costs.row(kind)) for kind in (Kind.F, Kind.B))
    shared = sum(sum(costs.row(kind)) for kind in (*head.passes, Kind.IF, Kind.IB)) if head.shared else 0.0
    assert stages + shared == pytest.approx(9 * 4 + 3 * 2 + (3.0 if head.shared else 0.0))
    halves = [i + w for i, w in zip(costs.row(Kind.I), costs.row(Kind.W), strict=True)]
    assert halves == pytest.approx(list(costs.row(Kind.B)))


def test_a_head_on_the_last_stage_pushes_layers_off_it():
    work = Workload(layers=32, microbatches=4, head=2.3)
    assert work.spread(8, Head.LAST_STAGE) == (4, 4, 4, 4, 4, 5, 5, 2)
    assert work.spread(8, Head.VOCAB_2) == (4,) * 8
    # Three forwards of the head are two layers of four: none is longer than five, 4.25 being the mean.
    assert replace(work, layer_backward=3.0, head=8 / 3).spread(8, Head.LAST_STAGE)[-1] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": 0}, "`layer` must be above 0, got 0"),
        ({"head": -1}, "`head` must be 0 or more, got -1"),
        ({"embedding": -1}, "`embedding` must be 0 or more, got -1"),
        ({"transfer": -1}, "`transfer` must be 0 or more, got -1"),
        ({"layer_backward": 0.5}, r"`layer_backward` \(0.5\) must be at least `layer` \(1\)"),
    ],
)
def test_times_that_are_none_are_refused(change, message):
    with pytest.raises(UsageError, match=message):
        Workload(layers=8, microbatches=4, **change)


@pytest.mark.parametrize("name", Times.__dataclass_fields__)
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_measured_times_that_are_none_are_refused_by_name(name, seconds):
    with pytest.raises(UsageError, match=rf"`plan.pipeline.times.{name}` must be above 0, got {seconds}"):
        workload(read_config(LLAMA), **STEP, times=Times(**{"layer_s": 1.0} | {name: seconds}))
