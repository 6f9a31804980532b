"""A run's checkpoints: written while training waits, or behind it."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from planish.comm.world import World
from planish.errors import WorldFailed
from planish.train import checkpoint
from planish.train.behind import Behind
from planish.train.job import Job
from planish.train.run_folder import RunFolder
from planish.train.seal import Unsealed
from planish.train.tensor_files import FarTensor

_LOOK_AGAIN_S = 0.01


class Saver:
    """Saves the steps of a run; the ranks call the same methods together.

    Behind training a checkpoint counts once every rank's files are durable, which the ranks find out at the end of each
    step; rank 0's thread seals it then. One is under way at a time, and the next waits for it.

    Communication: while one is under way, a few bytes of each rank to all at each step.

    Args:
        folder: Where the run goes.
        world: The ranks that train together.
        behind: What writes behind training; None: training waits.
        saved_step: The step of the newest checkpoint; 0: none.
        note: Told of each checkpoint that is complete.

    Attributes:
        saved_step: The step of the newest complete checkpoint.
    """

    def __init__(
        self, folder: RunFolder, world: World, behind: Behind | None, *, saved_step: int, note: Callable[[str], None]
    ) -> None:
        self.saved_step = saved_step
        self._folder, self._world, self._behind, self._note = folder, world, behind, note
        self._unsealed: Unsealed | None = None
        self._keep, self._sealing = 1, False

    def save(self, job: Job, step: int, progress: Mapping[str, Any]) -> None:
        """Write a checkpoint of `job`, or copy what it takes.

        Raises:
            WorldFailed: The disk refuses; earlier checkpoints stay.
        """
        self.finish()
        self._keep = job.run.save.keep
        what: dict[str, Any] = {
            "step": step,
            "model": job.engine.anatomy.model,
            "tokenizer": job.tokenizer,
            "tensors": optimizer_tensors(job),
            "progress": progress,
            "plan": job.run.plan,
            "world": self._world,
        }
        if self._behind is None:
            self._saved(checkpoint.save(self._folder, keep=self._keep, **what), step)
        else:
            self._unsealed = checkpoint.write(self._folder, files=self._behind.file, **what)

    def look(self) -> None:
        """See how far the checkpoint under way is, at the end of a step.

        Raises:
            WorldFailed: The disk has refused on some rank; earlier checkpoints stay.
        """
        while self._unsealed is not None and self._go_on(self._unsealed):
            pass

    def finish(self) -> None:
        """Wait for the checkpoint under way.

        Raises:
            WorldFailed: As of `look`.
        """
        self.look()
        while self._unsealed is not None:
            time.sleep(_LOOK_AGAIN_S)
            self.look()

    def _go_on(self, unsealed: Unsealed) -> bool:
        """Do what comes next, if all ranks are done with what came before; return whether they were."""
        assert self._behind is not None
        error = self._behind.error
        reason = None if error is None else str(getattr(error, "strerror", None) or error)
        ranks = self._world.gather([self._behind.busy, reason])
        failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(ranks) if why is not None]
        if failed:
            self._unsealed = None
            unsealed.drop()
            raise WorldFailed(
                f"saving {unsealed.path.name} failed on {', '.join(failed)}; complete checkpoints are intact, make "
                "room and go on with `--resume`."
            )
        if any(busy for busy, _ in ranks):
            return False
        if self._sealing:
            self._saved(unsealed.path, unsealed.step)
            self._unsealed = None
        elif self._world.leads:
            self._behind.then(lambda: unsealed.seal(self._keep))
        self._sealing = not self._sealing
        return True

    def _saved(self, path: object, step: int) -> None:
        self.saved_step = step
        self._note(f"saved {path}")


def optimizer_tensors(job: Job) -> dict[str, dict[str, dict[str, Tensor | FarTensor]]]:
    """Return the optimizer's state by parameter name, wherever it lies; of what ranks share, as their shards."""
    named = job.engine.anatomy.model.named_parameters()
    state = {name: dict(job.optimizer.state[each]) for name, each in named if each in job.optimizer.state}
    staged = job.engine.staged
    if staged is not None:
        for name, tensors in state.items():
            tensors.update({key: staged.sharded(name, each) for key, each in tensors.items()})
    return {"optimizer": state}
