"""The store changes no bit, whatever the loop around it does, and holds on the device what its price says."""

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from planish.errors import UsageError
from planish.price.boundary import Boundaries


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def through(store, model, kind):
    return [store.checkpoint(index, kind) for index in range(len(model.layers))]


def plain(model, kind):
    return [kind for _ in model.layers]


@pytest.fixture
def step():
    """Return forward and backward of one batch as a loss."""

    def run(model, checkpoints, ids=None):
        loss = model(model.tokens() if ids is None else ids, checkpoints)
        loss.backward()
        return loss

    return run


@pytest.mark.parametrize("tier", ["identity", "disk", "throttled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients_are_bitwise_those_of_plain_checkpointing(
    stack, make_store, grads_of, kind, step, tier, dtype
):
    model = stack(dtype=dtype)
    store = make_store(itemsize=dtype.itemsize, tier=tier)
    expected = grads_of(model, lambda: step(model, plain(model, kind)))
    for _ in range(3):
        assert equal(grads_of(model, lambda: step(model, through(store, model, kind))), expected)
        assert store.slots_in_use == 0
    assert store.num_offloaded == 3 * 5
    assert store.num_stayed == 3


@pytest.mark.parametrize("slots", [0, 1, 3, 6])
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("keep_last", [0, 1, 2])
def test_every_policy_is_bitwise_and_on_the_device_is_what_the_price_says(
    stack, make_store, grads_of, kind, slots, every, keep_last
):
    model = stack()
    alive, restored, counts = [], [], {"forward": [], "backward": []}

    def label(index, tensor):
        restored.append(weakref.ref(tensor.untyped_storage()))

    store = make_store(slots=slots, every=every, keep_last=keep_last, label=label)

    def note(function, *args):
        phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
        counts[phase].append(sum(each() is not None for each in [*alive, *restored]))
        return function(*args)

    def checkpoints():
        def noting(run):
            def call(layer, hidden, mask):
                alive.append(weakref.ref(hidden.untyped_storage()))
                return run(lambda *args: note(layer, *args), hidden, mask)

            return call

        return [noting(run) for run in through(store, model, kind)]

    def run():
        loss = model(model.tokens(), checkpoints())
        loss.backward()
        return loss

    def run_plain():
        loss = model(model.tokens(), plain(model, kind))
        loss.backward()
        return loss

    ours = grads_of(model, run)
    assert equal(ours, grads_of(model, run_plain))
    plan = Boundaries(num_boundaries=6, num_slots=slots, every=every, keep_last=keep_last)
    assert counts["forward"] == [index + 1 - len(plan.away_in_forward(index)) for index in range(6)]
    assert counts["backward"] == [index + 1 - len(plan.away_in_backward(index)) for index in reversed(range(6))]
    assert store.num_offloaded == len(plan.offloaded)


def test_boundaries_of_any_length_up_to_the_slot_use_its_prefix(stack, make_store, grads_of, kind, step):
    model, store = stack(), make_store(tier="disk")
    for length in (5, 1, 4, 2, 5):
        ids = model.tokens(length=length, seed=length)
        expected = grads_of(model, lambda ids=ids: step(model, plain(model, kind), ids))
        assert equal(grads_of(model, lambda ids=ids: step(model, through(store, model, kind), ids)), expected)
    assert store.num_offloaded == 5 * 5


def test_a_boundary_larger_than_its_slot_stays(stack, make_store, grads_of, kind, step):
    model, store = stack(), make_store()
    ids = model.tokens(length=6)
    expected = grads_of(model, lambda: step(model, plain(model, kind), ids))
    assert equal(grads_of(model, lambda: step(model, through(store, model, kind), ids)), expected)
    assert store.num_offloaded == 0


def test_a_boundary_of_an_odd_layout_stays(make_store):
    store = make_store(2)
    hidden = torch.randn(16, 5, requires_grad=True)
    out = store.checkpoint(0)(torch.tanh, hidden.t())
    assert store.num_offloaded == 0
    out.sum().backward()
    assert torch.equal(hidden.grad, torch.autograd.grad(torch.tanh(hidden.t()).sum(), hidden)[0])


def test_accumulation_over_microbatches(stack, make_store, grads_of, kind, step):
    model, store = stack(), make_store(tier="throttled")

    def run(checkpoints):
        return sum(step(model, checkpoints, model.tokens(seed=seed)).detach() for seed in range(3))

    expected = grads_of(model, lambda: run(plain(model, kind)))
    assert equal(grads_of(model, lambda: run(through(store, model, kind))), expected)
    assert store._racks[0].pools[0].most_in_use == 5


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("slots", [15, 7])
def test_microbatches_in_flight_are_backed_in_any_order(stack, make_store, grads_of, kind, order, slots):
    model, store = stack(), make_store(slots=slots, tier="disk")
    store.boundaries = Boundaries(num_boundaries=6, num_slots=6)

    def run(checkpoints):
        losses = [model(model.tokens(seed=seed), checkpoints) for seed in range(3)]
        if store.num_offloaded:
            assert store.slots_in_use == slots
        for which in order:
            losses[which].backward()
        return sum(loss.detach() for loss in losses)

    expected = grads_of(model, lambda: run(plain(model, kind)))
    assert equal(grads_of(model, lambda: run(through(store, model, kind))), expected)
    assert store.slots_in_use == 0
    assert store.num_offloaded == slots


def test_two_forwards_before_one_backward(stack, make_store, grads_of, kind):
    model, store = stack(), make_store(slots=12)

    def run(checkpoints):
        loss = model(model.tokens(seed=1), checkpoints) * model(model.tokens(seed=2), checkpoints)
        loss.backward()
        return loss

    expected = grads_of(model, lambda: run(plain(model, kind)))
    assert equal(grads_of(model, lambda: run(through(store, model, kind))), expected)
    assert store.slots_in_use == 0


def test_a_retained_graph_runs_again(stack, make_store, grads_of, kind):
    model, store = stack(), make_store(tier="throttled")

    def run(checkpoints):
        loss = model(model.tokens(), checkpoints)
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
        return loss

    expected = grads_of(model, lambda: run(plain(model, kind)))
    assert equal(grads_of(model, lambda: run(through(store, model, kind))), expected)
    assert store.slots_in_use == 0


def test_a_forward_that_is_cut_short_gives_its_slots_back(stack, make_store, grads_of, kind, step):
    model, store = stack(), make_store(tier="throttled")

    class Cut(Exception):
        pass

    def refuse(*_):
        raise Cut

    expected = grads_of(model, lambda: step(model, plain(model, kind)))
    for at in (0, 3, 5):
        forward, model.layers[at].forward = model.layers[at].forward, refuse
        with pytest.raises(Cut):
            model(model.tokens(), through(store, model, kind))
        model.layers[at].forward = forward
        gc.collect()
        store.settle()
        assert store.slots_in_use == 0
        assert equal(grads_of(model, lambda: step(model, through(store, model, kind))), expected)


def test_a_backward_that_is_cut_short_leaves_the_next_step_right(stack, make_store, grads_of, kind, step):
    model, store = stack(), make_store(tier="throttled")
    expected = grads_of(model, lambda: step(model, plain(model, kind)))

    def refuse(_):
        raise ArithmeticError

    loss = model(model.tokens(), through(store, model, kind))
    handle = model.layers[2].down.weight.register_hook(refuse)
    with pytest.raises(ArithmeticError):
        loss.backward()
    handle.remove()
    del loss
    for _ in range(2):  # autograd itself holds what is left of that graph until the next backward
        assert equal(grads_of(model, lambda: step(model, through(store, model, kind))), expected)
    assert store.slots_in_use == 0


def test_a_forward_without_a_backward_gives_its_slots_back(stack, make_store, kind):
    model, store = stack(), make_store()
    loss = model(model.tokens(), through(store, model, kind))
    assert store.slots_in_use == 5
    del loss
    assert store.slots_in_use == 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_evaluation_in_the_middle_of_a_step_is_not_seen(stack, make_store, grads_of, kind):
    model, store = stack(), make_store(tier="disk")

    def run(checkpoints, evaluate):
        loss = model(model.tokens(), checkpoints)
        if evaluate:
            with torch.no_grad(), torch.random.fork_rng():
                model(model.tokens(seed=3), checkpoints)
        loss.backward()
        return loss

    expected = grads_of(model, lambda: run(plain(model, kind), False))
    assert equal(grads_of(model, lambda: run(through(store, model, kind), True)), expected)
    assert store.num_offloaded == 5


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("inner", [False, True], ids=["inner non-reentrant", "inner reentrant"])
def test_a_checkpoint_within_a_layer_is_left_alone(stack, make_store, grads_of, kind, step, inner):
    model, store = stack(), make_store()
    checkpoints = through(store, model, kind)

    def nested(outer, run):
        def call(layer, hidden, mask):
            def body(hidden, mask):
                half = checkpoint(lambda x: torch.sin(layer.norm(x)), hidden, use_reentrant=inner)
                return run(lambda x: layer(x, mask), half)

            return outer(body, hidden, mask)

        return call

    def inner_plain(function, *args):
        return checkpoint(function, *args, use_reentrant=inner)

    expected = grads_of(model, lambda: step(model, [nested(kind, inner_plain)] * 6))
    within = store.checkpoint(0, inner_plain)
    ours = grads_of(model, lambda: step(model, [nested(outer, within) for outer in checkpoints]))
    assert equal(ours, expected)
    assert store.num_offloaded == 5


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("outer", [False, True], ids=["outer non-reentrant", "outer reentrant"])
def test_a_checkpoint_around_layers_is_bitwise(stack, make_store, grads_of, kind, outer):
    model, store = stack(), make_store(slots=12)

    def run(checkpoints):
        def half(hidden, start):
            for index in range(start, start + 3):
                hidden = checkpoints[index](model.layers[index], hidden, model.mask)
            return hidden

        hidden = model.embed(model.tokens())
        for start in (0, 3):
            hidden = checkpoint(half, hidden, start, use_reentrant=outer)
        loss = hidden.square().mean()
        loss.backward()
        return loss

    expected = grads_of(model, lambda: run(plain(model, kind)))
    assert equal(grads_of(model, lambda: run(through(store, model, kind))), expected)
    gc.collect()
    assert store.slots_in_use == 0


def test_frozen_layers_and_a_frozen_embedding(stack, make_store, grads_of, step):
    model, store = stack(), make_store()
    for frozen in (model.embed, model.layers[0], model.layers[3]):
        frozen.requires_grad_(False)

    def run(function, *args):
        return checkpoint(function, *args, use_reentrant=False)

    expected = grads_of(model, lambda: step(model, plain(model, run)))
    assert equal(grads_of(model, lambda: step(model, through(store, model, run))), expected)
    assert store.slots_in_use == 0


def test_gradients_of_the_last_layers_alone(stack, make_store):
    model, store = stack(), make_store(tier="throttled")

    def run(function, *args):
        return checkpoint(function, *args, use_reentrant=False)

    def last(checkpoints):
        torch.manual_seed(7)
        loss = model(model.tokens(), checkpoints)
        return torch.autograd.grad(loss, list(model.layers[4].parameters()))

    assert equal(last(through(store, model, run)), last(plain(model, run)))
    gc.collect()
    assert store.slots_in_use == 0


def test_masks_and_tables_stay_where_they_are(stack, make_store, kind):
    model, store = stack(), make_store()
    seen = []

    def note(layer, hidden, mask):
        seen.append(mask.data_ptr())
        return layer(hidden, mask)

    runs = through(store, model, kind)
    noting = [lambda layer, *args, run=run: run(lambda *a: note(layer, *a), *args) for run in runs]
    model(model.tokens(), noting).backward()
    assert set(seen) == {model.mask.data_ptr()}
    assert len(seen) == 12
    assert store.tiers[0].written_bytes == 5 * 3 * 5 * 16 * 4


@pytest.mark.parametrize("at", [1, 5], ids=["offloaded", "kept"])
def test_a_layer_s_input_that_is_changed_in_place_is_refused(stack, make_store, kind, at):
    model, store = stack(), make_store()
    runs = through(store, model, kind)

    def spoiling(layer, hidden, mask):
        out = runs[at](layer, hidden, mask)
        hidden.data.add_(0)
        with torch.no_grad():
            hidden.add_(1)
        return out

    checkpoints = [spoiling if index == at else run for index, run in enumerate(runs)]
    with pytest.raises(
        RuntimeError, match=f"the input of layer {at}, or what it keeps, was changed in place after the layer took it"
    ):
        model(model.tokens(), checkpoints).backward()


def test_a_hidden_state_by_keyword_is_refused(stack, make_store):
    store = make_store()
    with pytest.raises(UsageError, match="layer 2 takes its hidden state by keyword, which checkpointing keeps"):
        store.checkpoint(2)(lambda: torch.zeros(3))
