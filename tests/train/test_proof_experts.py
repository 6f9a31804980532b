"""Prices of experts that are spread over ranks, held to the step itself on tensors without data."""

import pytest
import transformers

from planish.cli.prove import _run_file
from planish.methods import Blocked, Checkpoint, Pipelined, Plan
from planish.plan.estimate import of_moments
from planish.plan.question import Candidate, Question
from planish.price.config import read_config
from planish.price.hardware import KNOWN
from planish.price.head import HeadBytes
from planish.price.step import moments
from planish.shapes import MeshShape
from planish.train.proof import run_folded

CONFIG = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 1024}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "decoder_sparse_step": 1}
CONFIG |= {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
def test_what_experts_gather_and_what_a_save_brings_together(tmp_path, degree):
    config = transformers.Qwen3MoeConfig(**CONFIG).to_dict()
    mesh = MeshShape(dp=4, ep=degree)
    asked = Question(shape=read_config(config), dtype="bf16", context=256, rows=None, devices=4, hardware=KNOWN["cpu"])
    plan = Plan(vocab=Blocked(), dispatch=Pipelined(), boundary=Checkpoint())
    candidate = Candidate(asked, mesh, 1, 1, plan)
    ran = run_folded(_run_file(candidate), config, tmp_path, depth=3).at(6)
    none = HeadBytes(forward=0, kept=0, backward=0, evaluation=0)
    found = of_moments(moments(candidate.table, candidate.batch, none, plan, master=True), far={}).phases
    for phase in ("forward", "backward", "optimizer", "save"):
        assert 0 <= found[phase].peak_bytes - ran[phase] <= 0.005 * ran[phase], phase
