"""`planish plan --model NAME ...`: a question in, an answer out, at once and without torch."""

import json
import resource
import subprocess
import sys

import pytest

from planish.methods import Plan

ASK = ["plan", "--model", "llama-3.1-8b", "--context", "8K", "--devices", "8", "--hardware", "h100"]


def cpu_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-235b-a22b"])
def test_it_is_answered_at_once_and_without_torch(name):
    code = "import sys; from planish.cli.main import main; code = main(sys.argv[1:]); "
    code += "sys.exit(100 * ('torch' in sys.modules or 'transformers' in sys.modules) + code)"
    words = ["plan", "--model", name, "--context", "1M", "--devices", "64", "--hardware", "h200"]
    before = cpu_s()
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert cpu_s() - before < 3
    assert "64 x h200 (131.32 GiB each" in done.stdout
    assert "to paste into a run file" in done.stdout


def test_the_answer_has_every_part(plan):
    code, out, err = plan(*ASK, "--memory", "40GiB", "--batch-tokens", "64K")
    assert (code, err) == (0, "")
    for part in ("device, GiB", "host, GiB", "MFU", "hidden", "to spare", "assumed: h100: 989", "other ways"):
        assert part in out
    Plan.from_toml(out[out.index("[plan.attention]") :])
    assert "peak " in out
    assert "GiB too much" in out


def test_json_is_one_object(plan):
    code, out, err = plan(*ASK, "--json", "--memory", "40GB")
    assert (code, err) == (0, "")
    tree = json.loads(out)
    assert tree["memory_bytes"] == 40 * 10**9
    assert tree["peak_bytes"] <= tree["memory_bytes"]
    assert tree["peak_bytes"] == max(each["peak_bytes"] for each in tree["phases"].values())
    step = tree["step_s"]
    shown = step["communication"] + step["offload"] - step["hidden_communication"] - step["hidden_offload"]
    assert step["total"] == pytest.approx(step["compute"] + shown + step["optimizer"] + step["turns"])
    assert 0 < tree["mfu"] < 1
    assert tree["plan"]["plan"]["vocab"]["method"] in ("plain", "blocked")


def test_what_does_not_fit_is_exit_3_with_what_would(plan):
    code, _, err = plan(*ASK, "--memory", "6GiB", "--host-memory", "64GiB")
    assert code == 3
    for part in ("smallest memory that would do is", "no context fits", "the fewest devices: 16 devices"):
        assert part in err
    small = ["plan", "--model", "smollm2-135m", "--context", "64K", "--hardware", "cpu", "--memory", "3GiB", "--json"]
    code, out, err = plan(*small)
    assert (code, err) == (3, "")
    tree = json.loads(out)
    assert not tree["fits"]
    assert 3 * 2**30 < tree["smallest_memory_bytes"] < 6 * 2**30
    assert 1024 < tree["longest_context"] < 2**16
    assert plan(*small, "--context", tree["longest_context"])[0] == 0


def test_a_small_model_is_not_told_in_zeros(plan, tmp_path):
    sizes = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(sizes | {"num_attention_heads": 4, "vocab_size": 256}))
    code, out, _ = plan("plan", "--model", config, "--context", "128", "--hardware", "cpu")
    assert code == 0
    assert "device, MiB" in out
    assert "0.00" not in out.split("peak ")[0].replace("<0.01", "")


def test_the_drawing_is_written(plan, tmp_path):
    code, _, _ = plan(*ASK, "--svg", tmp_path / "step.svg")
    assert code == 0
    text = (tmp_path / "step.svg").read_text()
    assert text.startswith("<svg")
    assert "backward" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "llama-9"], "nor a known architecture; did you mean"),
        (["--hardware", "b300x"], 'A TOML file describes any other: `[hardware]`, `like = "h100"`'),
        (["--context", "0"], "must be a positive whole number"),
        (["--context", "-4"], "--context"),
        (["--devices", "many"], "must be a whole number"),
        (["--host-memory", "0GiB"], "must be above zero"),
        (["--memory", "80"], "needs a unit"),
        (["--batch-tokens", "12345"], "must be a multiple of the context (8,192)"),
        (["--mesh.cp", "3"], "must divide the 8 devices; one of 1, 2, 4, 8"),
        (["--mesh.ep", "2"], "must divide the model's 0 experts"),
        (["--plan.vocab", "blockd"], "did you mean `blocked`?"),
        (["--pipeline"], "leave it or `--model`"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(plan, words, said):
    code, out, err = plan(*ASK, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    code, out, err = plan(*ASK, *words, "--json")
    assert (code, err) == (2, "")
    assert said in json.loads(out)["error"]


def test_fields_that_are_not_known_are_named(plan, tmp_path):
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"model_type": "llama9", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
            | {"num_attention_heads": 4, "vocab_size": 256, "sidecar_width": 12}
        )
    )
    code, out, _ = plan("plan", "--model", config, "--json")
    assert code == 0
    assumed = " ".join(json.loads(out)["assumed"])
    assert "'llama9' is not known" in assumed
    assert "`sidecar_width`" in assumed


def test_a_context_beyond_the_positions_is_answered_and_said(plan):
    code, out, _ = plan("plan", "--model", "smollm2-135m", "--context", "64K", "--json")
    assert code == 0
    assert any("8,192 positions" in each for each in json.loads(out)["assumed"])


def test_hardware_may_be_described(plan, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[hardware]\nlike = "h100"\nmemory = "96GiB"\nbf16_flops = 5e14\n')
    code, out, _ = plan(*ASK[:-1], path)
    assert code == 0
    assert "8 x mine (96.00 GiB each" in out
    path.write_text('[hardware]\nlike = "h100"\nmemori = "96GiB"\n')
    assert "did you mean `memory`" in plan(*ASK[:-1], path)[2]


def test_a_run_file_may_ask(plan, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nfrom = "llama-3.2-1b"\ndtype = "bf16-pure"\n[data]\ntrain = "x"\ncontext = "4K"\n'
        '[memory]\nbudget = "30GiB"\n[plan.boundary]\nmethod = "checkpoint"\n'
    )
    code, out, _ = plan("plan", path, "--devices", "2", "--hardware", "a100", "--json")
    tree = json.loads(out)
    assert code == 0
    assert tree["memory_bytes"] == 30 * 2**30
    assert tree["plan"]["plan"]["boundary"]["method"] == "checkpoint"
    assert tree["context"] == 4096


AXOLOTL = """
base_model: meta-llama/Llama-3.1-8B
sequence_len: 8192
micro_batch_size: 2
gradient_accumulation_steps: 4
sample_packing: true
bf16: true
gradient_checkpointing: true
optimizer: adamw_torch_fused
deepspeed: deepspeed_configs/zero3_bf16.json
"""
FACTORY = """
model_name_or_path: Qwen/Qwen3-8B
finetuning_type: lora
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""


def test_other_peoples_runs_are_answered_as_they_stand(plan, tmp_path):
    path = tmp_path / "axolotl.yaml"
    path.write_text(AXOLOTL)
    words = ["plan", "--from", path, "--devices", "8", "--hardware", "h100", "--json"]
    code, out, err = plan(*words)
    assert (code, err) == (0, "")
    tree = json.loads(out)
    stands = tree["as_it_stands"]
    assert stands["framework"] == "axolotl"
    assert tree["tokens_per_step"] == 8192 * 2 * 4 * 8
    assert tree["plan"]["data"]["context"] == 8192
    assert stands["phases"]["head"]["categories"]["head tiles"] > 8192 * 2 * 128256 * 4  # logits are formed
    path.write_text(AXOLOTL + "cut_cross_entropy: true\n")
    fused = json.loads(plan(*words)[1])["as_it_stands"]
    assert fused["peak_bytes"] < stands["peak_bytes"]
    path.write_text(FACTORY)
    code, out, _ = plan(*words[:-1])
    assert code == 0
    assert "as it stands (LLaMA-Factory): " in out
    assert "its adapter is not priced" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "is not YAML"),
        ("learning_rate: 1e-4\n", "is no run of axolotl, LLaMA-Factory or transformers"),
        ("base_model: x/llama-9\nsequence_len: 8\nmicro_batch_size: 1\n", "nor a known architecture"),
        ("base_model: llama-3.1-8b\nsequence_len: -8\nmicro_batch_size: 1\n", "`sequence_len` of the file must be"),
    ],
)
def test_a_file_that_is_none_is_one_sentence(plan, tmp_path, text, said):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    code, out, err = plan("plan", "--from", path)
    assert (code, out) == (2, "")
    assert said in err


def test_training_arguments_need_a_model(plan, tmp_path):
    path = tmp_path / "training_args.json"
    path.write_text(json.dumps({"per_device_train_batch_size": 2, "gradient_checkpointing": True, "bf16": True}))
    assert "`--model` must name" in plan("plan", "--from", path)[2]
    code, out, _ = plan("plan", "--from", path, "--model", "llama-3.2-1b", "--context", "2K")
    assert code == 0
    assert "as it stands (transformers): " in out


def test_the_proof_stands_beside_the_prices(plan, tmp_path):
    config = tmp_path / "config.json"
    sizes = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    config.write_text(json.dumps(sizes | {"num_attention_heads": 4, "vocab_size": 1024}))
    words = ["plan", "--model", config, "--context", "1K", "--devices", "2", "--hardware", "h100", "--prove", "--json"]
    code, out, err = plan(*words, "--plan.boundary", "checkpoint", "--mesh.dp", "2")
    proof = json.loads(out)["proof"]
    assert proof["depths"] == [3, 4]
    assert set(proof["differences"]) == {"forward", "backward", "optimizer", "save"}
    assert min(proof["differences"].values()) > -0.005
    assert max(proof["differences"].values()) < 0.05  # a model this small is mostly what is gathered
    assert (code, err) == (6 if max(proof["differences"].values()) > 0.005 else 0, "")


def test_stages_may_be_asked_for(plan):
    words = [*ASK, "--batch-tokens", "128K", "--mesh.pp"]
    code, out, err = plan(*words, "4", "--json")
    assert (code, err) == (0, "")
    tree = json.loads(out)
    assert (tree["plan"]["mesh"]["dp"], tree["plan"]["mesh"]["pp"]) == (2, 4)
    assert len(tree["peak_bytes_by_rank"]) == 4
    step = tree["step_s"]
    assert step["turns"] == pytest.approx(3 / (tree["microbatches"] + 3) * (step["total"] - step["optimizer"]))
    assert "waiting for turns" in plan(*words, "4")[1]
    code, _, err = plan(*words[:-1], "--memory", "8GiB", "--mesh.pp", "4")
    assert code == 3
    assert "leave `mesh.pp` out, and boundaries and optimizer state may go to the host or a disk" in err
    code, _, err = plan(*words, "4", "--mesh.vp", "2")
    assert code == 2
    assert "leave it out" in err
    deep = ["plan", "--model", "llama-3.1-8b", "--devices", "64", "--mesh.pp", "64"]
    assert "at most the model's 32 layers; one of 1, 2, 4, 8, 16, 32" in plan(*deep)[2]
    scaled = ["plan", "--model", "gemma-3-4b", "--devices", "2", "--mesh.pp", "2"]
    assert "has a price here for" in plan(*scaled)[2]
