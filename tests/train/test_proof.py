"""A folded dry run says of a model what a dry run of all its layers says."""

import json

import pytest
import transformers

from planish.decode import decode
from planish.runfile import RunFile
from planish.train.dry_run import dry_run
from planish.train.job import span_of
from planish.train.layer_trace import full_batch
from planish.train.predict import batch_shape
from planish.train.proof import run_folded, shortened, without_head

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "vocab_size": 160}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


def a_run(path, config, **mesh):
    path.write_text(json.dumps(config))
    dispatch = "pipelined" if "num_experts_per_tok" in config else "plain"
    return decode(
        RunFile,
        {
            "model": {"config": str(path), "dtype": "fp32"},
            "data": {"train": "builtin:english", "context": 256},
            "mesh": mesh,
            "plan": {"dispatch": dispatch, "boundary": "checkpoint"},
        },
    )


@pytest.mark.parametrize(
    ("cls", "extra", "mesh"),
    [
        ("LlamaConfig", {}, {}),
        pytest.param("Qwen3MoeConfig", ROUTED, {"dp": 4, "ep": 4, "cp": 2}, marks=pytest.mark.slow),
    ],
)
def test_folded_is_full(tmp_path, cls, extra, mesh):
    config = getattr(transformers, cls)(**SIZES | HEADS | extra).to_dict()
    run = a_run(tmp_path / "config.json", config, **mesh)
    folded = run_folded(run, config, tmp_path, depth=3).at(6)
    batches = [span_of(full_batch(batch_shape(run)), (run.mesh.cp - 1, run.mesh.cp)) for _ in range(2)]
    full = dry_run(run, batches=batches, adapt=without_head).phases
    assert {phase for phase, each in full.items() if folded[phase] != each.peak_bytes} <= {"init"}
    assert abs(folded["init"] - full["init"].peak_bytes) < 64


def test_lists_of_layers_are_shortened_too():
    config = {"num_hidden_layers": 3, "layer_types": ["a", "b", "c"], "other": [1, 2]}
    assert shortened(config, 2) == {"num_hidden_layers": 2, "layer_types": ["a", "b"], "other": [1, 2]}
    assert shortened({"text_config": config}, 1)["text_config"]["layer_types"] == ["a"]
