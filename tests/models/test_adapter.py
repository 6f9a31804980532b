"""LoRA: frozen weights stay, peft opens what a run saves, every rank and every resume the same numbers."""

import dataclasses

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from planish.cli.main import main
from planish.errors import UsageError
from planish.methods import Blocked, Plan
from planish.models.install import install
from planish.runfile import load, split_flags
from planish.train.dry_run import dry_run
from planish.train.predict import predict


@pytest.fixture
def words(model_folder, text_file, tmp_path):
    return [
        *("--model.from", str(model_folder())),
        *("--model.adapter.rank", "4"),
        *("--model.dtype", "fp32"),
        *("--data.train", str(text_file)),
        *("--data.context", "32"),
        *("--train.lr", "1e-2"),
        *("--save.dir", str(tmp_path / "run")),
    ]


def weights(folder):
    return AutoPeftModelForCausalLM.from_pretrained(folder).state_dict()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_run_saves_what_peft_opens_and_resumes_bitwise(words, tmp_path, capsys):
    assert main(["train", *words, "--train.steps", "4", "--train.schedule", "constant", "--save.every", "2"]) == 0
    at_once = weights(tmp_path / "run" / "checkpoints" / "step-00000004")
    base = AutoModelForCausalLM.from_pretrained(words[1]).state_dict()
    frozen = {name.replace("base_model.model.", "").replace("base_layer.", ""): t for name, t in at_once.items()}
    assert all(torch.equal(frozen[name], tensor) for name, tensor in base.items())
    learned = [tensor for name, tensor in at_once.items() if "lora_B" in name]
    assert len(learned) == 14
    assert all(tensor.any() for tensor in learned)
    again = [*words[:-1], str(tmp_path / "again"), "--train.schedule", "constant"]
    assert main(["train", *again, "--train.steps", "2"]) == 0
    assert main(["train", *again, "--train.steps", "4", "--resume"]) == 0
    resumed = weights(tmp_path / "again" / "checkpoints" / "step-00000004")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in at_once.items())
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "run"), "--prompt", "The", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.strip()


def test_frozen_weights_hold_no_gradients_and_no_state(words):
    run = load(None, split_flags(words)[0])
    whole = dataclasses.replace(run, model=dataclasses.replace(run.model, adapter=None))
    adapted, full = dry_run(run).phases["optimizer"].categories, dry_run(whole).phases["optimizer"].categories
    thin = adapted["parameters"] - full["parameters"]
    assert 0 < thin < full["parameters"]
    assert adapted["gradients"] == thin
    assert 2 * thin <= adapted["optimizer state"] <= 2 * thin + 4 * 28
    prediction = predict(run, lambda _: None)
    assert prediction.table is None
    assert prediction.estimate.phases["optimizer"].categories["gradients"] == thin


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"model.adapter.targets": ["nothing"]}, "`model.adapter.targets` ['nothing'] do not fit the model"),
    ({"model.adapter.alpha": 0}, "`model.adapter.alpha` must be above 0"),
    ({"model.adapter.dropout": 1}, "`model.adapter.dropout` must be in [0, 1)"),
    ({"model.moe.experts": 2, "model.moe.top_k": 1}, "`model.moe` makes new ones"),
])  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused(words, capsys, changes, sentence):
    flags = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    assert main(["train", *words, *flags]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_install_takes_a_model_that_peft_has_wrapped(tiny_model):
    ids = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))

    def step(planned):
        model = tiny_model()
        torch.manual_seed(1)
        wrapped = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        installed = install(wrapped, Plan()) if planned else None
        output = wrapped(input_ids=ids, labels=ids)
        output.loss.backward()
        if installed is not None:
            assert output.logits is None
            installed.undo()
            assert wrapped(input_ids=ids).logits is not None
        return output.loss.detach(), {n: p.grad for n, p in wrapped.named_parameters() if p.grad is not None}

    (loss, grads), (planned_loss, planned_grads) = step(planned=False), step(planned=True)
    torch.testing.assert_close(planned_loss, loss, rtol=1e-6, atol=0)
    assert grads.keys() == planned_grads.keys()
    assert all("lora" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(planned_grads[name], grad, rtol=1e-4, atol=1e-7)


def adapted(model, **how):
    """Return `model` with LoRA on its head and one other layer, every matrix drawn."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False, lora_alpha=12, **how)
    return get_peft_model(model, config)


IDS = torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(0))


def step(wrapped, plan=None):
    """Return the loss and the adapters' gradients of one step, under transformers' own loss without a plan."""
    wrapped.zero_grad()
    installed = None if plan is None else install(wrapped, plan)
    output = wrapped(input_ids=IDS, labels=IDS)
    output.loss.backward()
    if installed is not None:
        assert (output.logits is None) == isinstance(plan.vocab, Blocked)
        installed.undo()
    return output.loss.detach(), {n: p.grad.clone() for n, p in wrapped.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("strategy", ["auto", "recompute"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_trl_4612_an_adapter_on_the_head_is_trained_without_the_sum(tiny_model, family, strategy):
    wrapped = adapted(tiny_model(family, attn_implementation="eager", tie_word_embeddings=False))
    (loss, grads), (planned_loss, planned_grads) = step(wrapped), step(wrapped, Plan(vocab=Blocked(strategy=strategy)))
    torch.testing.assert_close(planned_loss, loss, rtol=1e-5, atol=0)
    assert {name for name in grads if "lm_head" in name} == {
        f"base_model.model.lm_head.lora_{matrix}.default.weight" for matrix in "AB"
    }
    assert grads.keys() == planned_grads.keys()
    for name, grad in grads.items():
        assert grad.any()
        torch.testing.assert_close(planned_grads[name], grad, rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_on_the_head_are_switched_added_and_merged(tiny_model):
    wrapped = adapted(tiny_model(tie_word_embeddings=False))
    wrapped.add_adapter("second", LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    plan = Plan(vocab=Blocked())
    for names in (["default"], ["second"], ["default", "second"]):
        wrapped.base_model.set_adapter(names)
        (loss, _), (planned_loss, _) = step(wrapped), step(wrapped, plan)
        torch.testing.assert_close(planned_loss, loss, rtol=1e-5, atol=0)
    install(wrapped, plan)
    with wrapped.disable_adapter(), torch.no_grad():
        off = wrapped(input_ids=IDS, labels=IDS).loss
    assert abs(off - loss) > 1e-3
    wrapped.merge_adapter()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(input_ids=IDS, labels=IDS).loss, loss, rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
@pytest.mark.parametrize(("how", "kind"), [({"use_dora": True}, "DoraLinearVariant"), ({"lora_bias": True}, "a bias")])
def test_an_adapter_that_is_more_than_thin_matrices_is_refused(tiny_model, how, kind):
    wrapped = adapted(tiny_model(tie_word_embeddings=False), **how)
    install(wrapped, Plan())
    with pytest.raises(UsageError, match=f"adapter 'default' has {kind}"):
        wrapped(input_ids=IDS, labels=IDS)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_run_trains_an_adapter_on_the_head(model_folder, words, tmp_path):
    model_folder(tie_word_embeddings=False)
    targets = [*words, "--model.adapter.targets", "lm_head", "--train.steps", "2", "--train.schedule", "constant"]
    assert main(["train", *targets]) == 0
    learned = {n: t for n, t in weights(tmp_path / "run" / "checkpoints" / "step-00000002").items() if "lora_B" in n}
    assert list(learned) == ["base_model.model.lm_head.lora_B.default.weight"]
    assert all(tensor.any() for tensor in learned.values())


def test_an_adapter_on_a_head_that_is_also_the_embedding_is_refused(words, capsys):
    assert main(["train", *words, "--model.adapter.targets", "lm_head", "--train.steps", "2"]) == 2
    assert "merging the adapter would change both" in capsys.readouterr().err


def test_a_module_without_a_causal_lm_is_refused():
    with pytest.raises(UsageError, match="holds no transformers model"):
        install(torch.nn.Linear(2, 2), Plan())
