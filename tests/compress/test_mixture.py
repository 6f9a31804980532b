"""Smaller mixtures: scores against experts taken out by hand, blocks that are what they say, children that open."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from planish.cli.main import main
from planish.compress.blocks import Blocks, architecture_of
from planish.compress.calibrate import Calibration, calibrate
from planish.compress.costs import Numbers, Scenario, experts_met, options_of, parameters, work_of
from planish.compress.export import export_decilm, export_dense
from planish.compress.library import Library
from planish.compress.measure import sizes_of
from planish.compress.mixture import MixtureFit
from planish.compress.parent import WholeParent
from planish.compress.parts import discover
from planish.compress.realise import assemble, write_child
from planish.compress.space import (
    Architecture,
    Choice,
    KeepExperts,
    KeepHeads,
    Menu,
    NoAttention,
    NoFfn,
    Width,
    ffn_options,
)
from planish.errors import UsageError
from planish.models.upcycle import upcycle
from planish.sections import MoeSection

MIXTURES = ["mixtral", "qwen3-moe", "olmoe"]


def test_options_go_from_many_experts_to_few_and_then_to_narrow_ones():
    menu = Menu(width_multiple=8, widths=(0.5,), linear=False)
    parent = KeepExperts(experts=8, width=32)
    labels = [each.label for each in ffn_options(parent, menu, top_k=3)]
    assert labels == ["experts8x32", "experts6x32", "experts4x32", "experts3x32", "experts8x16", "none"]
    assert [each.label for each in ffn_options(parent, menu)] == ["experts8x32", "none"]
    with pytest.raises(ValueError, match=r"`experts` must be parts between 0 and 1, got 2; write 0.5 for half the exp"):
        Menu(experts=(2,))


def built(model):
    """Return (option, tensors) -> a mixture of the model's second layer."""
    blocks = Blocks(model.config)

    def make(option, tensors):
        layer = blocks.bare(1, Choice(attention=NoAttention(), ffn=option), dtype=torch.float32)
        layer.mlp.load_state_dict({name.removeprefix("mlp."): each for name, each in tensors.items()}, assign=True)
        return layer.mlp

    return make


def without(tensors, others):
    return {name: each[others] for name, each in tensors.items()}


@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_a_score_is_what_tokens_lose_in_a_mixture_without_the_expert(parent, family):
    """Against the mixture built without it; the weights of Qwen3's and OLMoE's routers do not add up to one."""
    model = parent(family)
    mixture, build = model.model.layers[1].mlp, built(model)
    option = KeepExperts(experts=3, width=mixture.experts.down_proj.shape[2])
    hidden = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    weight = torch.rand(32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    fit, out = MixtureFit(mixture, [option]), mixture(hidden)
    for which in ("fit", "held"):
        fit.see(hidden, out, weight, which)
    tensors = {f"mlp.{name}": each for name, each in mixture.state_dict().items()}
    lost = []
    for gone in range(4):
        smaller = build(option, without(tensors, [each for each in range(4) if each != gone]))
        lost.append(((smaller(hidden) - out).flatten(0, 1).double().square().sum(1) * weight).sum())
    torch.testing.assert_close(fit.lost, torch.stack(lost), rtol=1e-4, atol=1e-9)
    [found] = fit.smaller(tensors, ("refit",), (1e-2,), build)
    kept = sorted(fit.lost.argsort(descending=True)[:3].tolist())
    assert torch.equal(found.tensors["mlp.gate.weight"], mixture.gate.weight[kept])
    assert torch.equal(found.tensors["mlp.experts.gate_up_proj"], mixture.experts.gate_up_proj[kept])
    squares = (build(option, without(tensors, kept))(hidden) - out).flatten(0, 1).double().square().sum(1) * weight
    whole = (out.flatten(0, 1).double().square().sum(1) * weight).sum()
    assert found.plain_error == pytest.approx((squares.sum() / whole).item(), rel=1e-5)


@pytest.mark.parametrize("family", MIXTURES)
def test_blocks_err_as_they_say_and_less_than_nothing(library, family):
    blocks = library(family)
    parent, *smaller = [each for each in blocks.space.layers[1].ffn if isinstance(each, KeepExperts)]
    assert {each.experts for each in smaller} == {3, 2, 4}
    errors = {}
    for option in smaller:
        info = blocks.info(f"layer-001-ffn-{option.label}")
        assert 0 < info.error < 1
        assert info.error <= 1.02 * info.plain_error
        errors[option] = info.error
    counts = [errors[each] for each in smaller if each.experts < parent.experts]
    assert counts == sorted(counts)
    widths = [errors[each] for each in smaller if each.experts == parent.experts]
    assert widths == sorted(widths)


def test_a_token_meets_its_experts_and_many_tokens_all(library):
    space = library("qwen3-moe").space
    few, all_ = KeepExperts(experts=2, width=16), KeepExperts(experts=4, width=16)
    assert experts_met(space, all_, 1) == pytest.approx(2)
    assert experts_met(space, all_, 2) == pytest.approx(3)
    assert experts_met(space, all_, 1000) == pytest.approx(4)
    numbers = Numbers(weight_bytes=2)
    one, many = (Scenario(phase="decode", context=8, batch=batch) for batch in (1, 512))
    routers = 2 * space.hidden_size * 2
    assert work_of(space, all_, one, numbers).moved_bytes - work_of(space, few, one, numbers).moved_bytes == routers
    gone = parameters(space, all_) - parameters(space, few)
    saved = work_of(space, all_, many, numbers).moved_bytes - work_of(space, few, many, numbers).moved_bytes
    assert saved == pytest.approx(2 * gone)
    half = work_of(space, KeepExperts(experts=4, width=8), one, numbers)
    assert half.flops < 0.6 * work_of(space, all_, one, numbers).flops


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", *MIXTURES, "qwen2-moe"])
@pytest.mark.parametrize("biased", [False, True])
def test_formulas_count_what_modules_hold(tiny_model, family, biased):
    """Norms of queries and keys, biases, routers and shared experts among it."""
    changes = {"num_key_value_heads": 4, "attention_bias": biased, "mlp_bias": biased, "qkv_bias": biased}
    model = tiny_model(family, **changes)
    space = discover(model, Menu(width_multiple=8, windows=(4,)))
    found = {name: parameters(space, option) for name, option in options_of(space).items()}
    assert found == sizes_of(model.config, space)


def test_dense_layers_beside_mixtures_keep_their_make(tiny_model, sentences):
    model = tiny_model("qwen3-moe", num_hidden_layers=3, mlp_only_layers=[1])
    space = discover(model, Menu(width_multiple=8))
    kinds = [type(layer.ffn[0]) for layer in space.layers]
    assert kinds == [KeepExperts, Width, KeepExperts]
    assert {name: parameters(space, option) for name, option in options_of(space).items()} == sizes_of(
        model.config, space
    )


SMALL = Architecture(
    layers=(
        Choice(attention=NoAttention(), ffn=KeepExperts(experts=4, width=8)),
        Choice(attention=KeepHeads(kv_heads=4), ffn=KeepExperts(experts=3, width=16)),
        Choice(attention=KeepHeads(kv_heads=2), ffn=KeepExperts(experts=2, width=16)),
    )
)


def test_a_child_with_fewer_and_narrower_experts_is_written_and_generates(library, sentences, tmp_path):
    blocks = library("qwen3-moe")
    child = assemble(blocks, SMALL)
    shapes = [tuple(layer.mlp.experts.down_proj.shape) for layer in child.model.layers]
    assert shapes == [(4, 32, 8), (3, 32, 16), (2, 32, 16)]
    write_child(blocks, SMALL, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(sentences[:2]).logits, child(sentences[:2]).logits)
    assert architecture_of(again.config) == SMALL
    said = json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    assert said["2"] == {"num_key_value_heads": 2, "num_local_experts": 2}
    assert said["0"] == {"skip": ["attention"], "moe_intermediate_size": 8}
    found = [again.generate(sentences[:2], max_new_tokens=8, do_sample=False, use_cache=each) for each in (True, False)]
    assert torch.equal(*found)


@pytest.mark.parametrize("family", MIXTURES)
def test_one_number_of_experts_and_any_widths_make_a_plain_model(library, sentences, tmp_path, family):
    blocks = library(family)
    width = blocks.space.layers[0].ffn[0].width
    even = Architecture(
        layers=tuple(
            Choice(attention=KeepHeads(kv_heads=4), ffn=ffn)
            for ffn in (KeepExperts(experts=4, width=8), NoFfn(), KeepExperts(experts=4, width=width // 2))
        )
    )
    write_child(blocks, even, tmp_path / "narrow")
    export_dense(tmp_path / "narrow", tmp_path / "plain-narrow")
    plain, report = AutoModelForCausalLM.from_pretrained(tmp_path / "plain-narrow", output_loading_info=True)
    assert type(plain).__module__.startswith("transformers.models.")
    assert not any(report[each] for each in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert plain.model.layers[0].mlp.experts.down_proj.shape == (4, 32, width // 2)
    expected = assemble(blocks, even)(sentences[:2]).logits
    torch.testing.assert_close(plain(sentences[:2]).logits, expected, rtol=1e-5, atol=1e-5)

    few = Architecture(layers=(Choice(attention=KeepHeads(kv_heads=4), ffn=KeepExperts(experts=3, width=width)),) * 3)
    write_child(blocks, few, tmp_path / "few")
    export_dense(tmp_path / "few", tmp_path / "plain-few")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain-few")
    assert torch.equal(plain(sentences[:2]).logits, assemble(blocks, few)(sentences[:2]).logits)


def test_what_no_other_form_can_say_is_refused(library, tmp_path):
    write_child(library("qwen3-moe"), SMALL, tmp_path / "child")
    with pytest.raises(UsageError, match=r"layers have 2 and 3 and 4 experts: plain classes have as many in every lay"):
        export_dense(tmp_path / "child", tmp_path / "dense")
    with pytest.raises(UsageError, match="DeciLM is a Llama in its engines"):
        export_decilm(tmp_path / "child", tmp_path / "decilm")


def test_an_upcycled_model_has_a_small_child_whose_frozen_router_stays(
    tiny_model, tiny_tokenizer, sentences, text_file, tmp_path
):
    """From a dense model to a mixture, to a child with fewer and narrower experts, to one that its parent taught."""
    dense = tiny_model("llama", num_hidden_layers=3, num_key_value_heads=4, initializer_range=0.2)
    mixture = upcycle(dense, MoeSection(experts=4, top_k=2), seed=0).eval()
    whole = WholeParent(mixture)
    space = whole.space(Menu(width_multiple=8, linear=False))
    blocks = Library.create(tmp_path / "blocks", config=whole.config, space=space, made_from="test")
    calibrate(whole, sentences, blocks, Calibration(batch_rows=8))
    assert torch.equal(assemble(blocks, space.parent)(sentences[:2]).logits, mixture(sentences[:2]).logits)
    assert blocks.info("layer-001-ffn-experts2x48").error < 1e-10  # experts that are alike lose nothing to each other

    ffns = KeepExperts(experts=2, width=48), KeepExperts(experts=4, width=24), KeepExperts(experts=4, width=48)
    heads = KeepHeads(kv_heads=4)
    child = Architecture(layers=tuple(Choice(attention=heads, ffn=ffn) for ffn in ffns))
    write_child(blocks, child, tmp_path / "child")
    mixture.save_pretrained(tmp_path / "parent")
    for name in ("child", "parent"):
        tiny_tokenizer.save_pretrained(tmp_path / name)
    settings = {
        "model.from": tmp_path / "child",
        "model.dtype": "fp32",
        "model.freeze": '["experts", "gate"]',
        "data.train": text_file,
        "data.context": 64,
        "train.global-tokens": 128,
        "train.steps": 6,
        "train.lr": 5e-4,
        "train.warmup": 1,
        "save.dir": tmp_path / "run",
        "distil.from": tmp_path / "parent",
    }
    assert main(["train", *(part for name, value in settings.items() for part in (f"--{name}", str(value)))]) == 0
    before = assemble(blocks, child).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000006").state_dict()
    frozen = {name for name in before if ".experts." in name or ".mlp.gate." in name}
    assert len(frozen) == 9
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen


@torch.no_grad()
def test_experts_that_no_token_met_stay_as_they_are(parent):
    """All tokens go to the first two; the others' channels are ranked by their weights and nothing is fitted."""
    model = parent("mixtral")
    mixture = model.model.layers[1].mlp
    tensors = {f"mlp.{name}": each.clone() for name, each in mixture.state_dict().items()}
    tensors["mlp.gate.weight"][:2], tensors["mlp.gate.weight"][2:] = 1.0, -1.0
    build = built(model)
    mixture = build(KeepExperts(experts=4, width=48), tensors)
    hidden = torch.rand(2, 32, 32, generator=torch.Generator().manual_seed(0))
    fit = MixtureFit(mixture, [KeepExperts(experts=2, width=48), KeepExperts(experts=4, width=24)])
    for which in ("fit", "choose", "held"):
        fit.see(hidden, mixture(hidden), None, which)
    few, narrow = fit.smaller(tensors, ("contribution", "refit"), (1e-2,), build)
    assert few.error < 1e-9
    assert torch.equal(few.tensors["mlp.gate.weight"], tensors["mlp.gate.weight"][:2])
    third = tensors["mlp.experts.down_proj"][3]
    keep = third.norm(dim=0).argsort(descending=True)[:24]
    torch.testing.assert_close(narrow.tensors["mlp.experts.down_proj"][3], third[:, keep])
    assert narrow.error < narrow.plain_error
