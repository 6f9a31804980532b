"""Two heads compared without their logits: against the textbook in float64, numerically, and by what they weigh."""

import dataclasses

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

from planish import linear_kl
from planish.memory.ledger import Ledger
from planish.peaks.vocab import divergence as module
from planish.peaks.vocab import reference
from planish.peaks.vocab.losses import linear_logprob
from planish.price.vocab import Phases
from planish.price.vocab_pair import kl_phases

KINDS = ("forward", "reverse", "jensen-shannon")
HOW = {"logit_scale": 0.5, "softcap": 4.0, "teacher_logit_scale": 2.0, "teacher_softcap": 9.0}
pytestmark = pytest.mark.filterwarnings("ignore:`tile_bytes`:UserWarning")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoHeads:
    """A student and a teacher over one vocabulary and the student's targets."""

    student: object
    teacher: object

    @property
    def operands(self):
        return self.student.hidden, self.student.weight, self.teacher.hidden, self.teacher.weight

    @property
    def biases(self):
        return {"bias": self.student.bias, "teacher_bias": self.teacher.bias}

    @property
    def leaves(self):
        return [*self.student.leaves, *self.teacher.leaves]

    def loss(self, **how):
        return linear_kl(*self.operands, self.student.target, **self.biases, **how)

    def exact(self, kind, *, temperature=1.0, beta=None, ce_weight=0.0, **how):
        """Return each token's loss by full logits in float64."""
        own = {name: how.get(name, default) for name, default in (("logit_scale", 1.0), ("softcap", None))}
        his = {name: how.get(f"teacher_{name}", default) for name, default in (("logit_scale", 1.0), ("softcap", None))}
        y = reference.logits(self.student.hidden, self.student.weight, self.student.bias, **own)
        t = reference.logits(self.teacher.hidden, self.teacher.weight, self.teacher.bias, **his)
        found = reference.divergence(y, t, kind=kind, temperature=temperature, beta=beta or 0.5)
        found = found.where(self.student.target != -100, 0.0)
        if ce_weight:
            found = found + ce_weight * reference.logprob(y, self.student.target)["nll"]
        return found


@pytest.fixture(scope="session")
def draw_two(draw_head):
    def draw(tokens, width, teacher_width, vocab, *, seed=0, frozen=(), teacher_frozen=("hidden", "weight"), **how):
        student = draw_head(tokens, width, vocab, seed=seed, frozen=frozen, **how)
        if how.get("bias") and "bias" not in teacher_frozen and "hidden" in teacher_frozen:
            teacher_frozen = (*teacher_frozen, "bias")
        teacher = draw_head(tokens, teacher_width, vocab, seed=seed + 1, frozen=teacher_frozen, **how)
        return TwoHeads(student=student, teacher=teacher)

    return draw


shapes = st.fixed_dictionaries(
    {
        "tokens": st.one_of(st.integers(0, 20), st.integers(21, 70)),
        "width": st.integers(1, 20),
        "teacher_width": st.integers(1, 30),
        "vocab": st.one_of(st.integers(1, 40), st.integers(1000, 1050), st.integers(2040, 3100)),
        "bias": st.booleans(),
        "ignored": st.sampled_from([0.0, 0.4, 1.0]),
        "frozen": st.sampled_from([(), ("hidden",), ("weight", "bias")]),
        "teacher_frozen": st.sampled_from([("hidden", "weight", "bias"), (), ("weight",)]),
        "scale": st.sampled_from([0.1, 1.0, 3.0]),
        "seed": st.integers(0, 2**31),
    }
)
settings_of_loss = st.fixed_dictionaries(
    {"temperature": st.sampled_from([1.0, 2.0, 0.7]), "ce_weight": st.sampled_from([0.0, 0.3])}
)


@settings(deadline=None, max_examples=60)
@given(
    shapes,
    settings_of_loss,
    st.sampled_from([("forward", None), ("reverse", None), ("jensen-shannon", None), ("jensen-shannon", 0.1)]),
    st.sampled_from([{}, HOW]),
    st.sampled_from([1, 2**18, 2**20, 2**26]),
)
def test_against_full_logits(draw_two, assert_all_close, shape, loss, kind, how, tile):
    heads, (divergence, beta) = draw_two(**shape), kind
    ours = heads.loss(divergence=divergence, beta=beta, reduction="none", tile_bytes=tile, **loss, **how)
    theirs = heads.exact(divergence, beta=beta, **loss, **how)
    assert_all_close([ours], [theirs], 1e-12)
    upstream = torch.randn(len(ours), dtype=torch.float64)
    mine, others = (torch.autograd.grad((each * upstream).sum(), heads.leaves) for each in (ours, theirs))
    assert_all_close(mine, others, 1e-10)


@pytest.mark.parametrize("divergence", KINDS)
def test_gradcheck(draw_two, divergence):
    heads = draw_two(5, 3, 4, 7, bias=True, ignored=0.3, teacher_frozen=())

    def loss(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias):
        return linear_kl(
            hidden, weight, teacher_hidden, teacher_weight, heads.student.target, bias=bias, teacher_bias=teacher_bias,
            divergence=divergence, temperature=1.5, ce_weight=0.2, softcap=3.0,
        )  # fmt: skip

    assert gradcheck(loss, heads.leaves)


@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_heads_are_exactly_nothing_apart(draw_head, divergence, dtype):
    head = draw_head(40, 16, 2500, dtype=dtype, bias=True, scale=3.0)
    pair = (head.hidden, head.weight, head.hidden.detach(), head.weight.detach())
    for temperature in (1.0, 3.0):
        loss = linear_kl(
            *pair, bias=head.bias, teacher_bias=head.bias.detach(), divergence=divergence, temperature=temperature
        )
        if divergence != "jensen-shannon":
            assert loss.item() == 0
        assert abs(loss.item()) < 1e-6
        assert all(grad.abs().max() < 1e-5 for grad in torch.autograd.grad(loss, head.leaves))


@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpoint_and_backward_twice(draw_two, divergence, use_reentrant):
    heads = draw_two(12, 4, 6, 50)
    _, weight, *teacher = heads.operands

    def loss(hidden):
        return linear_kl(hidden, weight, *teacher, divergence=divergence)

    checkpoint(loss, heads.student.hidden, use_reentrant=use_reentrant).backward()
    again = loss(heads.student.hidden)
    for _ in range(2):
        [grad, _] = torch.autograd.grad(again, heads.student.leaves, retain_graph=True)
        assert torch.equal(grad, heads.student.hidden.grad)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(again, heads.student.hidden, create_graph=True)


@pytest.mark.parametrize("loss", [{}, {"ce_weight": 0.3, "temperature": 2.0, "reduction": "none"}])
@pytest.mark.parametrize("divergence", KINDS)
def test_compiles_whole_for_any_number_of_tokens(draw_two, divergence, loss):
    def run(hidden, weight, bias, teacher_hidden, teacher_weight, teacher_bias, target):
        found = linear_kl(
            hidden, weight, teacher_hidden, teacher_weight, target, bias=bias, teacher_bias=teacher_bias,
            divergence=divergence, **loss, **HOW,
        )  # fmt: skip
        return found.sin().sum()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (12, 33):
        heads = draw_two(tokens, 4, 6, 50, bias=True, ignored=0.3, teacher_frozen=("weight",))
        operands = (*heads.operands[:2], heads.student.bias, *heads.operands[2:], heads.teacher.bias)
        ours, eager = (each(*operands, heads.student.target) for each in (compiled, run))
        torch.testing.assert_close(ours, eager)
        mine, others = (torch.autograd.grad(each, heads.leaves) for each in (ours, eager))
        torch.testing.assert_close(mine, others)


@pytest.mark.parametrize("divergence", KINDS)
def test_compiled_operators_are_declared_truthfully(draw_two, divergence):
    heads = draw_two(9, 4, 6, 50, dtype=torch.float32, bias=True, ignored=0.3, teacher_frozen=())
    heads.loss()
    operands = (*heads.operands[:2], heads.student.bias, *heads.operands[2:], heads.teacher.bias, heads.student.target)
    for temperature, hard in ((1.0, False), (2.0, True)):
        how = (torch.float32, torch.float32, divergence, temperature, 0.5, hard, -100, None, 1.0, None, 1.0, 3.0)
        torch.library.opcheck(torch.ops.planish.divergence_statistics, (*operands, *how))


def test_a_compiled_student_alone_is_trained(draw_two):
    heads = draw_two(9, 4, 6, 50, frozen=("weight",))
    compiled = torch.compile(heads.loss, fullgraph=True, backend="aot_eager")
    mine, others = (torch.autograd.grad(each(), heads.student.hidden)[0] for each in (compiled, heads.loss))
    torch.testing.assert_close(mine, others)


@pytest.mark.parametrize("divergence", KINDS)
def test_tokens_without_a_target_all_count(draw_two, assert_all_close, divergence):
    heads = draw_two(12, 4, 6, 50)
    loss = linear_kl(
        *(each.view(3, 4, -1) if len(each) == 12 else each for each in heads.operands), divergence=divergence
    )
    assert_all_close([loss], [heads.exact(divergence).mean()], 1e-12)


@pytest.mark.parametrize("divergence", KINDS)
def test_classes_that_both_exclude_count_for_nothing(draw_two, assert_all_close, divergence):
    heads = draw_two(12, 4, 6, 3000, bias=True)
    with torch.no_grad():
        for each in (heads.student, heads.teacher):
            each.bias[500:2900] = -torch.inf
    ours, theirs = heads.loss(divergence=divergence), heads.exact(divergence).mean()
    assert_all_close([ours], [theirs], 1e-12)
    y, t = (reference.logits(each.hidden, each.weight) for each in (heads.student, heads.teacher))
    keep = [*range(500), *range(2900, 3000)]
    kept = (each[:, keep] + side.bias[keep] for each, side in ((y, heads.student), (t, heads.teacher)))
    [d_hidden] = torch.autograd.grad(reference.divergence(*kept, kind=divergence).mean(), heads.student.hidden)
    assert_all_close([torch.autograd.grad(ours, heads.student.hidden)[0]], [d_hidden], 1e-10)


@pytest.mark.parametrize(("divergence", "who"), [("forward", "student"), ("reverse", "teacher")])
def test_a_class_that_one_side_alone_excludes_is_as_good_as_infinite(draw_two, divergence, who):
    heads = draw_two(12, 4, 6, 300, bias=True)
    with torch.no_grad():
        getattr(heads, who).bias[100] = -torch.inf
    assert heads.loss(divergence=divergence) > 1e290
    other = "reverse" if divergence == "forward" else "forward"
    assert heads.loss(divergence=other).isfinite()
    assert heads.loss(divergence=other) < 1e3


@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize("poisoned", ["student", "teacher"])
def test_what_is_not_finite_is_never_hidden(draw_two, divergence, poisoned):
    heads = draw_two(12, 4, 6, 2100)
    with torch.no_grad():
        getattr(heads, poisoned).hidden[3, 0] = torch.nan
    losses = heads.loss(divergence=divergence, reduction="none")
    assert losses.isnan().tolist() == [n == 3 for n in range(12)]
    [d_hidden] = torch.autograd.grad(losses.sum(), heads.student.hidden)
    assert d_hidden.isnan().any(1).tolist() == [n == 3 for n in range(12)]


@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("own", [False, True])
def test_low_precision_is_within_twice_full_logits(draw_two, with_instructions, divergence, dtype, own):
    with_instructions(own)
    heads = draw_two(60, 32, 48, 2100, dtype=dtype, scale=0.4)
    ours = heads.loss(divergence=divergence, tile_bytes=2**20)
    y, t = ((each.hidden @ each.weight.t()).float() for each in (heads.student, heads.teacher))
    plain = reference.divergence(y, t, kind=divergence).mean()
    exact = heads.exact(divergence).mean()
    mine, others, true = ([each, *torch.autograd.grad(each, heads.leaves)] for each in (ours, plain, exact))
    for a, b, c in zip(mine, others, true, strict=True):
        error, allowed = ((each.double() - c.double()).abs().max() for each in (a, b))
        assert error <= 2 * allowed + torch.finfo(a.dtype).eps * c.abs().max()


def test_an_lse_is_what_either_head_has_alone(draw_two, monkeypatch):
    heads, found = draw_two(60, 8, 12, 2500, dtype=torch.float32, ignored=0.3), {}
    statistics = module.pair_statistics
    monkeypatch.setattr(module, "pair_statistics", lambda *args: found.setdefault("all", statistics(*args)))
    heads.loss(tile_bytes=2**18)
    for name, each in (("lse", heads.student), ("teacher_lse", heads.teacher)):
        alone = linear_logprob(each.hidden, each.weight, heads.student.target, want=("lse",)).lse
        torch.testing.assert_close(found["all"][name], alone, rtol=1e-6, atol=1e-6)


@pytest.fixture
def planned(monkeypatch):
    """The (pair, tiling) of every call, as they are chosen."""
    calls = []

    def choose(pair, **budget):
        tiling = choose_pair_tiling(pair, **budget)
        calls.append((pair, tiling))
        return tiling

    choose_pair_tiling = module.choose_pair_tiling
    monkeypatch.setattr(module, "choose_pair_tiling", choose)
    return calls


def measure(heads, **how):
    with Ledger() as ledger:
        with ledger.phase("head"):
            loss = heads.loss(reduction="sum", **how)
        kept = ledger.live_bytes
        with ledger.phase("backward"):
            if heads.leaves:
                loss.backward()
    return Phases(forward=ledger.peak_bytes["head"], kept=kept, backward=ledger.peak_bytes["backward"])


@pytest.mark.parametrize("divergence", KINDS)
@pytest.mark.parametrize("loss", [{}, {"ce_weight": 0.1}, {"ce_weight": 0.1, "temperature": 2.0}])
@pytest.mark.parametrize(
    "given",
    [
        {"dtype": torch.float32},
        {"dtype": torch.float32, "bias": True, "ignored": 0.3},
        {"dtype": torch.bfloat16, "ignored": 0.3},
        {"dtype": torch.bfloat16, "bias": True, "frozen": ("weight",)},
        {"dtype": torch.float32, "teacher_frozen": ()},
        {"dtype": torch.bfloat16, "teacher_frozen": ("weight",), "bias": True},
    ],
)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tile_bytes", [2**18, 2**25])
def test_price_is_what_the_ledger_measures(
    draw_two, planned, with_instructions, own, given, loss, divergence, tile_bytes
):
    with_instructions(own)
    heads = draw_two(150, 48, 64, 2100, **given)
    measured = measure(heads, divergence=divergence, tile_bytes=tile_bytes, **loss)
    [(pair, tiling)] = planned
    assert measured == kl_phases(pair, tiling, num_valid=heads.student.num_valid)


def test_working_buffers_stay_within_their_bytes(draw_two, planned):
    for tokens in (600, 1200):
        heads = draw_two(tokens, 48, 64, 3000, dtype=torch.float32, teacher_frozen=())
        heads.loss(tile_bytes=2**20, divergence="jensen-shannon")
    for pair, tiling in planned:
        assert pair.workspace_bytes(tiling) <= 2**20


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"divergence": "sideways"}, ValueError, "`divergence` must be one of forward, reverse, jensen-shannon"),
        ({"beta": 0.5}, ValueError, "`beta` has no effect on the forward divergence"),
        ({"beta": 1.0, "divergence": "jensen-shannon"}, ValueError, r"`beta` must be in \(0, 1\), got 1.0"),
        ({"temperature": 0.0}, ValueError, "`temperature` must be above 0"),
        ({"ce_weight": -0.1}, ValueError, "`ce_weight` must be at least 0"),
        ({"target": None, "ce_weight": 1.0}, ValueError, "`ce_weight` needs `target`"),
        ({"reduction": "avg"}, ValueError, '`reduction` must be "mean", "sum" or "none"'),
        ({"teacher_weight": torch.ones(9, 5)}, ValueError, "`teacher_weight` must have the 10 rows of `weight`"),
        ({"teacher_hidden": torch.ones(4, 6)}, ValueError, "`teacher_hidden` must end in the weight's 5 columns"),
        ({"teacher_hidden": torch.ones(3, 5)}, ValueError, "of `teacher_hidden` without its last dimension"),
        ({"teacher_weight": torch.ones(10, 5).int()}, TypeError, "`teacher_weight` must be floating point"),
        ({"teacher_hidden": torch.ones(4, 5).double()}, TypeError, "must both be float64 or neither"),
    ],
)
def test_mistakes(change, error, words):
    arguments = {
        "hidden": torch.ones(4, 6), "weight": torch.ones(10, 6), "teacher_hidden": torch.ones(4, 5),
        "teacher_weight": torch.ones(10, 5), "target": torch.zeros(4, dtype=torch.long),
    }  # fmt: skip
    with pytest.raises(error, match=words):
        linear_kl(**{**arguments, **change})


def test_fakes_weigh_what_real_tensors_weigh(draw_two):
    heads = draw_two(100, 48, 64, 2100, dtype=torch.bfloat16)
    real, mode = measure(heads, divergence="jensen-shannon"), FakeTensorMode()

    def fake(head):
        made = {name: mode.from_tensor(getattr(head, name).detach()) for name in ("hidden", "weight", "target")}
        needed = {name: made[name].requires_grad_(getattr(head, name).requires_grad) for name in ("hidden", "weight")}
        return dataclasses.replace(head, **{**made, **needed})

    fakes = TwoHeads(student=fake(heads.student), teacher=fake(heads.teacher))
    with mode:
        assert measure(fakes, divergence="jensen-shannon") == real
