"""Pipelines in training: the numbers of one process for any family, checkpoints for any number of stages."""

import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

from planish.comm.world import ALONE
from planish.methods import Pipeline
from planish.sections import MeshSection
from train.rank_steps import next_losses, train_and_save, train_in_float64

FAST = ["llama", "qwen3-moe", "gemma2"]
OTHERS = ["mistral", "qwen3", "mixtral", "qwen2-moe", "olmoe", "deepseek-v3", "glm4-moe", "gpt-oss", "nemotron-h"]
OTHERS += ["gemma3", "granite", "cohere", "nemotron"]
LAYERS = {"num_hidden_layers": 4}
OF_FAMILY = {
    "nemotron-h": {"layers_block_type": ["attention", "moe", "attention", "moe"], "num_hidden_layers": 4},
    "deepseek-v3": {**LAYERS, "first_k_dense_replace": 2},
}


def compare(run_of, tiny_model, tiny_tokenizer, ranks, family, mesh, method, *settings, only=(), tolerance=1e-12):
    """Train on one process and over stages, `only` there by some settings; every number must be the same."""
    config = OF_FAMILY.get(family, LAYERS)
    settings = [("train.grad_accum", 4), ("plan.dispatch", "pipelined"), *settings]
    one = run_of(family, None, *settings, **config)
    many = run_of(family, mesh, *settings, ("plan.pipeline.method", method), *only, **config)

    def model():
        return tiny_model(family, dtype=torch.float64, **config)

    expected, weights = train_in_float64(one, model(), tiny_tokenizer, ALONE)
    seen = set()
    for found, found_weights in ranks(lambda world: train_in_float64(many, model(), tiny_tokenizer, world), **mesh):
        for before, now in zip(expected, found, strict=True):
            assert now == pytest.approx(before, rel=tolerance)
        for name, weight in found_weights.items():
            assert torch.allclose(weight, weights[name], rtol=1e-10, atol=1e-12), name
            seen.add(name)
    assert seen == set(weights)


@pytest.mark.parametrize("family", FAST)
@pytest.mark.parametrize(("pp", "method"), [(2, "v-half"), (3, "1f1b")])
def test_stages_compute_what_one_process_computes(run_of, tiny_model, tiny_tokenizer, ranks, family, pp, method):
    compare(run_of, tiny_model, tiny_tokenizer, ranks, family, {"pp": pp}, method)


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_any_family_is_divided(run_of, tiny_model, tiny_tokenizer, ranks, family):
    compare(run_of, tiny_model, tiny_tokenizer, ranks, family, {"pp": 2}, "v-half")


SHARED = [
    ("qwen3-moe", {"pp": 2, "dp": 2, "cp": 2, "ep": 2}, "1f1b", [("plan.dispatch.borrow_routes", 1)]),
    ("qwen3-moe", {"pp": 2, "dp": 2}, "1f1b", []),
    ("gemma2", {"pp": 2, "dp": 2, "cp": 2}, "interlaced", []),
    ("llama", {"pp": 2, "replicate": 2}, "1f1b", []),
]


@pytest.mark.slow  # all of it in one, and far memory, is among the tests of everything together
@pytest.mark.parametrize(("family", "mesh", "method", "only"), SHARED)
def test_ranks_that_share_a_stage_compute_what_one_process_computes(
    run_of, tiny_model, tiny_tokenizer, text_file, ranks, monkeypatch, family, mesh, method, only
):
    held_out = [("data.eval", [str(text_file)]), ("data.eval_tokens", 112), ("train.clip", 0.5)]
    if family == "gemma2":  # whose norms sum their weights' gradients over a rank's tokens in float32
        monkeypatch.setattr(Gemma2RMSNorm, "forward", lambda norm, x: norm._norm(x) * (1.0 + norm.weight))
    compare(run_of, tiny_model, tiny_tokenizer, ranks, family, mesh, method, *held_out, only=only, tolerance=1e-10)


SAVED = [
    ("llama", "fp32", [{"pp": 4}, {"pp": 4}, {"pp": 2}]),
    ("qwen3-moe", "bf16", [{"pp": 2, "dp": 2, "ep": 2}, {"pp": 2, "dp": 2, "cp": 2}, {"dp": 2}]),
]


@pytest.mark.parametrize(("family", "dtype", "meshes"), SAVED)
def test_a_checkpoint_goes_on_over_any_ranks_and_with_another_schedule(run_of, ranks, text_file, family, dtype, meshes):
    settings = [("model.dtype", dtype), ("data.eval", [str(text_file)]), ("data.eval_tokens", 16 * 7)]
    settings += [("train.grad_accum", 3), ("plan.dispatch", "pipelined")]
    first = run_of(family, meshes[0], *settings, **LAYERS)
    later = [dataclasses.replace(first, mesh=MeshSection(**mesh)) for mesh in (*meshes[1:], {"dp": 1})]
    later = [dataclasses.replace(run, train=dataclasses.replace(run.train, steps=5)) for run in later]
    if meshes[2] == {"pp": 2}:
        later[1] = dataclasses.replace(
            later[1], plan=dataclasses.replace(first.plan, pipeline=Pipeline(method="v-half"))
        )
    ranks(lambda world: train_and_save(first, world), **meshes[0])
    folder = first.save.dir / "checkpoints" / "step-00000003"
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.isfinite(each).all() for each in model.parameters())
    four, two = (
        ranks(lambda world, run=run: next_losses(run, world), **mesh)
        for run, mesh in zip(later[:2], meshes[1:], strict=True)
    )
    [one] = ranks(lambda world: next_losses(later[2], world))
    assert len(set(four)) == len(set(two)) == 1  # every rank reports the same
    unit = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    for found in (four[0], two[0]):
        assert found == pytest.approx(one, rel=4 * torch.finfo(unit).eps)


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_repeats_bit_for_bit_whatever_passes_took(run_of, ranks, tmp_path, tied):
    settings = [("model.dtype", "bf16"), ("train.grad_accum", 3), ("train.steps", 6), ("train.global_tokens", 48)]
    run = run_of("llama", {"pp": 2}, *settings, tie_word_embeddings=tied)
    seen = []
    for name in ("first", "second"):
        again = dataclasses.replace(run, save=dataclasses.replace(run.save, dir=tmp_path / name))
        ranks(lambda world, again=again: train_and_save(again, world), pp=2)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        seen.append([(each["loss"].hex(), each["grad_norm"].hex()) for each in map(json.loads, lines)])
    assert seen[0] == seen[1]
    assert len(seen[0]) == 6


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([("mesh.pp", 2), ("plan.activation", "bitmap")], "`plan.activation` does not go with"),
        ([("mesh.pp", 2), ("plan.vocab", "plain")], "`plan.vocab` does not go with"),
        ([("mesh.pp", 2), ("mesh.vp", 2)], r"`mesh.vp` \(2\) does not go with `mesh.pp` \(2\)"),
        ([("mesh.pp", 2), ("mesh.dp", 2), ("plan.pipeline", "v-half")], "splits backward in two, and the weights of 2"),
        ([("plan.pipeline", "v-half")], "`plan.pipeline` has no effect without `mesh.pp`"),
    ],
)
def test_what_stages_cannot_do_is_refused(run_of, settings, words):
    with pytest.raises(ValueError, match=words):
        run_of("llama", None, *settings)


def test_a_pipeline_of_another_size_than_the_ranks_is_refused(run_of):
    with pytest.raises(ValueError, match=r"`mesh.replicate` x `mesh.pp` \(1 x 2\) must divide the 3 ranks"):
        run_of("llama", {"pp": 2}).mesh.over(3)
    with pytest.raises(ValueError, match=r"x `mesh.pp` x `mesh.dp` \(1 x 2 x 2\) must be the 6 .* `mesh.dp = 3`"):
        run_of("llama", {"pp": 2, "dp": 2}).mesh.over(6)
    assert run_of("llama", {"pp": 2}).mesh.over(4).dp == 2


def test_a_run_shows_its_passes_beside_the_planned_ones(run_of, ranks):
    run = run_of("qwen3", {"pp": 2}, ("train.grad_accum", 3), ("train.steps", 4), **LAYERS)
    ranks(lambda world: train_and_save(run, world), pp=2)
    folder = run.save.dir
    tree = json.loads((folder / "pipeline.json").read_text())
    assert tree["step"] == 3
    kinds = {f"{rank}{kind}{i}" for rank in range(2) for kind in ("F", "B", "S", "T", "IF", "IB") for i in range(3)}
    assert {word for word, _, _ in tree["passes"]} == kinds
    assert all(0 <= start <= end <= tree["measured"]["step_s"] for _, start, end in tree["passes"])
    seconds = [end - start for _, start, end in tree["passes"]]
    for each in (tree["planned"], tree["measured"]):
        assert sum(each["busy"]) * each["step_s"] == pytest.approx(sum(seconds), rel=1e-3)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [0 <= each["pipeline/bubble"] < 1 for each in lines] == [True] * 4
    page = (folder / "report.html").read_text()
    assert page.count('src="data:image/svg+xml;base64,') == 2
    assert f"of step 3, planned {tree['planned']['bubble']:.0%}" in page
