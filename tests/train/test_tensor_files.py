import errno
import os
import pickle
import resource
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from planish.train.tensor_files import describe, difference, load_tensors, save_tensors, write_safetensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def random_bits(shape, dtype):
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape)


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=5, max_size=5),
)
@settings(deadline=None, max_examples=50)
def test_safetensors_reads_the_same_bits(shapes, dtypes):
    tensors = {f"t{i}": random_bits(shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))}
    with tempfile.TemporaryDirectory() as folder:
        write_safetensors(Path(folder) / "a.safetensors", tensors, {"format": "pt"})
        read = load_file(Path(folder) / "a.safetensors")
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert read[name].shape == tensor.shape
            assert same_bits(read[name].reshape(-1), tensor.reshape(-1))


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=5, max_size=5),
)
@settings(deadline=None, max_examples=25)
def test_tensors_come_back_into_their_own_memory(shapes, dtypes):
    tensors = {
        f"a.{i}": random_bits(shape, dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    places = {name: tensor.data_ptr() for name, tensor in into.items()}
    with tempfile.TemporaryDirectory() as folder:
        save_tensors(Path(folder), tensors)
        load_tensors(Path(folder), into)
    assert {name: tensor.data_ptr() for name, tensor in into.items()} == places
    assert all(same_bits(into[name].reshape(-1), tensors[name].reshape(-1)) for name in tensors)


def test_strided_tensors_keep_their_layout(tmp_path):
    saved = torch.randn(4, 6)
    into = torch.zeros(6, 4).t()
    save_tensors(tmp_path, {"w": saved.t().contiguous().t()})
    load_tensors(tmp_path, {"w": into})
    assert torch.equal(into, saved)
    assert into.stride() == (1, 4)


def test_an_absent_name_is_an_error_and_can_be_caught(tmp_path):
    save_tensors(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(RuntimeError, match="Missing key"):
        load_tensors(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)})


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a": torch.ones(2)}, "`b` is [3] torch.float32 in the checkpoint and absent here"),
        ({"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(1)}, "`c` is absent in the checkpoint and [1] torch"),
        ({"a": torch.ones(2), "b": torch.ones(4)}, "`b` is [3] torch.float32 in the checkpoint and [4] torch.float32"),
        ({"a": torch.ones(2).half(), "b": torch.ones(3)}, "`a` is [2] torch.float32 in the checkpoint and [2] torch.f"),
        ({}, "(and 1 more)"),
    ],
)
def test_differences_are_named(tmp_path, tensors, words):
    save_tensors(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)})
    assert words in difference(tensors, describe(tmp_path))


def test_no_difference(tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.tensor(3.0), "c": torch.ones(0, 4)}
    save_tensors(tmp_path, tensors)
    assert difference(tensors, describe(tmp_path)) is None


def test_a_full_disk_keeps_its_reason(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            save_tensors(tmp_path, {"a": torch.ones(2**16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return (Path.touch, (self.target,))


def test_a_malicious_pickle_is_not_opened(tmp_path):
    save_tensors(tmp_path, {"a": torch.ones(2)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "boom")))
    load_tensors(tmp_path, {"a": torch.zeros(2)})
    assert not (tmp_path / "boom").exists()
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "boom").exists()  # torch's own file format does open it: the bomb is live


MIB = 2**20


def test_saving_and_loading_hold_one_tensor(tmp_path, peak_above_bytes):
    tensors = {f"t{i}": torch.randn(4096, 2048) for i in range(4)}  # 32 MiB each
    strided = {name: tensor.t() for name, tensor in tensors.items()}
    small = {"t": torch.randn(2)}

    def warm_up():
        save_tensors(tmp_path / "small", small)
        load_tensors(tmp_path / "small", small)

    assert peak_above_bytes(lambda: save_tensors(tmp_path, tensors), warm_up) < 2 * MIB
    assert peak_above_bytes(lambda: load_tensors(tmp_path, tensors), warm_up) < (32 + 2) * MIB
    assert peak_above_bytes(lambda: save_tensors(tmp_path, strided), warm_up) < (32 + 2) * MIB


def rank_saves(folder, rank, world_size):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=dist.default_pg_timeout
    )
    mesh = dist.init_device_mesh("cpu", (world_size,))
    weight = torch.arange(35.0).view(7, 5)
    save_tensors(
        folder / "saved",
        {
            "rows": distribute_tensor(weight, mesh, [Shard(0)]),
            "columns": distribute_tensor(weight, mesh, [Shard(1)]),
            "one row": distribute_tensor(weight[:1], mesh, [Shard(0)]),
            "plain": weight,
        },
    )
    dist.destroy_process_group()


def rank_loads(folder, rank, world_size):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=dist.default_pg_timeout
    )
    mesh = dist.init_device_mesh("cpu", (world_size,))
    into = {name: distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]) for name in ("rows", "columns", "plain")}
    load_tensors(folder / "saved", into)
    expected = torch.arange(35.0).view(7, 5)
    assert all(isinstance(each, DTensor) and torch.equal(each.full_tensor(), expected) for each in into.values())
    dist.destroy_process_group()


def run_ranks(function, folder, world_size):
    (folder / "store").unlink(missing_ok=True)
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                function(folder, rank, world_size)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * world_size


def test_shards_of_three_ranks_come_back_on_two_and_on_one(tmp_path):
    run_ranks(rank_saves, tmp_path, 3)
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) == 3
    run_ranks(rank_loads, tmp_path, 2)
    expected = torch.arange(35.0).view(7, 5)
    into = {name: torch.zeros(7, 5) for name in ("rows", "columns", "plain")} | {"one row": torch.zeros(1, 5)}
    assert difference(into, describe(tmp_path / "saved")) is None
    load_tensors(tmp_path / "saved", into)
    assert all(torch.equal(each, expected[: len(each)]) for each in into.values())
