import errno
import hashlib
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from planish.errors import CheckpointCorrupt, UsageError, WorldFailed
from planish.methods import Plan
from planish.peaks.optim.adamw import AdamW
from planish.train.checkpoint import latest, load, save
from planish.train.model_folder import weights_of
from planish.train.run_folder import JsonLines, open_run_folder

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, attention_dropout=0.1),
    "gemma tied": GemmaConfig(**SIZES, attention_dropout=0.1),
    "qwen3 moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
}


def build_tokenizer(size=48, first=0):
    words = models.WordLevel({f"w{i + first}": i for i in range(size)}, unk_token=f"w{first}")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token=f"w{first}")


class Run:
    """A model, its optimizer and random data: a training run as small as it can be while every part is real."""

    def __init__(self, name="llama", dtype=torch.float32, *, seed=0, tokenizer=None, plan=None, **changes):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        config = type(CONFIGS[name])(**{**CONFIGS[name].to_dict(), **changes})
        self.model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        self.tokenizer = tokenizer or build_tokenizer()
        self.plan = plan or Plan()
        self.position = 0

    @property
    def tensors(self):
        states = {name: self.optimizer.state[param] for name, param in self.model.named_parameters()}
        return {"optimizer": states}

    def step(self):
        """Draws from all three generators; dropout draws again."""
        self.position += random.randrange(1, 5)
        words = torch.from_numpy(np.random.randint(0, 48, (2, 12))) + torch.randint(0, 1, (2, 12))
        loss = self.model(input_ids=words, labels=words).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return f"{loss.item().hex()} {self.position} {self.digest()}"

    def digest(self):
        digest = hashlib.sha256()
        for tensor in [*weights_of(self.model).values(), *self.flat().values()]:
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def flat(self):
        return {f"{name}.{key}": t for name, each in self.tensors["optimizer"].items() for key, t in each.items()}

    def save(self, folder, step, keep=2):
        return save(
            folder,
            step=step,
            model=self.model,
            tokenizer=self.tokenizer,
            tensors=self.tensors,
            progress={"position": self.position},
            plan=self.plan,
            keep=keep,
        )

    def load(self, ref, **changes):
        given = {"model": self.model, "tokenizer": self.tokenizer, "tensors": self.tensors, "plan": self.plan}
        restored = load(ref, **(given | changes))
        self.position = restored.progress["position"]
        return restored


@pytest.fixture
def folder(tmp_path):
    with open_run_folder(tmp_path / "run", resume=False, overwrite=False) as folder:
        folder.begin(run_toml="", plan_toml="")
        yield folder


def names(folder):
    return sorted(each.name for each in folder.checkpoints.iterdir())


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_goes_on_bit_for_bit(folder, name, dtype):
    run = Run(name, DTYPES[dtype])
    for _ in range(3):
        run.step()
    path = run.save(folder, 3)
    expected = [run.step() for _ in range(3)]
    again = Run(name, DTYPES[dtype], seed=1)
    restored = again.load(latest(folder))
    assert restored.step == 3
    assert restored.notes == ()
    assert [again.step() for _ in range(3)] == expected
    opened = AutoModelForCausalLM.from_pretrained(path)
    saved = Run(name, DTYPES[dtype], seed=1)
    saved.load(latest(folder))
    for here, there in zip(saved.model.state_dict().values(), opened.state_dict().values(), strict=True):
        assert here.dtype == there.dtype
        assert torch.equal(here, there)


def test_all_generators_go_on(folder):
    def draw():
        return torch.rand(3).tolist(), torch.randn(3).tolist(), random.gauss(0, 1), random.random(), np.random.randn()

    run = Run()
    draw()  # leaves half a pair of normal numbers in the last two
    run.save(folder, 1)
    expected = draw()
    draw()
    run.load(latest(folder))
    assert draw() == expected


def test_tensors_are_filled_where_they_are(folder):
    run = Run()
    run.step()
    run.save(folder, 1)
    before = {name: tensor.data_ptr() for name, tensor in [*run.model.state_dict().items(), *run.flat().items()]}
    run.load(latest(folder))
    after = {name: tensor.data_ptr() for name, tensor in [*run.model.state_dict().items(), *run.flat().items()]}
    assert after == before


def test_the_tokenizer_is_saved(folder):
    path = Run().save(folder, 1)
    assert AutoTokenizer.from_pretrained(path).get_vocab() == build_tokenizer().get_vocab()


def test_a_run_without_tokenizer(folder):
    run = Run()
    run.tokenizer = None
    run.save(folder, 1)
    run.load(latest(folder))


def test_the_newest_are_kept_and_named(folder):
    run = Run()
    for step in range(1, 6):
        run.save(folder, step, keep=2)
    assert names(folder) == ["step-00000004", "step-00000005"]
    assert folder.latest.read_text() == "step-00000005\n"
    assert latest(folder).step == 5


def test_a_run_without_checkpoint(folder):
    assert latest(folder) is None


def test_a_step_saved_twice_is_what_came_last(folder):
    run = Run()
    run.save(folder, 1)
    run.step()
    run.save(folder, 1)
    expected = run.digest()
    run.step()
    run.load(latest(folder))
    assert run.digest() == expected
    assert names(folder) == ["step-00000001"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "weights cut": ("model.safetensors", truncate, "model.safetensors has .* bytes where .* were written"),
    "weights altered": ("model.safetensors", flip, "model.safetensors was altered"),
    "weights gone": ("model.safetensors", Path.unlink, r"model.safetensors cannot be read \(No such file"),
    "optimizer cut": ("state/shard-00001.safetensors", truncate, "state/shard-00001.safetensors has"),
    "optimizer altered": ("state/shard-00001.safetensors", flip, "state/shard-00001.safetensors was altered"),
    "config altered": ("config.json", flip, "config.json was altered"),
    "state gone": ("state/state.json", Path.unlink, "state/state.json cannot be read"),
    "tokenizer gone": ("tokenizer.json", Path.unlink, "tokenizer.json cannot be read"),
    "list gone": ("manifest.json", Path.unlink, "manifest.json is missing or unreadable"),
    "list cut": ("manifest.json", truncate, "manifest.json is missing or unreadable"),
    "list emptied": ("manifest.json", lambda path: path.write_text("[]"), "manifest.json is missing or unreadable"),
    "list altered": (
        "manifest.json",
        lambda path: path.write_text(path.read_text().replace("config.json", "konfig.json")),
        "manifest.json was altered",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_one_before_is_used(folder, damage):
    file, spoil, words = DAMAGE[damage]
    run = Run()
    run.save(folder, 1)
    expected = run.digest()
    run.step()
    spoil(run.save(folder, 2) / file)
    ref = latest(folder)
    assert ref.step == 1
    (sentence,) = ref.skipped
    assert re.match(f"checkpoint step-00000002 is damaged: {words}", sentence)
    run.load(ref)
    assert run.digest() == expected


def test_no_intact_checkpoint_is_exit_5(folder):
    run = Run()
    for step in (1, 2):
        flip(run.save(folder, step) / "model.safetensors")
    with pytest.raises(CheckpointCorrupt, match=r"step-00000002 is damaged.*step-00000001 is damaged") as caught:
        latest(folder)
    assert caught.value.exit_code == 5


def test_a_checkpoint_that_is_gone_is_named(folder):
    run = Run()
    run.save(folder, 1)
    shutil.rmtree(run.save(folder, 2))
    assert latest(folder).skipped == ("checkpoint step-00000002, which `latest` names, is gone.",)
    shutil.rmtree(folder.checkpoints / "step-00000001")
    with pytest.raises(CheckpointCorrupt, match="which `latest` names, is gone"):
        latest(folder)


def test_without_checksums_names_and_sizes_are_compared(folder):
    run = Run()
    path = run.save(folder, 1)
    flip(path / "model.safetensors")
    assert latest(folder, checksums=False).step == 1
    truncate(path / "model.safetensors")
    with pytest.raises(CheckpointCorrupt, match="bytes where"):
        latest(folder, checksums=False)


def test_fewer_files_than_the_index_names(folder):
    run = Run("qwen3 moe")
    (run.save(folder, 1) / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"model-00002-of-00003\.safetensors cannot be read"):
        latest(folder)


def test_a_file_that_goes_after_it_was_checked(folder):
    run = Run()
    path = run.save(folder, 1)
    ref = latest(folder)
    (path / "state" / "state.json").unlink()
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        run.load(ref)


def test_a_run_that_went_back_behind_a_damaged_checkpoint_replaces_it(folder):
    run = Run()
    for step in (1, 3):
        path = run.save(folder, step)
    flip(path / "model.safetensors")
    assert latest(folder).step == 1
    run.save(folder, 2)
    assert names(folder) == ["step-00000001", "step-00000002"]
    run.save(folder, 3)
    assert latest(folder).step == 3
    assert latest(folder).skipped == ()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"hidden_size": 64}, r"another model: `lm_head.weight` is \[48, 32\] torch.float32 in .* \[48, 64\]"),
        ({"num_hidden_layers": 3}, r"another model: `model.layers.2.* is absent in the checkpoint and \["),
        ({"num_hidden_layers": 1}, r"another model: `model.layers.1.* in the checkpoint and absent here"),
        ({"dtype": torch.bfloat16}, r"another model: .*torch.float32 in the checkpoint and .*torch.bfloat16 here"),
        ({"rms_norm_eps": 0.5}, r"another model: `rms_norm_eps` of its config is 1e-06 in the checkpoint and 0.5 here"),
        ({"tokenizer": build_tokenizer(47)}, "another tokenizer: its vocabulary or its rules differ"),
        ({"tokenizer": build_tokenizer(first=1)}, "another tokenizer: its vocabulary or its rules differ"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen3 moe"])
def test_another_model_or_tokenizer_is_refused(folder, name, other, words):
    Run(name).save(folder, 1)
    run = Run(name, **other)
    before = run.digest()
    with pytest.raises(UsageError, match=words) as caught:
        run.load(latest(folder))
    assert caught.value.exit_code == 2
    assert run.digest() == before


@pytest.mark.parametrize("missing", ["exp_avg", "exp_avg_sq", "step"])
def test_a_template_without_moments_is_refused(folder, missing):
    run = Run()
    run.save(folder, 1)
    states = {name: {k: t for k, t in each.items() if k != missing} for name, each in run.tensors["optimizer"].items()}
    with pytest.raises(UsageError, match=rf"another optimizer: .*\.{missing}` is .* in the checkpoint and absent here"):
        run.load(latest(folder), tensors={"optimizer": states})
    with pytest.raises(UsageError, match="another optimizer"):
        run.load(latest(folder), tensors={})


def test_moments_that_were_not_saved_are_refused(folder):
    run = Run(dtype=torch.bfloat16)
    run.optimizer = AdamW(run.model.parameters(), master=False)
    run.save(folder, 1)
    run.optimizer = AdamW(run.model.parameters(), master=True)
    with pytest.raises(UsageError, match=r"another optimizer: .*exp_avg` is .*torch.bfloat16 .* torch.float32 here"):
        run.load(latest(folder))


def test_another_plan_and_another_torch_are_noted(folder):
    run = Run()
    path = run.save(folder, 1)
    ref = latest(folder)
    assert run.load(ref).notes == ()
    state = path / "state" / "state.json"
    state.write_text(state.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "2.0.0"'))
    plan, versions = run.load(ref, plan=Plan.plain()).notes
    assert "the plan is not the one" in plan
    assert f"torch is {torch.__version__} and was 2.0.0" in versions


def test_padding_and_truncation_of_the_last_call_do_not_make_another_tokenizer(folder):
    run = Run()
    run.save(folder, 1)
    run.tokenizer(["w1 w2 w3"], truncation=True, max_length=2)
    run.load(latest(folder))


def test_a_name_given_twice_is_refused_and_nothing_stays(folder):
    run = Run()
    with pytest.raises(ValueError, match=r"the name 'a\.b' twice"):
        save(
            folder,
            step=1,
            model=run.model,
            tokenizer=run.tokenizer,
            tensors={"a.b": torch.ones(1), "a": {"b": torch.ones(1)}},
            progress={},
            plan=run.plan,
            keep=1,
        )
    assert names(folder) == []


def assert_full_disk_keeps_the_last(folder, run, reason):
    expected = run.digest()
    with pytest.raises(WorldFailed, match=f"saving step-00000002 failed: {reason}; complete checkpoints") as caught:
        run.save(folder, 2)
    assert caught.value.exit_code == 5
    assert names(folder) == ["step-00000001"]
    assert latest(folder).step == 1
    run.load(latest(folder))
    assert run.digest() == expected


def test_a_file_size_limit_keeps_the_last_checkpoint(folder):
    run = Run()
    run.save(folder, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        assert_full_disk_keeps_the_last(folder, run, os.strerror(errno.EFBIG))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("share", [0.02, 0.5, 0.95])
def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, share):
    """On a real full file system, where this user may mount one; the file size limit above needs no permission."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting is not permitted")
    try:
        with open_run_folder(disk / "run", resume=False, overwrite=False) as folder:
            folder.begin(run_toml="", plan_toml="")
            run = Run()
            path = run.save(folder, 1)
            needed = sum(each.stat().st_blocks for each in path.rglob("*")) * 512
            room = os.statvfs(disk)
            (disk / "filler").write_bytes(bytes(int(room.f_bavail * room.f_frsize - share * needed)))
            assert_full_disk_keeps_the_last(folder, run, os.strerror(errno.ENOSPC))
            (disk / "filler").unlink()
            run.save(folder, 2)
            assert latest(folder).step == 2
    finally:
        subprocess.run(["umount", disk], check=True)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_nothing_is_unpickled(folder, tmp_path):
    run = Run()
    path = run.save(folder, 1)
    bomb = pickle.dumps(Bomb(tmp_path / "boom"))
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin", "state/.metadata", "state/__0_0.distcp"):
        (path / name).write_bytes(bomb)
    run.load(latest(folder))
    AutoModelForCausalLM.from_pretrained(path)
    assert not (tmp_path / "boom").exists()
    with pytest.raises(AttributeError):
        pickle.loads(bomb).read()
    assert (tmp_path / "boom").exists()


def test_saving_and_loading_hold_one_tensor(folder, tmp_path, peak_above_bytes):
    run, small = Run(hidden_size=256, intermediate_size=2048, vocab_size=8192), Run()
    largest_bytes = 8192 * 256 * 4
    other = tmp_path / "other"

    def warm_up():
        with open_run_folder(other, resume=other.exists(), overwrite=False) as elsewhere:
            elsewhere.begin(run_toml="", plan_toml="")
            small.save(elsewhere, 1)
            small.load(latest(elsewhere))

    assert peak_above_bytes(lambda: run.save(folder, 1), warm_up) < 2 * 2**20
    assert peak_above_bytes(lambda: run.load(latest(folder)), warm_up) < largest_bytes + 2 * 2**20


# What a kill leaves: a process resumes, trains and saves at every step; whatever moment it dies at, the next one goes
# on, and in the end the lines that all of them wrote are those of a run that nobody disturbed.


@pytest.fixture
def quick_path(tmp_path):
    """In memory where there is such a folder: a kill loses no page cache, so waiting for a disk would prove nothing."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as path:
        yield Path(path)


def train(path, *, until, started=lambda: None):
    with open_run_folder(path, resume=(path / "run.toml").exists(), overwrite=False) as folder:
        run, ref = Run("qwen3 moe"), latest(folder)
        step = 0 if ref is None else run.load(ref).step
        folder.begin(run_toml="", plan_toml="", step=step)
        started()
        with JsonLines(folder.metrics) as lines:
            for at in range(step + 1, until + 1):
                lines.write({"step": at, "all": run.step()})
                run.save(folder, at, keep=2)


def fork(work, *args):
    """Return the process id of a child that does `work` and exits with 0, or with 1 where that fails."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work(*args)
        code = 0
    finally:
        os._exit(code)


def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def one_thread():
    """What a forked child is held to as well: more threads may sum in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_kills(folder, num_kills):
    path, rng = folder / "killed", random.Random(0)
    ready, write = os.pipe()
    started = time.perf_counter()
    train(path, until=3)
    step_s = (time.perf_counter() - started) / 3
    for _ in range(num_kills):
        child = fork(lambda: train(path, until=10**6, started=lambda: os.write(write, b"x")))
        os.read(ready, 1)
        time.sleep(rng.uniform(0, 2 * step_s))
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
    reached = len((path / "metrics.jsonl").read_bytes().splitlines()) + 2
    train(path, until=reached)
    train(folder / "undisturbed", until=reached)
    assert (path / "metrics.jsonl").read_bytes() == (folder / "undisturbed" / "metrics.jsonl").read_bytes()


def test_a_run_survives_kills(quick_path, one_thread):
    check_kills(quick_path, 3)


@pytest.mark.slow
def test_a_run_survives_many_kills(quick_path, one_thread):
    check_kills(quick_path, 40)


CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


def save_until_change(run, folder, step, number):
    """Save, but exit with 9 just before the file system is changed for the `number`-th time."""
    count = 0

    def hook(event, args):
        nonlocal count
        if event in CHANGES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
            count += 1
            if count == number:
                os._exit(9)

    sys.addaudithook(hook)
    run.save(folder, step, keep=2)


@pytest.mark.parametrize("again", [False, True], ids=["next step", "same step again"])
def test_a_save_may_die_before_each_change_to_the_file_system(quick_path, again):
    whole, run = quick_path / "whole", Run(num_hidden_layers=1)
    digests = {}
    with open_run_folder(whole, resume=False, overwrite=False) as folder:
        folder.begin(run_toml="", plan_toml="")
        for step in (1, 2):
            run.step()
            run.save(folder, step, keep=2)
            digests[step] = run.digest()
    if not again:
        run.step()
        digests[3] = run.digest()
    status, number, seen = 9, 0, set()
    while status == 9:
        number += 1
        path = quick_path / str(number)
        shutil.copytree(whole, path)
        with open_run_folder(path, resume=True, overwrite=False) as folder:
            status = exit_code(fork(save_until_change, run, folder, max(digests), number))
            ref, restored = latest(folder), Run(seed=1, num_hidden_layers=1)
            restored.load(ref)
            assert ref.step in (2, max(digests))
            assert ref.skipped == ()
            assert restored.digest() == digests[ref.step]
            assert not list(folder.checkpoints.glob(".*"))
            seen.add(ref.step)
        shutil.rmtree(path)
    assert status == 0
    assert number > 20
    assert seen == {2, max(digests)}
