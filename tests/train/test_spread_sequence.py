"""Rows over ranks in training: the numbers of one process, whether heads can be dealt out or not."""

from contextlib import ExitStack

import pytest
import torch

from planish.comm.ring import Circle
from planish.comm.world import ALONE
from planish.errors import UsageError
from planish.memory.ledger import Ledger
from planish.methods import Plan
from planish.models.install import install
from planish.shapes import spans
from planish.train.evaluate import evaluate
from planish.train.job import build
from train.rank_steps import train_in_float64

SPANS = {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}
WINDOW = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
FAST = [
    ("llama", {"dp": 2, "cp": 2}, {}, []),
    ("mistral", {"dp": 4, "cp": 4}, {}, []),  # a window; two key heads on four ranks
    ("gpt-oss", {"dp": 4, "cp": 2}, SPANS, [("plan.dispatch", "pipelined")]),  # sinks, windows; two groups of ranks
]
SLOW = [
    ("qwen3", {"dp": 3, "cp": 3}, {}, []),  # rows of 16 in spans of 5, 5 and 6
    ("qwen3", {"replicate": 2, "dp": 2, "cp": 2}, {}, []),
    ("gemma2", {"dp": 2, "cp": 2}, SPANS, []),
    ("gemma3", {"dp": 2, "cp": 2}, WINDOW, []),
    ("deepseek-v3", {"dp": 2, "cp": 2}, {}, [("plan.dispatch", "pipelined")]),
    ("llama", {"dp": 2, "cp": 2}, {}, [("data.pack", "none")]),
    ("llama", {"dp": 4, "cp": 4}, SPANS, [("data.pack", "none"), ("data.context", 7), ("train.global_tokens", 56)]),
    ("llama", {"dp": 2, "cp": 2}, SPANS, [("plan.boundary.keep_attention", True)]),
    ("llama", {"dp": 2, "cp": 2}, {}, [("plan.boundary.keep_attention", True)]),
]
LOOSE = ("gemma2", "gemma3", "gpt-oss", "deepseek-v3")  # parts of them compute in float32, whatever the model's dtype


@pytest.mark.parametrize(
    ("family", "mesh", "config", "settings"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_rows_over_ranks_are_those_of_one_process(
    run_of, tiny_model, tiny_tokenizer, ranks, family, mesh, config, settings
):
    one, many = run_of(family, None, *settings, **config), run_of(family, mesh, *settings, **config)

    def model():
        return tiny_model(family, dtype=torch.float64, **config)

    loose = family in LOOSE
    expected, weights = train_in_float64(one, model(), tiny_tokenizer, ALONE)
    for found, found_weights in ranks(lambda world: train_in_float64(many, model(), tiny_tokenizer, world), **mesh):
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=1e-6 if loose else 1e-12)
        for name, weight in weights.items():
            assert torch.allclose(found_weights[name], weight, rtol=1e-10, atol=1e-5 if loose else 1e-12), name


@pytest.mark.parametrize("given", ["labels", "shift_labels"])
def test_a_models_own_loss_shifts_labels_across_spans(tiny_model, ranks, given):
    """The mean over what counts in all spans; the label after a span's last token is another rank's."""
    rows, width = 2, 11
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 300, (rows, width), generator=generator)
    labels = torch.where(torch.rand(rows, width, generator=generator) < 0.3, -100, ids)
    bounds, positions = (0, 4, 11, 18, 22), torch.tensor([[*range(4), *range(7)], [*range(7), *range(4)]])

    def loss_and_gradients(circle):
        model = tiny_model("llama", dtype=torch.float64)
        installed = install(model, Plan(), sequence=circle)
        own = slice(0, width) if circle is None else spans(width, circle.size)[circle.rank]
        shifted = torch.cat([labels[:, 1:], torch.full((rows, 1), -100)], 1)
        given_labels = {given: (labels if given == "labels" else shifted)[:, own]}
        inputs = {"input_ids": ids[:, own], "position_ids": positions[:, own], "cu_seq_lens_q": bounds}
        loss = model(**inputs, **given_labels, use_cache=False).loss
        loss.backward()
        installed.undo()
        return loss.item(), {name: each.grad for name, each in model.named_parameters()}

    expected, grads = loss_and_gradients(None)
    answers = ranks(lambda world: loss_and_gradients(world.circle), dp=3, cp=3)
    assert sum(loss for loss, _ in answers) == pytest.approx(expected, rel=1e-12)
    for name, grad in grads.items():
        assert torch.allclose(sum(each[name] for _, each in answers), grad, rtol=1e-10, atol=1e-13), name


def test_evaluation_and_bits_per_byte_are_those_of_one_process(run_of, tiny_tokenizer, text_file, ranks):
    settings = [("data.eval", [str(text_file)]), ("data.eval_tokens", 16 * 7)]
    one, many = run_of("llama", None, *settings), run_of("llama", {"dp": 4, "cp": 2}, *settings)

    def held_out(run, world):
        with ExitStack() as scope:
            job = build(run, scope.enter_context(Ledger()), scope, world)
            return evaluate(job.engine, job.eval_batches())

    alone = held_out(one, ALONE)
    for found in ranks(lambda world: held_out(many, world), dp=4, cp=2):
        assert found.num_valid == alone.num_valid
        assert found.loss == pytest.approx(alone.loss, rel=1e-6)
        assert found.bits_per_byte == pytest.approx(alone.bits_per_byte, rel=1e-6)


@pytest.mark.parametrize(("settings", "words"), [
    ([("mesh.dp", 4), ("mesh.cp", 3)], r"`mesh.cp` \(3\) must divide `mesh.dp` \(4\); one of 1, 2, 4."),
    ([("mesh.dp", 2), ("mesh.cp", 2), ("plan.attention", "plain")], "`plan.attention` = packed alone can do; set it"),
    ([("mesh.dp", 32), ("mesh.cp", 32)], r"`mesh.cp` \(32\) must not exceed `data.context` \(16\)"),
    ([("mesh.dp", 4), ("mesh.cp", 2), ("train.global_tokens", 48)], r"the ranks of `mesh` / `mesh.cp` \(16 x 2 x 2\)"),
])  # fmt: skip
def test_settings_that_cannot_be_are_refused(run_of, settings, words):
    with pytest.raises(UsageError, match=words):
        run_of("llama", None, *settings)


@pytest.mark.parametrize(("family", "config", "words"), [
    ("nemotron-h", {"layers_block_type": ["attention", "mamba"]}, "carries a state along whole rows; leave"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "the 'dynamic' rotary tables of LlamaForCausalLM depend on whole ones; set `model.rope`",
    ),
])  # fmt: skip
def test_models_that_mix_tokens_otherwise_are_refused(tiny_model, family, config, words):
    with pytest.raises(UsageError, match=words):
        install(tiny_model(family, **config), Plan(), sequence=Circle(rank=0, size=2, group=None))
