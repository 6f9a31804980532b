"""Owners by module: forward, in recomputation, and in backward node by node."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from planish.memory.ledger import Ledger


class SpyLedger(Ledger):
    """Writes down (phase, operation, shape, owner, category) of every birth, and to whom each gradient was born."""

    def __init__(self):
        super().__init__()
        self.births, self.gradient_owners, self._func = [], {}, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._func = func
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _born(self, storage, tensor):
        record = super()._born(storage, tensor)
        name = self._func.overloadpacket.__name__
        self.births.append((self.current_phase, name, tuple(tensor.shape), record.owner, record.category))
        return record

    def _adopt_gradient(self, name, parameter):
        self.gradient_owners[name] = self._book.entries[parameter.grad.untyped_storage()._cdata].record.owner
        super()._adopt_gradient(name, parameter)


def spied_step(run):
    with SpyLedger() as ledger, ledger.watch(run.model, head=run.head):
        run.step(ledger)
    return ledger


@pytest.mark.parametrize("checkpointed", [False, True])
def test_each_gradient_is_born_to_the_module_of_its_parameter(tiny_run, checkpointed):
    run = tiny_run(checkpointed=checkpointed)
    owners = spied_step(run).gradient_owners
    assert owners == {name: name.rpartition(".")[0] for name, _ in run.model.named_parameters()}


@pytest.mark.parametrize("checkpointed", [False, True])
def test_backward_of_what_is_not_a_module_belongs_to_the_module_that_called_it(tiny_run, checkpointed):
    births = spied_step(tiny_run(checkpointed=checkpointed)).births
    backward = [(name, owner, category) for phase, name, _, owner, category in births if phase == "backward"]
    attention = [owner for name, owner, _ in backward if "attention" in name and name.endswith("backward")]
    assert attention == [f"model.layers.{layer}.self_attn" for layer in (2, 1, 0) for _ in range(3)]
    assert [owner for name, owner, _ in backward if name == "silu_backward"] == [
        f"model.layers.{layer}.mlp.act_fn" for layer in (2, 1, 0)
    ]
    assert [owner for name, owner, _ in backward if name == "embedding_dense_backward"] == ["model.embed_tokens"]
    assert [owner for name, owner, _ in backward if "softmax" in name] == ["loss"]
    assert {owner for _, owner, category in backward if category == "head tiles"} == {"loss", "lm_head"}
    # Rotary embedding is a function that attention calls: its backward slices, pads and adds.
    assert {owner for name, owner, _ in backward if name == "slice_backward" and owner != "loss"} == {
        f"model.layers.{layer}.self_attn" for layer in range(3)
    }


def test_recomputation_has_the_owners_of_the_forward(tiny_run):
    births = spied_step(tiny_run(checkpointed=True)).births
    for layer in range(3):
        path = f"model.layers.{layer}"
        own = [each for each in births if each[3] == path or each[3].startswith(f"{path}.")]
        forward = [each[1:] for each in own if each[0] == "forward"]
        again = [each[1:] for each in own if each[0] == "backward"]
        needed = len(forward) - 2  # it stops once down_proj has its input: neither its output nor the sum is made
        assert again[:needed] == forward[:needed]
        assert again[needed][3] == "layer working set"
        assert again[needed][2] == f"{path}.mlp.down_proj"


@pytest.mark.parametrize("checkpointed", [False, True])
def test_watching_keeps_nothing_alive(tiny_run, checkpointed):
    peaks = []
    for watched in (False, True):
        run = tiny_run(checkpointed=checkpointed)
        with Ledger() as ledger:
            ledger.adopt([*run.model.parameters(), *run.model.buffers()], "parameters")
            if watched:
                with ledger.watch(run.model, head=run.head):
                    run.step(ledger)
            else:
                run.step(ledger)
            peaks.append((ledger.peak_bytes, ledger.live_bytes))
    assert peaks[0] == peaks[1]


def test_watching_is_undone(tiny_run):
    run = tiny_run()
    ledger = Ledger()
    with pytest.raises(KeyError), ledger, ledger.watch(run.model, head=run.head):
        raise KeyError
    for module in run.model.modules():
        assert not {**module._forward_hooks, **module._forward_pre_hooks, **module._forward_hooks_always_called}
    assert not any(each._post_accumulate_grad_hooks for each in run.model.parameters())


def test_parameters_buffers_and_gradients_are_adopted_under_their_names(tiny_run):
    run = tiny_run()
    with Ledger() as ledger, ledger.watch(run.model, head=run.head):
        run.step(ledger)
        held = {(each.owner, each.category): each.count for each in ledger.owners()}
        assert held[("model.layers.*.self_attn.q_proj.weight", "parameters")] == 3
        assert held[("model.layers.*.self_attn.q_proj.weight", "gradients")] == 3
        assert held[("lm_head.weight", "gradients")] == 1
        assert any(owner == "AdamW" and category == "optimizer state" for owner, category in held)
        assert ledger.live_by_category["other"] == sum(each.nbytes for each in run.model.buffers())


def test_the_loss_of_the_whole_model_is_the_heads(tiny_run):
    """The model computes its own loss inside its forward: what follows `lm_head` there counts as head tiles."""
    run = tiny_run()
    with SpyLedger() as ledger, ledger.watch(run.model, head=run.head):
        with ledger.phase("forward"):
            loss = run.model(input_ids=run.ids, labels=run.ids).loss
        with ledger.phase("backward"):
            loss.backward()
    softmax = [each for each in ledger.births if "softmax" in each[1]]
    assert [(phase, owner, category) for phase, _, _, owner, category in softmax] == [
        ("forward", "loss", "head tiles"),
        ("backward", "loss", "head tiles"),
    ]
    assert {each[3] for each in ledger.births if each[4] == "head tiles"} == {"loss", "lm_head"}


class Block(nn.Module):
    """Its own operations come before, between and after those of its modules; it may checkpoint them itself."""

    def __init__(self, *, checkpointed=False):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.checkpointed = checkpointed

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)

    def body(self, x):
        return self.second(self.first(x.sin()).exp()).tanh()


class Around(nn.Module):
    """A block, called plainly or checkpointed as a whole."""

    def __init__(self, block, *, checkpointed=False):
        super().__init__()
        self.block = block
        self.checkpointed = checkpointed

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)


@pytest.mark.parametrize(
    ("model", "early_stop"),
    [
        (Around(Block()), True),
        (Around(Block(), checkpointed=True), True),
        (Around(Block(checkpointed=True)), True),
        (Around(Block(), checkpointed=True), False),
    ],
    ids=["plain", "the call", "the body", "no early stop"],
)
def test_functions_between_modules_belong_to_the_module_around_them(model, early_stop):
    with SpyLedger() as ledger, ledger.watch(model), set_checkpoint_early_stop(early_stop):
        with ledger.phase("forward"):
            loss = model(torch.randn(4, 8, requires_grad=True).mul(1)).square().sum()
        with ledger.phase("backward"):
            loss.backward()
    owners = {}
    for phase, name, shape, owner, _ in ledger.births:
        if shape != ():
            owners.setdefault((phase, name), []).append(owner)
    assert owners["forward", "exp"] == ["block"]
    assert owners["forward", "addmm"] == ["block.first", "block.second"]
    again = model.checkpointed or model.block.checkpointed
    assert owners.get(("backward", "exp"), []) == ["block"] * again
    assert owners.get(("backward", "addmm"), []) == ["block.first", "block.second"] * again
    assert set(owners["backward", "mm"]) == {"block.first", "block.second"}
    assert owners["backward", "cos"] == ["block"]
    # Without early stop nothing says when recomputation ends: the node that asked for it goes on under what is around.
    assert owners["backward", "tanh_backward"] == ["block" if early_stop else "Around"]


def test_each_backward_begins_with_the_loss(tiny_run):
    run = tiny_run()
    with SpyLedger() as ledger, ledger.watch(run.model, head=run.head):
        for _ in range(2):
            run.step(ledger)
    first = [owner for _, name, _, owner, _ in ledger.births if name == "nll_loss_backward"]
    assert first == ["loss", "loss"]


def test_what_other_hooks_of_a_module_make_is_the_modules():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_forward_pre_hook(lambda module, args: args[0].sin())
    model[0].register_forward_hook(lambda module, args, output: output.cos())
    with SpyLedger() as ledger, ledger.watch(model):
        model(torch.randn(4, 8))
    assert [(name, owner) for _, name, _, owner, _ in ledger.births] == [
        ("randn", "init"),
        ("sin", "0"),
        ("addmm", "0"),
        ("cos", "0"),
    ]


def test_a_forward_that_fails_leaves_the_owners_in_order():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(4, 4))
    with SpyLedger() as ledger, ledger.watch(model):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(4, 8))
        ledger.births.clear()
        with ledger.phase("forward"):
            torch.ones(4)
            model[0](torch.randn(4, 8))
    assert [(name, owner) for _, name, _, owner, _ in ledger.births] == [
        ("ones", "forward"),
        ("randn", "forward"),
        ("addmm", "0"),
    ]


def test_models_that_return_tuples_and_dicts_and_take_keywords_are_followed():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, *, x, options):
            return {"y": (self.linear(x).exp(), options)}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.two = Two()

        def forward(self, x):
            return self.two(x=x.cos(), options=None)["y"][0].sin()

    model = Model()
    with SpyLedger() as ledger, ledger.watch(model):
        loss = F.mse_loss(model(torch.randn(4, 8, requires_grad=True)), torch.zeros(4, 8))
        with ledger.phase("backward"):
            loss.backward()
    owners = [(name, owner) for phase, name, _, owner, _ in ledger.births if phase == "backward"]
    assert ("mse_loss_backward", "loss") in owners
    assert ("cos", "Model") in owners  # the derivative of the sine
    assert ("mm", "two.linear") in owners
    assert ("sin", "Model") in owners
    assert list(dict.fromkeys(owner for _, owner in owners)) == ["backward", "loss", "Model", "two", "two.linear"]
