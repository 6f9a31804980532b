"""The store under transformers' checkpointing seam: bits, bytes, evaluation and generation, failures, fakes."""

import errno
import tempfile
import threading

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from forks import run_in_child
from planish.errors import UsageError, WorldFailed
from planish.memory import far_disk, far_host
from planish.memory.far_disk import RING_BYTES
from planish.memory.ledger import Ledger
from planish.methods import Plain, Plan
from planish.models.anatomy import find
from planish.models.install import install
from planish.peaks.boundary.offload import FarBudget, open_store
from planish.price.boundary import Depth

LAYERS, ROWS, TOKENS, WIDTH = 6, 2, 48, 32
NBYTES = ROWS * TOKENS * WIDTH * 4
CPU = torch.device("cpu")


@pytest.fixture
def open_disk(tmp_path):
    """Return a maker of stores on disk; all are closed at the end."""
    stores = []

    def make(*, boundary_bytes=NBYTES, in_flight=1, disk_bytes=2**30, **rest):
        budget = FarBudget(disk_bytes=disk_bytes, folder=tmp_path)
        depth = Depth(num_boundaries=LAYERS, boundary_bytes=boundary_bytes, in_flight=in_flight)
        stores.append(open_store(depth, budget, device=CPU, **rest))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def checkpointed(model, store=None, *, reentrant=False):
    model.train().activation_checkpointing_enable({"use_reentrant": reentrant})
    if store is not None:
        for index, layer in enumerate(find(model).layers.values()):
            layer._gradient_checkpointing_func = store.checkpoint(index, layer._gradient_checkpointing_func)
    return model


def batch(rows=ROWS, length=TOKENS, seed=1):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model, ids):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "gemma2", "granite", "cohere"])
def test_families_give_the_bits_of_plain_checkpointing(tiny_model, open_disk, family, dtype, reentrant):
    store = open_disk()
    shape = {"num_hidden_layers": LAYERS, "attention_dropout": 0.1, "dtype": dtype}
    expected = checkpointed(tiny_model(family, **shape), reentrant=reentrant)
    ours = checkpointed(tiny_model(family, **shape), store, reentrant=reentrant)
    for step, length in enumerate((TOKENS, 7)):
        ids = batch(length=length, seed=step)
        assert equal(gradients(ours, ids), gradients(expected, ids))
    assert store.num_offloaded == 2 * (LAYERS - 1)
    itemsize = dtype.itemsize
    assert store.tiers[0].written_bytes == (LAYERS - 1) * ROWS * (TOKENS + 7) * WIDTH * itemsize


def test_evaluation_and_generation_between_forward_and_backward(tiny_model, open_disk):
    store = open_disk()
    expected = checkpointed(tiny_model(num_hidden_layers=LAYERS))
    ours = checkpointed(tiny_model(num_hidden_layers=LAYERS), store)

    def losses(model):
        model.zero_grad(set_to_none=True)
        loss = model(batch(), labels=batch(), use_cache=False).loss
        with torch.no_grad():
            evaluated = model.eval()(batch(seed=2), labels=batch(seed=2)).loss
        tokens = model.generate(batch(1, 5), max_new_tokens=4, do_sample=False, pad_token_id=0)
        model.train()
        tokens_in_training = model.generate(batch(1, 5), max_new_tokens=4, do_sample=False, pad_token_id=0)
        loss.backward()
        grads = [each.grad for each in model.parameters()]
        return [loss.detach(), evaluated, tokens, tokens_in_training, *grads]

    assert equal(losses(ours), losses(expected))
    assert store.num_offloaded == LAYERS - 1


def hidden_step(model, ledger):
    ids = torch.zeros((ROWS, TOKENS), dtype=torch.int64)
    with ledger.phase("forward"):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    with ledger.phase("backward"):
        hidden.sum().backward()


def peaks(model):
    """Return the peak of each phase of the second microbatch of an accumulation, and the bytes alive after it."""
    with Ledger() as ledger, ledger.watch(model):
        for step in range(2):
            ledger.start_step(step)
            hidden_step(model, ledger)
        return ledger.peak_bytes, ledger.live_bytes


def test_the_ledger_s_peak_falls_by_all_boundaries_but_two(tiny_model, open_disk):
    plain, plain_after = peaks(checkpointed(tiny_model(num_hidden_layers=LAYERS)))
    store = open_disk()
    ours, ours_after = peaks(checkpointed(tiny_model(num_hidden_layers=LAYERS), store))
    assert store.num_offloaded == 2 * (LAYERS - 1)
    assert plain["backward"] - ours["backward"] == (LAYERS - 2) * NBYTES
    assert plain_after == ours_after


@pytest.mark.parametrize("every", [1, 2])
def test_a_dry_run_s_ledger_equals_the_real_one(tiny_model, open_disk, every):
    def shown(*, dry):
        with Ledger() as ledger:
            with ledger.category("staging"):
                store = open_disk(dry=dry, every=every, label=lambda index, each: ledger.adopt(each, "boundaries"))
            model = tiny_model(num_hidden_layers=LAYERS)
            install(model, Plan(vocab=Plain(), boundary=Plain()))  # no S x S mask, which fakes alone would make
            peaks = []
            with ledger.watch(checkpointed(model, store)):
                for step in range(2):
                    ledger.start_step(step)
                    hidden_step(model, ledger)
                    peaks.append(ledger.end_step().phases)
        return [{phase: (peak.peak_bytes, peak.categories) for phase, peak in each.items()} for each in peaks]

    with FakeTensorMode():
        dry = shown(dry=True)
    real = shown(dry=False)
    assert dry == real
    assert real[1]["backward"][1]["staging"] == RING_BYTES


def test_nothing_is_allocated_after_the_first_step(tiny_model, open_disk, monkeypatch):
    model = checkpointed(tiny_model(num_hidden_layers=LAYERS), store := open_disk())
    counter = []

    def counted(owner, name):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            counter.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    gradients(model, batch())
    counted(tempfile, "TemporaryFile")
    counted(threading.Thread, "start")
    counted(far_host, "aligned")
    counted(far_disk, "aligned")
    counted(far_disk.os, "posix_fallocate")
    for step in range(3):
        gradients(model, batch(seed=step))
        assert counter == []
    assert store._racks[0].pools[0].most_in_use == LAYERS - 1
    open_disk()
    assert sorted(counter) == ["TemporaryFile", "aligned", "posix_fallocate", "start", "start"]


def test_a_disk_that_fills_up_ends_the_step_with_its_sentence(tiny_model, open_disk, monkeypatch):
    model = checkpointed(tiny_model(num_hidden_layers=LAYERS), store := open_disk())
    gradients(model, batch())
    write = far_disk.os.pwrite

    def full(*args):
        if store.num_offloaded > LAYERS + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(far_disk.os, "pwrite", full)
    with pytest.raises(WorldFailed, match="No space left on device; the last checkpoint is intact"):
        gradients(model, batch())


def test_a_disk_that_cannot_be_read_ends_the_backward_with_its_sentence(tiny_model, open_disk, monkeypatch):
    model = checkpointed(tiny_model(num_hidden_layers=LAYERS), open_disk())

    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(far_disk.os, "preadv", broken)
    with pytest.raises(WorldFailed, match=r"reading 12.0 KiB of far memory in .* failed: Input/output error"):
        gradients(model, batch())


def test_far_memory_is_as_large_as_boundaries_can_use(open_disk):
    assert open_disk().tiers[0].slab.capacity_bytes == (LAYERS - 1) * NBYTES
    assert open_disk(in_flight=3).tiers[0].slab.capacity_bytes == 3 * (LAYERS - 1) * NBYTES
    assert open_disk(every=2).tiers[0].slab.capacity_bytes == 2 * NBYTES
    assert open_disk(disk_bytes=3 * NBYTES + 1).boundaries.offloaded == (0, 1, 2)


def test_budgets_that_hold_nothing_are_refused(open_disk, tmp_path):
    depth = Depth(num_boundaries=4, boundary_bytes=2**20)
    with pytest.raises(UsageError, match=r"`disk` = 0.5 MiB holds no boundary, each takes 1.0 MiB; give it a multiple"):
        open_store(depth, FarBudget(disk_bytes=2**19, folder=tmp_path), device=CPU)
    with pytest.raises(UsageError, match="needs `host` or `disk`; write for instance"):
        open_store(depth, FarBudget(), device=CPU)
    with pytest.raises(UsageError, match="`disk` needs `folder`"):
        open_store(depth, FarBudget(disk_bytes=2**30), device=CPU)
    with pytest.raises(UsageError, match="`host` memory is the device's own on a CPU"):
        open_store(depth, FarBudget(host_bytes=2**30), device=CPU)


def test_host_first_then_disk(tmp_path):
    budget = FarBudget(host_bytes=2 * NBYTES, disk_bytes=2**30, folder=tmp_path)
    with FakeTensorMode():
        depth = Depth(num_boundaries=LAYERS, boundary_bytes=NBYTES)
        store = open_store(depth, budget, device=torch.device("cuda"), dry=True)
    assert [(tier.name, tier.slab.capacity_bytes // NBYTES) for tier in store.tiers] == [("host", 2), ("disk", 3)]
    store.close()


def test_layers_wrapped_by_fsdp(open_disk):
    """In a child: what is left of a gloo group cannot end in the forks of later tests, and they would wait for ever."""
    run_in_child(lambda: are_wrapped_by_fsdp(open_disk))


def are_wrapped_by_fsdp(open_disk):
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def sharded(store=None):
        torch.manual_seed(0)
        model = checkpointed(LlamaForCausalLM(config), store)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)

    store = open_disk(boundary_bytes=NBYTES // 2)
    ours, expected = sharded(store), sharded()
    for seed in range(2):
        left, right = gradients(ours, batch(seed=seed)), gradients(expected, batch(seed=seed))
        assert equal([left[0], *(each.to_local() for each in left[1:])], [right[0], *(g.to_local() for g in right[1:])])
    assert store.num_offloaded == 2 * (LAYERS - 1)  # bf16 boundaries: they fit their slots
