"""Before anything is loaded: groups that have met, ranks that hold the same, and sentences that name who does not."""

import dataclasses
import os
import signal
import time

import torch.distributed as dist

from forks import answer_of, launched_store, start_child
from planish.comm.groups import views
from planish.comm.world import in_step, join
from planish.errors import PlanishError, UsageError, WorldFailed
from planish.sections import MeshSection
from planish.train.preflight import common_facts


def test_every_group_bears_the_time_out_of_the_run(ranks):
    """torch gives it to the first group alone; the others would wait for half an hour."""

    def timeouts(world):
        meshes = (world.mesh, world.experts, world.vocab, world.sequence)
        groups = [group for mesh in meshes for group in mesh.get_all_groups()]
        found = {group._get_backend(group._device_types[0]).options._timeout.total_seconds() for group in groups}
        return found, len(groups)

    for found, count in ranks(timeouts, dp=4, ep=2, vp=4, cp=2, timeout_s=41):
        assert found == {41.0}
        assert count == 9


def test_degrees_are_views_of_all_ranks():
    found = {view.name: dict(view.axes) for view in views(MeshSection(replicate=2, dp=12, ep=3, vp=4, cp=6))}
    assert found == {
        "weights": {"replicate": 2, "dp": 12},
        "experts": {"replicate": 2, "copies": 4, "ep": 3},
        "vocab": {"copies": 6, "vp": 4},
        "sequence": {"copies": 4, "cp": 6},
    }


def test_with_stages_they_are_views_of_each_stage():
    found = {view.name: dict(view.axes) for view in views(MeshSection(pp=3, dp=4, ep=2, cp=4))}
    assert found == {
        "weights": {"pp": 3, "replicate": 1, "dp": 4},
        "peers": {"pp": 3, "peers": 4},
        "experts": {"pp": 3, "replicate": 1, "copies": 2, "ep": 2},
        "sequence": {"pp": 3, "copies": 1, "cp": 4},
    }


def test_each_group_holds_the_ranks_beside_one_another(ranks):
    def members(world):
        axes = ((world.experts, "ep"), (world.vocab, "vp"), (world.sequence, "cp"), (world.sequence, "copies"))
        return [dist.get_process_group_ranks(mesh.get_group(axis)) for mesh, axis in axes]

    for rank, found in enumerate(ranks(members, dp=4, ep=4, vp=2, cp=2)):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found == [[0, 1, 2, 3], pair, pair, [rank % 2, rank % 2 + 2]]


def test_what_differs_is_told_by_its_name(run_of, tmp_path):
    def differs(first, second):
        assert first.keys() == second.keys()
        return {name for name in first if first[name] != second[name]}

    run = run_of("llama", {"dp": 2})
    facts = common_facts(run)
    assert differs(facts, common_facts(run)) == set()
    assert differs(facts, common_facts(run_of("llama", {"dp": 2}, ("train.lr", 0.5)))) == {"settings"}
    tiles = common_facts(run_of("llama", {"dp": 2}, ("plan.vocab.tile_bytes", 2**20)))
    assert differs(facts, tiles) == {"the plan", "settings"}
    (tmp_path / "text.txt").write_text("other words")
    assert differs(facts, common_facts(run)) == {"the files of `data.train`"}
    facts = common_facts(run)
    (tmp_path / "model-llama" / "config.json").write_text("{}")
    assert differs(facts, common_facts(run)) == {"config and tokenizer of the model"}


def test_a_file_that_one_rank_lacks_is_named_by_all(run_of, tmp_path, ranks):
    run = run_of("llama", {"dp": 2})

    def work(world):
        mine = run
        if world.rank == 1:
            mine = dataclasses.replace(run, data=dataclasses.replace(run.data, train=(str(tmp_path / "gone.txt"),)))
        try:
            with world.guarded():
                world.require_same(common_facts(mine))
        except PlanishError as error:
            return type(error), str(error)

    for rank, (kind, sentence) in enumerate(ranks(work, dp=2, timeout_s=20)):
        assert kind is UsageError
        assert sentence.startswith("" if rank == 1 else "rank 1 stopped: ")
        assert "gone.txt does not exist" in sentence


def as_rank(rank, port, size, timeout_s, work):
    """Return what `work(world)` returns on this rank, or the error that it met."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "TORCHELASTIC_USE_AGENT_STORE": True}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})  # noqa: TID251 - as torchrun does
    try:
        with join(MeshSection(dp=size, cp=size, timeout_s=timeout_s), device_type="cpu") as world, world.guarded():
            return work(world)
    except PlanishError as error:
        return type(error), str(error)


def test_a_rank_that_never_comes_is_named():
    with launched_store() as port:
        children = [start_child(lambda rank=rank: as_rank(rank, port, 3, 3, lambda _: None)) for rank in (0, 2)]
        for kind, sentence in [answer_of(*child) for child in children]:
            assert kind is WorldFailed
            assert sentence.startswith("the 3 ranks did not meet within 3 s; rank 1 never came: ")


def test_a_stalled_rank_is_named_with_the_step_within_the_time_out():
    def work(world):
        for step in range(1, 10):
            with in_step(step):
                if world.rank == 1 and step == 4:
                    os.kill(os.getpid(), signal.SIGSTOP)
                dist.barrier(group=world.sequence["cp"].get_group())

    with launched_store() as port:
        children = [start_child(lambda rank=rank: as_rank(rank, port, 3, 4, work)) for rank in range(3)]
        began = time.monotonic()
        answers = [answer_of(*children[rank]) for rank in (0, 2)]
        elapsed_s = time.monotonic() - began
        os.kill(children[1][0], signal.SIGKILL)
        os.waitpid(children[1][0], 0)
        os.close(children[1][1])
    for kind, sentence in answers:
        assert kind is WorldFailed
        assert sentence.startswith("rank 1 lost in step 4: ")
    assert elapsed_s < 60
