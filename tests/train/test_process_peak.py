"""The process follows the tensors: VmHWM of a whole run against baseline and ledger, in a process of its own."""

import json
import subprocess
import sys

import pytest
from transformers import LlamaConfig

CONFIG = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "vocab_size": 32768,
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_vm_hwm_is_within_5_percent_of_baseline_and_ledger(tmp_path, tiny_tokenizer, text_file, dtype):
    folder = tmp_path / "model"
    LlamaConfig(**CONFIG).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    words = ["--model.config", str(folder / "config.json"), "--data.train", str(text_file), "--model.dtype", dtype]
    words += [
        "--data.context",
        "4096",
        "--train.global_tokens",
        "16384",
        "--train.steps",
        "2",
        "--memory.budget",
        "8GiB",
    ]
    subprocess.run(
        [sys.executable, "-m", "planish", "train", *words, "--save.dir", str(tmp_path / "run")],
        check=True, capture_output=True,
    )  # fmt: skip
    memory = [json.loads(line) for line in (tmp_path / "run" / "memory.jsonl").read_text().splitlines()]
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ledger = max(line["peak_bytes"] for line in memory)
    assert ledger > 2**30
    expected = memory[0]["baseline_bytes"] + ledger
    measured = metrics[-1]["memory/vm_hwm_bytes"]
    assert expected * 0.95 < measured < expected * 1.05
