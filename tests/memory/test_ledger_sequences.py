"""The ledger's count on sequences written by hand, each with the bytes that it must show."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from planish.memory.book import CATEGORIES
from planish.memory.ledger import Ledger
from planish.memory.tensors import makes_views

KIB = 1024


@pytest.fixture(params=["real", "fake"])
def ledger(request):
    """A ledger at work, on real tensors and on fake ones."""
    if request.param == "fake":
        with FakeTensorMode(), Ledger() as ledger:
            yield ledger
    else:
        with Ledger() as ledger:
            yield ledger


def kib(count=1):
    return torch.zeros(count * 256)


def test_a_tensor_counts_from_birth_to_death(ledger):
    x = kib(3)
    assert ledger.live_bytes == 3 * KIB
    y = x + 1
    assert ledger.live_bytes == 6 * KIB
    del x
    assert ledger.live_bytes == 3 * KIB
    del y
    assert ledger.live_bytes == 0
    assert ledger.peak_bytes == {"init": 6 * KIB}


def test_views_cost_nothing_and_keep_the_whole_storage(ledger):
    x = kib(4)
    views = [x.view(2, 512), x[:10], x.unsqueeze(0), x.expand(3, 1024), x.detach(), *x.split(256), x.view(torch.int32)]
    assert ledger.live_bytes == 4 * KIB
    del x, views[1:]
    assert ledger.live_bytes == 4 * KIB
    del views
    assert ledger.live_bytes == 0


@pytest.mark.parametrize("name", ["view", "slice.Tensor", "t", "detach", "split.Tensor", "unbind.int", "as_strided"])
def test_an_operation_that_makes_views_is_known_by_its_schema(name):
    packet, _, overload = name.partition(".")
    assert makes_views(getattr(getattr(torch.ops.aten, packet), overload or "default"))


@pytest.mark.parametrize(
    "name",
    [
        "add_.Tensor",
        "mm.out",
        "resize_",
        "set_.source_Tensor",
        "clone",
        "lift_fresh",
        "reshape",
        "contiguous",
        "to.dtype",
    ],
)
def test_what_makes_writes_or_resizes_is_looked_at(name):
    packet, _, overload = name.partition(".")
    assert not makes_views(getattr(getattr(torch.ops.aten, packet), overload or "default"))


def test_in_place_operations_make_nothing(ledger):
    x = kib()
    x.add_(1).mul_(2)
    x[:10] = 3
    x.copy_(x.flip(0))
    torch._foreach_add_([x], 1.0)
    assert ledger.live_bytes == KIB
    assert ledger.peak_bytes["init"] == 2 * KIB  # the flipped copy


def test_out_is_the_callers_tensor_and_grows_with_what_it_receives(ledger):
    x, out = kib(2), torch.empty(0)
    assert ledger.live_bytes == 2 * KIB
    torch.add(x, 1, out=out)
    assert ledger.live_bytes == 4 * KIB
    torch.mul(x, 2, out=out)
    assert ledger.live_bytes == 4 * KIB


def test_resize_counts_the_new_size(ledger):
    x = kib()
    x.resize_(4 * 256)
    assert ledger.live_bytes == 4 * KIB
    x.resize_(256)  # a tensor that shrinks keeps its storage
    assert ledger.live_bytes == 4 * KIB


def test_a_storage_emptied_behind_the_dispatcher_is_seen_at_once():
    with Ledger() as ledger:
        x = kib(4)
        x.untyped_storage().resize_(0)
        assert ledger.live_bytes == 0
        y = kib(3)
        assert ledger.peak_bytes["init"] == 4 * KIB
        x.untyped_storage().resize_(2 * KIB)
        assert ledger.live_bytes == 5 * KIB
        assert ledger.peak_bytes["init"] == 5 * KIB
        del x, y
    assert ledger.live_bytes == 0


def test_resize_is_left_as_it_was_found():
    before = torch.UntypedStorage.resize_
    with Ledger(), Ledger():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before


def test_set_shares_a_storage_and_lets_the_old_one_go():
    with Ledger() as ledger:
        x, y = kib(1), kib(2)
        x.set_(y)
        assert ledger.live_bytes == 2 * KIB
        del y
        assert ledger.live_bytes == 2 * KIB
        x.set_()
        assert ledger.live_bytes == 0
        x.resize_(256)
        assert ledger.live_bytes == KIB


def test_a_storage_made_by_hand_counts_once_a_tensor_holds_it():
    with Ledger() as ledger:
        x = torch.empty(0).set_(torch.UntypedStorage(KIB))
        assert ledger.live_bytes == KIB
        y = copy.deepcopy(x)
        assert ledger.live_bytes == 2 * KIB
        del x, y
    assert ledger.live_bytes == 0


def test_tensors_made_from_python_numbers_count(ledger):
    x = torch.tensor([1.0, 2.0, 3.0])
    assert ledger.live_bytes == 12
    del x
    assert ledger.live_bytes == 0


def test_results_that_are_lists_count_each_storage_once(ledger):
    x = kib(2)
    parts = torch.unbind(x.view(4, 128))
    assert ledger.live_bytes == 2 * KIB
    sums = torch._foreach_add(list(parts), 1.0)
    assert ledger.live_bytes == 4 * KIB
    values, indices = x.sort()
    assert ledger.live_bytes == 4 * KIB + 2 * KIB + 4 * KIB
    del parts, sums, values, indices
    assert ledger.live_bytes == 2 * KIB


def test_adopted_tensors_count_from_then_on():
    x, shared = kib(2), kib(1)
    with Ledger() as ledger:
        x.add_(1)
        x.view(-1)
        assert ledger.live_bytes == 0
        ledger.adopt([x, shared, shared[:3]], "parameters", owner="x")
        assert ledger.live_by_category["parameters"] == ledger.live_bytes == 3 * KIB
        ledger.adopt(x, "staging")
        assert ledger.live_by_category["parameters"] == KIB
        assert ledger.live_by_category["staging"] == 2 * KIB
        del x
        assert ledger.live_bytes == KIB
    assert [(held.owner, held.category) for held in ledger.owners()] == [("x", "parameters")]


def test_tensors_saved_for_backward_count_until_the_graph_lets_them_go(ledger):
    x = kib(2).requires_grad_()
    y = x.exp()
    z = y.sin().sum()  # exp saves its result, sin its input: the same storage; sum saves sizes alone
    del y
    assert ledger.live_bytes == 2 * KIB + 2 * KIB + 4
    z.backward()
    del z
    assert ledger.live_bytes == 4 * KIB  # x and its gradient
    x.grad = None
    assert ledger.live_bytes == 2 * KIB


def test_a_retained_graph_still_counts(ledger):
    x = kib().requires_grad_()
    z = x.exp().sum()
    z.backward(retain_graph=True)
    assert ledger.live_bytes == 3 * KIB + 4
    z.backward()
    assert ledger.live_bytes == 2 * KIB + 4


def test_an_operation_that_fails_makes_nothing():
    with Ledger() as ledger:
        x, y = kib(1), kib(2)
        with pytest.raises(RuntimeError, match="size of tensor"):
            x + y

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x * 2)
                raise ArithmeticError

            @staticmethod
            def backward(ctx, grad):
                return grad

        with pytest.raises(ArithmeticError):
            Fails.apply(x.requires_grad_())
        gc.collect()
        assert ledger.live_bytes == 3 * KIB
        assert ledger.peak_bytes["init"] == 4 * KIB
        del x, y


def test_garbage_in_a_cycle_counts_until_it_is_collected(ledger):
    gc.collect()
    gc.disable()
    try:
        cycle = [kib()]
        cycle.append(cycle)
        del cycle
        assert ledger.live_bytes == KIB
    finally:
        gc.enable()
    gc.collect()
    assert ledger.live_bytes == 0


def test_dense_and_blocked_loss_show_the_blocks_that_are_alive_at_once():
    T, D, V, B = 256, 64, 8192, 1024
    hidden, weight, target = torch.randn(T, D), torch.randn(V, D), torch.randint(V, (T,))
    with torch.no_grad(), Ledger() as ledger:
        F.cross_entropy(hidden @ weight.T, target)
        assert ledger.peak_bytes["init"] == 2 * T * V * 4 + 2 * 4  # logits, log-softmax, loss and its weight
        ledger.start_step(1)
        lse = torch.full((T,), -torch.inf)
        for start in range(0, V, B):
            logits_TB = hidden @ weight[start : start + B].T
            tile_lse = logits_TB.logsumexp(1)
            del logits_TB
            lse = torch.logaddexp(lse, tile_lse)
        assert ledger.peak_bytes["init"] == T * B * 4 + 3 * T * 4


def test_phases_decide_the_category_of_births_unless_one_is_named(ledger):
    expected = {
        "init": "other",
        "forward": "layer working set",
        "head": "head tiles",
        "backward": "layer working set",
        "optimizer": "staging",
        "eval": "layer working set",
        "save": "staging",
        "resume": "staging",
    }
    kept = []
    for phase, category in expected.items():
        before = ledger.live_by_category
        with ledger.phase(phase):
            assert ledger.current_phase == phase
            kept.append(kib())
        assert {name for name in CATEGORIES if ledger.live_by_category[name] != before[name]} == {category}
    with ledger.phase("forward"), ledger.category("dispatch blocks"):
        kept.append(kib())
    assert ledger.live_by_category["dispatch blocks"] == KIB
    assert ledger.current_phase == "init"
    assert sum(ledger.live_by_category.values()) == ledger.live_bytes == 9 * KIB


def test_phases_nest_and_each_has_its_own_peak(ledger):
    with ledger.phase("forward"):
        kib(2)
        with ledger.phase("head"):
            kept = kib(3)
            kib(4)
        assert ledger.peak_bytes == {"forward": 3 * KIB, "head": 7 * KIB}  # forward goes on with what head left
    with ledger.phase("backward"):
        del kept
    assert ledger.peak_bytes == {"forward": 3 * KIB, "head": 7 * KIB, "backward": 3 * KIB}


def test_a_phase_ends_when_its_body_raises(ledger):
    with pytest.raises(KeyError), ledger.phase("save"), ledger.category("other"):
        raise KeyError
    assert ledger.current_phase == "init"
    with ledger.phase("save"):
        kept = kib()
    assert ledger.live_by_category["staging"] == KIB
    del kept


def test_a_step_records_its_own_peaks_and_keeps_those_of_the_run(ledger):
    with ledger.phase("forward"):
        kib(5)
    ledger.start_step(7)
    with ledger.phase("forward"):
        kib(2)
    memory = ledger.end_step()
    assert (memory.step, memory.peak_bytes, memory.peak_phase) == (7, 2 * KIB, "forward")
    assert ledger.run_peak_bytes == {"forward": 5 * KIB}


def test_the_owners_of_a_peak_are_those_of_that_moment_with_the_labels_they_got(ledger):
    with ledger.phase("optimizer"):
        state = kib(2)
        temporary = kib(3)
        del temporary
        later = kib(1)
        ledger.adopt(state, "optimizer state", owner="exp_avg")
    peak = ledger.end_step().phases["optimizer"]
    assert peak.peak_bytes == 5 * KIB
    assert peak.categories == {"optimizer state": 2 * KIB, "staging": 3 * KIB}
    assert [(held.owner, held.shape, held.total_bytes) for held in peak.owners] == [
        ("optimizer", (768,), 3 * KIB),
        ("exp_avg", (512,), 2 * KIB),
    ]
    del later


def test_fakes_that_are_not_the_runs_own_do_not_count():
    with Ledger() as ledger:
        with FakeTensorMode():
            fake = kib()
        assert ledger.live_bytes == 0
        real = kib()
        assert ledger.live_bytes == KIB
        ledger.adopt(fake, "other")
        assert ledger.live_bytes == KIB
        del real
    with FakeTensorMode(), Ledger() as ledger:
        own = kib()
        with FakeTensorMode():
            kib(2)
        assert ledger.peak_bytes["init"] == ledger.live_bytes == KIB
        del own


def test_meta_tensors_hold_no_bytes():
    with Ledger() as ledger:
        x = torch.empty(1000, device="meta")
        ledger.adopt(x * 2, "other")
    assert ledger.live_bytes == 0


def test_cuda_tensors_count_on_fakes_alone():
    with pytest.raises(ValueError, match="ProcessMeter"), Ledger(device_type="cuda"):
        pass
    with FakeTensorMode(), Ledger(device_type="cuda") as ledger:
        x = torch.zeros(256, device="cuda")
        y = x * 2
        on_cpu = kib(5)
        assert ledger.live_bytes == 2 * KIB
        del x, y, on_cpu


def test_a_ledger_that_is_not_entered_counts_nothing_and_is_in_nobodys_way():
    ledger = Ledger(budget_bytes=1)
    ledger.start_step(0)
    with ledger.phase("forward"), ledger.category("staging"):
        x = kib()
    assert ledger.end_step().peak_bytes == ledger.live_bytes == 0
    del x


def test_a_ledger_can_be_left_and_entered_again():
    ledger = Ledger()
    with ledger:
        x = kib(2)
    unseen = kib(8)
    assert ledger.live_bytes == 2 * KIB
    del x, unseen
    assert ledger.live_bytes == 0
    with ledger:
        y = kib()
    assert ledger.live_bytes == KIB
    del y
