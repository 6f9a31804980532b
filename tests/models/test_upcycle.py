"""A mixture made from a dense model: the same function at step 0, uneven routing, a class that transformers opens."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.cli.main import main
from planish.errors import UsageError
from planish.models.upcycle import upcycle
from planish.sections import MoeSection

MOE = MoeSection(experts=6, top_k=2)


@pytest.mark.parametrize(("family", "becomes"), [
    ("llama", "MixtralForCausalLM"), ("mistral", "MixtralForCausalLM"), ("qwen3", "Qwen3MoeForCausalLM"),
])  # fmt: skip
def test_the_same_function_at_step_0(tiny_model, family, becomes):
    dense = tiny_model(family).eval()
    mixture = upcycle(dense, MOE, seed=0).eval()
    assert type(mixture).__name__ == becomes
    ids = torch.arange(48).reshape(2, 24)
    with torch.no_grad():
        expected, got = dense(input_ids=ids).logits, mixture(input_ids=ids).logits
        loss, mixed = (model(input_ids=ids, labels=ids).loss for model in (dense, mixture))
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert mixed.item() == pytest.approx(loss.item(), abs=1e-6)


def test_tokens_go_to_different_experts(tiny_model):
    mixture = upcycle(tiny_model(), MOE, seed=0)
    chosen = []
    mixture.model.layers[0].mlp.gate.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    mixture(input_ids=torch.arange(200)[None])
    counts = torch.bincount(chosen[0].flatten(), minlength=6)
    assert (counts > 0).all()
    assert counts.max() > counts.min()


def test_a_run_upcycles_trains_and_saves_a_folder_that_transformers_opens(model_folder, text_file, tmp_path):
    words = ["train", "--model.from", str(model_folder()), "--model.moe", "{experts = 4, top_k = 2}"]
    words += ["--data.train", str(text_file), "--data.context", "32", "--train.steps", "2"]
    assert main([*words, "--save.dir", str(tmp_path / "run")]) == 0
    reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step-00000002")
    assert type(reopened).__name__ == "MixtralForCausalLM"
    assert reopened.config.num_local_experts == 4
    assert main([*words, "--save.dir", str(tmp_path / "run"), "--resume", "--train.steps", "3"]) == 0


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("gemma2", {}, "takes a dense llama, mistral or qwen3 model, got gemma2"),
        ("qwen3-moe", {}, "got qwen3_moe"),
        ("llama", {"attention_bias": True}, "cannot keep this model's `attention_bias`"),
    ],
)
def test_models_that_cannot_be_kept_are_refused(tiny_model, family, changes, said):
    with pytest.raises(UsageError, match=said):
        upcycle(tiny_model(family, **changes), MOE, seed=0)


def test_more_chosen_than_there_are_is_refused():
    with pytest.raises(ValueError, match="must not exceed"):
        MoeSection(experts=2, top_k=3)
