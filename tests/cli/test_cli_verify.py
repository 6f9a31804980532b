"""`planish verify`: holds for exact methods, and fails for a head that is wrong."""

import json

import pytest
import torch

from planish.cli.main import main


@pytest.mark.parametrize(("family", "dtype"), [
    ("llama", "fp32"), ("llama", "bf16"), ("gemma2", "fp32"), ("qwen3-moe", "bf16"), ("qwen3-moe", "fp32"),
])  # fmt: skip
def test_exact_methods_are_as_exact_as_the_plain_way(model_folder, text_file, capsys, family, dtype):
    words = ["verify", "--model.from", str(model_folder(family)), "--data.train", str(text_file)]
    assert main([*words, "--data.context", "64", "--model.dtype", dtype, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["holds"]
    names = [each["name"] for each in tree["differences"]]
    assert names[0] == "loss"
    assert "model.layers.*.self_attn.q_proj.weight" in names
    assert all(0 < each["plain"] < 0.1 for each in tree["differences"])


def test_a_wrong_gradient_is_found_and_named(model_folder, text_file, capsys, monkeypatch):
    from planish.models import head

    exact = head.linear_cross_entropy
    monkeypatch.setattr(
        head, "linear_cross_entropy", lambda hidden, *rest, **named: exact(hidden * 1.001, *rest, **named)
    )
    words = ["verify", "--model.from", str(model_folder()), "--data.train", str(text_file), "--data.context", "64"]
    assert main([*words, "--model.dtype", "fp32"]) == 6
    said = capsys.readouterr()
    assert "the first is loss" in said.err
    assert "more than allowed" in said.out


def test_the_model_is_left_as_it_was(tiny_model):
    from contextlib import ExitStack

    from planish.memory.ledger import Ledger
    from planish.methods import Plan
    from planish.train.engine import build_engine
    from planish.train.facts import MeasuredFacts

    model = tiny_model()
    before = model.config._attn_implementation, {name: param.clone() for name, param in model.named_parameters()}
    with ExitStack() as scope:
        build_engine(lambda: model, Plan(), tokens=8, ledger=Ledger(), facts=MeasuredFacts(), scope=scope)
        assert model.is_activation_checkpointing
    assert not model.is_activation_checkpointing
    assert model.config._attn_implementation == before[0]
    assert all(torch.equal(param, before[1][name]) for name, param in model.named_parameters())
