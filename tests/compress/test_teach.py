"""Global distillation: the loss against dense formulas, teachers streamed or whole, runs with budget and resume."""

import json
import shutil
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import cosine_similarity, kl_div

from planish.cli.main import main
from planish.compress.realise import write_child
from planish.compress.space import Architecture, Choice, KeepHeads, NoAttention, Width
from planish.compress.teach import cosine_apart

SMALL = Architecture(
    layers=(
        Choice(attention=NoAttention(), ffn=Width(width=24)),
        Choice(attention=KeepHeads(kv_heads=1), ffn=Width(width=48)),
        Choice(attention=KeepHeads(kv_heads=4), ffn=Width(width=16)),
    )
)


@pytest.fixture
def pair(library, parent, tiny_tokenizer, tmp_path):
    """Return the folders of a parent and its child in float32."""
    model = parent("llama")
    model.float().save_pretrained(tmp_path / "parent")
    tiny_tokenizer.save_pretrained(tmp_path / "parent")
    write_child(library(), SMALL, tmp_path / "child")
    tiny_tokenizer.save_pretrained(tmp_path / "child")
    return tmp_path / "parent", tmp_path / "child"


@pytest.fixture
def run(pair, text_file, tmp_path):
    parent, child = pair

    def make(name, *words, model=child, teacher=parent):
        settings = {
            "model.from": model,
            "model.dtype": "fp32",
            "data.train": text_file,
            "data.context": 64,
            "train.global-tokens": 256,
            "train.steps": 12,
            "train.lr": 3e-3,
            "train.warmup": 1,
            "save.dir": tmp_path / name,
            "distil.from": teacher,
        }
        flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
        code = main(["train", *flags, *words])
        path = tmp_path / name / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return code, [each["loss"] for each in lines if "grad_norm" in each]

    return make


def test_cosines_and_their_gradient():
    generator = torch.Generator().manual_seed(0)
    found, expected = (torch.randn(2, 3, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    counts = torch.tensor([[True, False, True], [True, True, False]])
    found.requires_grad_()
    loss = cosine_apart(found, expected, counts)
    dense = (1 - cosine_similarity(found, expected, dim=-1))[counts].sum()
    torch.testing.assert_close(loss, dense, rtol=1e-12, atol=1e-12)
    [mine], [theirs] = (torch.autograd.grad(each, found) for each in (loss, dense))
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: cosine_apart(x, expected, counts), found)
    half = cosine_apart(found.detach().bfloat16().requires_grad_(), expected.bfloat16(), counts)
    assert abs(half.item() - loss.item()) < 0.05


def test_the_first_loss_is_the_dense_formula(run, pair, text_file, tiny_tokenizer, tmp_path):
    """KL of full logits and cosines of every layer over the run's own first batch, documents apart."""
    from transformers import AutoModelForCausalLM

    from planish.data.feed import open_feed

    code, losses = run("first", "--train.steps", "1", "--distil.lm", "0.5")
    assert code == 0
    feed = open_feed((str(text_file),), tokenizer=tiny_tokenizer, context=64, rows=4, seed=0)
    batch = feed.next()
    teacher, student = (AutoModelForCausalLM.from_pretrained(each).float().eval() for each in pair)
    total = 0.0
    bounds = batch.cu_seq_lens
    ids, target = batch.input_ids.flatten(), batch.target.flatten()
    for start, end in pairwise(bounds):
        here, mask = ids[None, start:end], target[start:end] != -100
        said, wanted = student(here, output_hidden_states=True), teacher(here, output_hidden_states=True)
        q, p = (each.logits[0].log_softmax(-1) for each in (said, wanted))
        total += kl_div(q, p, log_target=True, reduction="none").sum(-1)[mask].sum()
        total -= 0.5 * q[torch.arange(len(q)), target[start:end].clamp(min=0)][mask].sum()
        states = [states_of(each, here) for each in (student, teacher)]
        for mine, theirs in zip(*states, strict=True):
            total += (1 - cosine_similarity(mine, theirs, dim=-1))[0][mask].sum()
    assert losses[0] == pytest.approx((total / batch.num_valid).item(), rel=1e-5)


def states_of(model, ids):
    """Return what comes out of each layer."""
    seen = []
    hooks = [each.register_forward_hook(lambda _, __, output: seen.append(output)) for each in model.model.layers]
    model(ids)
    for hook in hooks:
        hook.remove()
    return seen


def test_a_teacher_in_memory_or_streamed_teaches_the_same(run):
    whole, streamed = run("whole"), run("streamed", "--distil.stream")
    assert whole == streamed
    assert whole[1][-1] < 0.9 * whole[1][0]


def test_boundaries_elsewhere_and_a_resumed_run_change_nothing(run, tmp_path):
    code, plain = run("plain", "--train.schedule", "constant")
    assert code == 0
    elsewhere = run(
        "elsewhere", "--train.schedule", "constant", "--plan.boundary", "offload", "--plan.boundary.disk", "1MiB"
    )
    assert elsewhere == (0, pytest.approx(plain, rel=1e-6))
    code, begun = run("resumed", "--train.schedule", "constant", "--train.steps", "5")
    assert (code, begun) == (0, plain[:5])
    assert main(["train", str(tmp_path / "resumed"), "--resume", "--train.steps", "12"]) == 0
    lines = (tmp_path / "resumed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(each)["loss"] for each in lines if "grad_norm" in each] == plain


def test_a_budget_holds_the_teacher_too(run, capsys):
    code, _ = run("over", "--memory", "400KiB")
    assert code == 4
    assert "teacher" in capsys.readouterr().err


def test_a_trained_child_is_a_child(run, tmp_path):
    from transformers import AutoModelForCausalLM

    assert run("taught")[0] == 0
    folder = tmp_path / "taught" / "checkpoints" / "step-00000012"
    assert (folder / "child.py").exists()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.per_layer_config[0].skip == ["attention"]
    assert json.loads((folder / "config.json").read_text())["auto_map"]["AutoConfig"] == "child.Child"


def test_what_cannot_teach_is_refused(run, pair, tiny_model, tiny_tokenizer, tmp_path, capsys):
    other = tmp_path / "other"
    tiny_model("llama", vocab_size=400).save_pretrained(other)
    tiny_tokenizer.save_pretrained(other)
    assert run("vocabulary", teacher=other)[0] == 2
    assert "`distil.from` has 400 tokens, the model 300" in capsys.readouterr().err
    assert run("plain-student", model=pair[0])[0] == 2
    assert "`distil.cosine` compares a compressed child with its parent" in capsys.readouterr().err
    assert run("nothing", "--distil.kl", "0", "--distil.cosine", "0")[0] == 2
    assert "must not be negative, and not all 0" in capsys.readouterr().err
    assert run("hidden-apart", "--distil.cosine", "0", "--train.steps", "1", model=pair[0])[0] == 0
    shutil.rmtree(other)


@pytest.mark.parametrize("boundary", ["plain", "checkpoint"])
def test_what_a_child_will_hold_in_training_is_told_beforehand(pair, text_file, tmp_path, boundary):
    """Layers of different makes: the dry run's peaks are never below the run's, and next to nothing above."""
    words = ["--data.context", "64", "--train.global-tokens", "128", "--train.steps", "3", "--memory", "64MiB"]
    folder = tmp_path / "alone"
    source = ["--model.from", str(pair[1]), "--data.train", str(text_file), "--save.dir", str(folder)]
    assert main(["train", *source, *words, "--plan.boundary", boundary]) == 0
    told = json.loads((folder / "plan.json").read_text())
    steps = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    held = max(phase["peak_bytes"] for each in steps for phase in each["phases"].values())
    assert held <= told["peak_bytes"] <= 1.02 * held
