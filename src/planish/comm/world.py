"""The ranks of one run: who takes part, what all must agree on, and what the others hear when one is lost."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from planish import errors
from planish.comm import groups
from planish.comm.ring import Circle
from planish.errors import PlanishError, UsageError, WorldFailed
from planish.sections import MeshSection

# How long the ranks that are left wait for word from the others before they call them lost.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The ranks that train together; one rank needs no process group.

    Attributes:
        rank: This process, from 0.
        size: How many there are.
        mesh: Axes "replicate" x "dp" over the ranks that hold the same layers; None where there is one rank.
        experts: Axes "replicate" x "copies" x "ep" over the same ranks; None where experts are not spread.
        vocab: Axes "copies" x "vp" over the same ranks; None where they do not share the vocabulary.
        assumed: The others are not there, and are taken to give what this rank gives.
        pipeline: Axis "pp" over ranks with different layers, which all work on the same rows; None where there is no
            pipeline. Ranks with the same layers lie beside one another.
        together: Those with the same layers, in one group; None where they are all of them, or one.
        sequence: Axes "copies" x "cp" over the same ranks; None where each has whole rows.
        timeout: After which a rank that does not answer is lost; None: torch's own.
    """

    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None
    experts: DeviceMesh | None = None
    vocab: DeviceMesh | None = None
    assumed: bool = False
    pipeline: DeviceMesh | None = None
    together: dist.ProcessGroup | None = None
    sequence: DeviceMesh | None = None
    timeout: timedelta | None = None

    @property
    def reader(self) -> tuple[int, int]:
        """Which rows this rank takes of each batch: those of the reader (number, of so many)."""
        _, sharers = self.place
        return (self.rank - self.peers.start) // sharers, len(self.peers) // sharers

    @property
    def seat(self) -> tuple[int, int]:
        """Which rank of its pipeline this one is: (number, of so many)."""
        size = 1 if self.pipeline is None else self.pipeline.size()
        return self.rank * size // self.size, size

    @property
    def peers(self) -> range:
        """The ranks that hold the same layers as this one, itself among them."""
        seat, seats = self.seat
        return range(seat * self.size // seats, (seat + 1) * self.size // seats)

    @property
    def place(self) -> tuple[int, int]:
        """Which span of its rows this rank takes: (number, of so many); an assumed one takes the last, the largest."""
        if self.sequence is None:
            return 0, 1
        sharers = self.sequence["cp"].size()
        return sharers - 1 if self.assumed else self.rank % sharers, sharers

    @property
    def circle(self) -> Circle | None:
        """The ranks that share this one's rows, in the order of their spans; None where no other does."""
        if self.sequence is None:
            return None
        place, sharers = self.place
        return Circle(rank=place, size=sharers, group=self.sequence["cp"].get_group())

    @property
    def counts(self) -> bool:
        """Whether other ranks have tokens of their own."""
        return len(self.peers) > 1

    @property
    def leads(self) -> bool:
        """Whether this rank speaks and writes for all."""
        return self.rank == 0

    def sum(self, number: int) -> int:
        """Return the sum of `number` over ranks with tokens of their own. Communication: one all-reduce of 8 bytes."""
        return self._reduce(number, dist.ReduceOp.SUM, self.together) if self.counts else number

    def max(self, number: int) -> int:
        """Return the largest `number` of any rank. Communication: one all-reduce of 8 bytes."""
        return self._reduce(number, dist.ReduceOp.MAX)

    def add(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, summed over ranks with tokens of their own. Communication: one all-reduce of its bytes."""
        if self.counts:
            dist.all_reduce(tensor, group=self.together)
        return tensor

    def norm(self, part: Tensor) -> Tensor:
        """Return the norm of what the ranks of a pipeline hold together, `part` of it here.

        Communication: one all-reduce of a number, in a pipeline.
        """
        if self.pipeline is None:
            return part
        squared = part.double().square()
        dist.all_reduce(squared, group=self.pipeline.get_group())
        return squared.sqrt()

    def gather(self, value: Any) -> list[Any]:
        """Return what each rank gave, by rank; values that JSON can hold. Communication: one all-gather."""
        if self.size == 1 or self.assumed:
            return [value] * self.size
        texts: list[str] = [""] * self.size
        dist.all_gather_object(texts, json.dumps(value))
        return [json.loads(text) for text in texts]

    def second_group(self) -> dist.ProcessGroup:
        """Return another group of this rank's pipeline, with the first one's time-out, for what is not to wait for it.

        All ranks call it together.
        """
        num_peers = len(self.peers)
        pipelines = [list(range(first, self.size, num_peers)) for first in range(num_peers)]
        made = [dist.new_group(ranks, timeout=self.timeout) for ranks in pipelines]
        return made[self.rank % num_peers]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()

    def require_same(self, facts: dict[str, str]) -> None:
        """Refuse ranks that differ in any of `facts`, on every rank alike.

        Raises:
            UsageError: The ranks that differ from rank 0, and in what.
        """
        everywhere = self.gather(facts)
        for what in facts:
            other = [str(rank) for rank, each in enumerate(everywhere) if each[what] != everywhere[0][what]]
            if other:
                ranks = f"rank{'s' if len(other) > 1 else ''} {', '.join(other)}"
                raise UsageError(
                    f"{ranks} and rank 0 differ in {what}; start every rank with the same settings, files and versions."
                )

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Let every rank end as the first one that failed did: with its exit code, naming it.

        Raises:
            PlanishError: This rank's, or of another rank's kind.
            WorldFailed: A rank is gone without a word.
        """
        if self.size == 1:
            yield
            return
        try:
            yield
        except PlanishError as error:
            self._publish(type(error).__name__, str(error))
            raise
        except (Exception, KeyboardInterrupt) as error:
            # `torchrun` asks the ranks that are left to end, maybe before they have said why.
            cause = error.__context__ if isinstance(error, KeyboardInterrupt) else error
            if cause is not None and _is_of_the_group(cause):
                _ignore_sigterm()
                raise self._diagnose(cause, _where(error)) from cause
            if isinstance(error, Exception):
                self._publish("", f"{type(error).__name__}: {error}{_where(error)}")
            raise

    def _reduce(self, number: int, op: Any, group: dist.ProcessGroup | None = None) -> int:
        if self.size == 1:
            return number
        if self.assumed:
            return number * len(self.peers) if op is dist.ReduceOp.SUM else number
        assert self.mesh is not None
        value = torch.tensor(number, dtype=torch.int64, device=self.mesh.device_type)
        dist.all_reduce(value, op, group=group)
        return int(value)

    def _publish(self, kind: str, sentence: str) -> None:
        with suppress(dist.DistError):  # the store may be gone, and this rank's own error is the one to tell
            _store().set(f"planish/failed/{self.rank}", json.dumps([kind, sentence]))

    def _diagnose(self, error: BaseException, where: str) -> PlanishError:
        """Return why a collective failed: what another rank said, or which rank says nothing."""
        try:
            told = self._told()
            silent = [] if told else self._silent()
        except dist.DistError:
            told, silent = None, ["0 or its launcher"]
        if told is not None:
            return told
        who = f"rank{'s' if len(silent) > 1 else ''} {', '.join(silent)}" if silent else "a collective"
        lost = "lost" if silent else "timed out"
        said = str(error).splitlines()[0]
        return WorldFailed(f"{who} {lost}{where}: {said}; complete checkpoints are intact, go on with `--resume`.")

    def _told(self) -> PlanishError | None:
        """Return the error that another rank tells of within the grace, or None."""
        _store().set(f"planish/here/{self.rank}", "")
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until:
            for rank in range(self.size):
                if _store().check([f"planish/failed/{rank}"]):
                    kind, sentence = json.loads(_store().get(f"planish/failed/{rank}"))
                    return getattr(errors, kind or "WorldFailed")(f"rank {rank} stopped: {sentence}")
            time.sleep(0.1)
        return None

    def _silent(self) -> list[str]:
        return [str(rank) for rank in range(self.size) if not _store().check([f"planish/here/{rank}"])]


ALONE = World()
"""The world of a run on one rank."""


def is_launched() -> bool:
    """Return whether `torchrun` started this process."""
    return dist.is_torchelastic_launched()


def restarts() -> int:
    """Return how often `torchrun` has started this run again after a rank was lost."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))  # noqa: TID251 - the launcher


def launched_size() -> int:
    """Return how many ranks `torchrun` started; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1  # noqa: TID251 - the launcher


def launched_rank() -> int:
    """Return which of the ranks that `torchrun` started this process is; 0 without it."""
    return int(os.environ["RANK"]) if is_launched() else 0  # noqa: TID251 - the launcher


@contextmanager
def join(mesh: MeshSection, *, device_type: str) -> Iterator[World]:
    """Return the world of this process over the ranks of `mesh`, gloo on a CPU and NCCL on CUDA.

    Raises:
        WorldFailed: Not all ranks came within `mesh.timeout_s`.
    """
    if mesh.size == 1:
        yield ALONE
        return
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # noqa: TID251 - the launcher
    try:
        backend = "nccl" if device_type == "cuda" else "gloo"
        timeout, store = timedelta(seconds=mesh.timeout_s), None
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        # `torchrun` keeps its store when it starts a run again, and in it the addresses of ranks that are gone.
        store = dist.PrefixStore(f"planish/attempt/{restarts()}", store)
        store.set(f"planish/came/{rank}", "")
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        world = _world(mesh, device_type, rank=rank)
    except RuntimeError as error:
        if not _is_of_the_group(error):
            raise
        raise WorldFailed(_why_not_met(error, store, mesh)) from error
    try:
        yield world
    finally:
        dist.destroy_process_group()


def _why_not_met(error: Exception, store: dist.Store | None, mesh: MeshSection) -> str:
    """Return what kept the ranks apart, naming those that never came."""
    said = str(error).splitlines()[0]
    if "EADDRINUSE" in str(error):
        return f"the ranks cannot meet, their port is in use: {said}; give `torchrun` another `--master-port`."
    missing: list[str] = []
    if store is not None:
        with suppress(dist.DistError):  # the store may be gone too
            missing = [str(rank) for rank in range(mesh.size) if not store.check([f"planish/came/{rank}"])]
    who = f"; rank{'s' if len(missing) > 1 else ''} {', '.join(missing)} never came" if missing else ""
    return f"the {mesh.size} ranks did not meet within {mesh.timeout_s:g} s{who}: {said}"


@contextmanager
def assume(mesh: MeshSection, *, device_type: str, rank: int = 0) -> Iterator[World]:
    """Return the world of one rank of `mesh` with no other rank there: collectives leave the data as it is.

    No other process group may be there meanwhile. DTensor remembers the place of this rank among those with the same
    layers beyond it, so that a process may only take the same place afterwards.

    Args:
        mesh: The ranks.
        device_type: Of all their tensors.
        rank: Which of them this process is taken to be.
    """
    if mesh.size == 1:
        yield ALONE
        return
    dist.init_process_group("fake", rank=rank, world_size=mesh.size, store=FakeStore())
    try:
        yield _world(mesh, device_type, rank=rank, assumed=True)
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds groups that are gone, and takes another rank's mesh for this one's


def _world(mesh: MeshSection, device_type: str, *, rank: int = 0, assumed: bool = False) -> World:
    made = groups.make(mesh, device_type, assumed=assumed)
    return World(
        rank=rank,
        size=mesh.size,
        mesh=made["weights"],
        experts=made.get("experts"),
        vocab=made.get("vocab"),
        sequence=made.get("sequence"),
        pipeline=made.get("pipeline"),
        together=made["peers"].get_group() if "peers" in made else None,
        assumed=assumed,
        timeout=timedelta(seconds=mesh.timeout_s),
    )


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _ignore_sigterm() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def in_step(step: int) -> Iterator[None]:
    """Let an error that passes through bear the number of the step, for `World.guarded` to tell."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in step {step}")
        raise


def _where(error: BaseException) -> str:
    """Return " in step 7" where `in_step` has noted one."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("in step ")]
    return f" {notes[0]}" if notes else ""


def _is_of_the_group(error: BaseException) -> bool:
    """Return whether a collective raised `error`; gloo says so in the text alone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
