"""A model with a plan installed computes what transformers computes: loss, gradients, and nothing left behind."""

from dataclasses import replace

import pytest
import torch
from transformers import Trainer, TrainingArguments

import planish
from planish.errors import UsageError
from planish.methods import Batched, Blocked, Checkpoint, Offload, Packed, Plain, Plan
from planish.models.anatomy import find
from planish.models.head import head_loss
from planish.models.install import install

FAMILIES = ["llama", "qwen3", "qwen3-moe", "gemma2", "gemma3", "granite", "cohere"]
SEQUENCE = 24


def batch(vocab_size):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab_size, (2, SEQUENCE), generator=generator)
    target = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    target[0, 3:5] = -100
    return ids, target


def stock(model, ids, target):
    """Return transformers' own loss, summed over valid tokens, and its gradients."""
    loss = model(input_ids=ids, labels=ids, shift_labels=target, num_items_in_batch=1, use_cache=False).loss
    loss.backward()
    return loss.detach(), [param.grad.clone() for param in model.parameters()]


def ours(model, plan, ids, target):
    model.zero_grad()
    installed = install(model, plan, tokens=ids.numel())
    anatomy = find(model)
    bounds = {"cu_seq_lens_q": (0, SEQUENCE, 2 * SEQUENCE)} if isinstance(plan.attention, Packed) else {}
    hidden = anatomy.backbone(input_ids=ids, use_cache=False, **bounds).last_hidden_state
    loss = head_loss(anatomy, plan.vocab)(hidden, target, int((target != -100).sum()))
    loss.backward()
    installed.undo()
    return loss.detach(), [param.grad.clone() for param in model.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_plan_is_transformers_bit_for_bit(tiny_model, family):
    model = tiny_model(family, attn_implementation="eager").train()
    ids, target = batch(model.config.vocab_size)
    expected = stock(model, ids, target)
    loss, grads = ours(model, Plan.plain(), ids, target)
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(a, b) for a, b in zip(grads, expected[1], strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "plan",
    [
        Plan(attention=Packed(), vocab=Plain(), boundary=Plain()),
        Plan(attention=Plain(), vocab=Blocked(tile_bytes=2**16), boundary=Plain()),
        Plan(attention=Plain(), vocab=Plain(), boundary=Checkpoint()),
        Plan(vocab=Blocked(tile_bytes=2**16)),
    ],
)
def test_bounded_plans_agree_with_transformers_in_float64(tiny_model, family, plan):
    # The grouped products that transformers takes by default have no float64.
    experts = {"experts_implementation": "batched_mm"} if family == "qwen3-moe" else {}
    model = tiny_model(family, dtype=torch.float64, attn_implementation="eager", **experts).train()
    ids, target = batch(model.config.vocab_size)
    loss, grads = stock(model, ids, target)
    got, got_grads = ours(model, plan, ids, target)
    # Rotary tables, norms and routers are float32 in transformers whatever the model's dtype, in both runs alike.
    assert got.item() == pytest.approx(loss.item(), rel=1e-6)
    for a, b in zip(got_grads, grads, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6 * b.abs().max().item())


@pytest.mark.parametrize("family", FAMILIES)
def test_offloaded_boundaries_are_checkpointed_ones_bit_for_bit(tiny_model, family, tmp_path):
    model = tiny_model(family, num_hidden_layers=4, layer_types=None).train()
    ids, target = batch(model.config.vocab_size)
    base = replace(Plan.plain(), boundary=Checkpoint())
    loss, grads = ours(model, base, ids, target)
    offload = replace(base, boundary=Offload(disk=2**20, folder=tmp_path))
    got, got_grads = ours(model, offload, ids, target)
    assert torch.equal(got, loss)
    assert all(torch.equal(a, b) for a, b in zip(got_grads, grads, strict=True))


def test_offloading_needs_tokens_and_far_memory_and_leaves_nothing_behind_without(tiny_model, tmp_path):
    model = tiny_model()
    for boundary, tokens, said in (
        (Offload(disk=2**20), None, "needs `tokens`"),
        (Offload(), 8, "needs `host` or `disk`"),
        (Offload(disk=1, folder=tmp_path), 8, "holds no boundary"),
    ):
        with pytest.raises(UsageError, match=said):
            install(model, Plan(boundary=boundary), tokens=tokens)
        assert model.config._attn_implementation == "sdpa"
        assert not model.is_activation_checkpointing


@pytest.mark.parametrize("strategy", ["gradients-in-forward", "recompute"])
def test_nemo_rl_2363_a_tied_weight_gets_the_gradients_of_both_its_uses(tiny_model, strategy):
    model = tiny_model(tie_word_embeddings=True, dtype=torch.float64, attn_implementation="eager").train()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids, target = batch(model.config.vocab_size)
    stock(model, ids, target)
    both = model.lm_head.weight.grad.clone()
    ours(model, replace(Plan.plain(), vocab=Blocked(strategy=strategy)), ids, target)
    assert torch.allclose(model.lm_head.weight.grad, both, rtol=1e-5, atol=1e-6 * both.abs().max().item())
    head_alone = torch.autograd.grad(
        head_loss(find(model), Blocked(strategy=strategy))(
            model.model(input_ids=ids, use_cache=False).last_hidden_state.detach(), target, int((target != -100).sum())
        ),
        model.lm_head.weight,
    )[0]
    assert (both - head_alone).abs().max() > 1e-3 * both.abs().max()


def test_undo_puts_everything_back(tiny_model):
    model = tiny_model().train()
    before = model.config._attn_implementation
    installed = install(model, Plan())
    assert len(installed.replaced) == 3
    assert model.is_activation_checkpointing
    installed.undo()
    assert model.config._attn_implementation == before
    assert not model.is_activation_checkpointing


@pytest.mark.parametrize("family", FAMILIES)
def test_any_loop_gets_the_same_loss_and_no_logits(tiny_model, family):
    model = tiny_model(family, attn_implementation="eager").train()
    ids, target = batch(model.config.vocab_size)
    expected = model(input_ids=ids, labels=ids, use_cache=False)
    shifted = model(input_ids=ids, labels=ids, shift_labels=target, num_items_in_batch=40, use_cache=False).loss
    installed = planish.install(model, Plan(vocab=Blocked(tile_bytes=2**16)))
    got = model(input_ids=ids, labels=ids, use_cache=False)
    assert got.logits is None
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    again = model(input_ids=ids, labels=ids, shift_labels=target, num_items_in_batch=40, use_cache=False).loss
    assert again.item() == pytest.approx(shifted.item(), rel=1e-5)
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        tokens = model.generate(ids[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    installed.undo()
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, logits, atol=1e-4)
        assert torch.equal(model.generate(ids[:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0), tokens)


def test_hugging_face_trainer_trains_with_a_plan_installed(tiny_model, tiny_tokenizer, tmp_path):
    ids, _ = batch(len(tiny_tokenizer))
    losses = []
    for plan in (Plan.plain(), Plan(vocab=Blocked(tile_bytes=2**16))):
        model = tiny_model()
        planish.install(model, plan)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, report_to=[], logging_steps=1,
            use_cpu=True, disable_tqdm=True, save_strategy="no", seed=0,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in ids]
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)  # the log rounds to four digits


def test_padding_on_the_left_is_refused_and_on_the_right_is_harmless(tiny_model):
    model = tiny_model().train()
    ids, _ = batch(model.config.vocab_size)
    mask = torch.ones_like(ids)
    mask[1, -6:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    expected = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    planish.install(model, Plan(vocab=Blocked(tile_bytes=2**16)))
    got = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(UsageError, match="hides tokens on the left"):
        model(input_ids=ids, attention_mask=mask.flip(1), labels=labels, use_cache=False)


def test_a_router_loss_is_not_dropped_in_silence(tiny_model):
    with pytest.raises(UsageError, match="router loss of its own"):
        find(tiny_model("qwen3-moe", output_router_logits=True))


def test_batched_experts_compute_what_grouped_ones_do(tiny_model):
    model = tiny_model("qwen3-moe").train()
    ids, target = batch(model.config.vocab_size)
    loss, grads = stock(model, ids, target)
    got, got_grads = ours(model, replace(Plan.plain(), dispatch=Batched()), ids, target)
    assert got.item() == pytest.approx(loss.item(), rel=1e-6)
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-4 * b.abs().max()) for a, b in zip(got_grads, grads, strict=True)
    )
    assert model.get_experts_implementation()[""] == "grouped_mm"


def test_batched_experts_need_experts(tiny_model):
    with pytest.raises(UsageError, match="needs experts, and LlamaForCausalLM has none"):
        install(tiny_model(), replace(Plan.plain(), dispatch=Batched()))


def test_find_names_the_parts(tiny_model):
    anatomy = find(tiny_model("gemma2"))
    assert anatomy.head_name == "lm_head"
    assert list(anatomy.layers) == ["model.layers.0", "model.layers.1"]
    assert anatomy.softcap == 3.0
    assert find(tiny_model("granite")).logit_scale == 0.25
    assert find(tiny_model("cohere")).logit_scale == 0.25


def test_a_model_without_a_head_is_refused(tiny_model):
    with pytest.raises(UsageError, match="LlamaModel has no linear head"):
        find(tiny_model().model)
