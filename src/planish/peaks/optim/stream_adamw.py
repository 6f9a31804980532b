"""AdamW whose state waits in far memory and is streamed through a few slots at each step, bit for bit torch's."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planish.errors import WorldFailed
from planish.memory.far import FarTier, Traffic
from planish.peaks.optim.stream_backward import InBackward
from planish.peaks.optim.stream_hybrid import measured_share, split
from planish.peaks.optim.stream_layout import (
    Arrays,
    Chunk,
    Engine,
    FarOptions,
    Flat,
    Piece,
    Shelf,
    build_shelf,
    interleave,
    require_one_device,
)
from planish.peaks.optim.stream_options import TORCH_OPTIONS, check_choices, check_group
from planish.peaks.optim.stream_slots import Slots
from planish.peaks.optim.stream_state import FarTensor, check_saved, load
from planish.peaks.optim.stream_update import Due, Math, update
from planish.price.stream import CHUNK_BYTES, SLOTS, Kept


class StreamAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW` whose state is in far memory: host, disk, or both (OffloadStreamAdamW).

    With g the gradient, w the weight (an fp32 master where the parameter is narrower), t the parameter's updates:

        w <- w - lr * weight_decay * w
        exp_avg <- beta1 * exp_avg + (1 - beta1) * g;   exp_avg_sq <- beta2 * exp_avg_sq + (1 - beta2) * g^2
        w <- w - lr * (exp_avg / (1 - beta1^t)) / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps)

    Parameters are laid end to end and cut into chunks, tensors too, so that staging is what was asked for. At a step
    chunks are fetched, updated and written back by three lanes at once; with G chunks and u, k, d seconds for each,
    T = (u + k + d) + (G - 1) * max(u, k, d) where slots are not short. The last write-backs overlap what follows the
    step. On a CPU the chunks on the host are updated where they lie.

    [Note: never half a step] What can be refused is refused before a number changes. If a step fails after that (the
    disk, an interrupt), some weights are of this step and some of the last: everything is refused from then on, until
    `load_state_dict`. Far memory dies with the process, so a kill leaves checkpoints as they were.

    Memory:        far: 8 bytes per fp32 parameter, 12 per narrower one with `master` (16 with `amsgrad`), each array of
                   a chunk on whole pages. On the device: `slots` chunks of at most `chunk_bytes`, and 4 bytes for each
                   number of one chunk where parameters are narrower than their state; with a disk 2 MiB more. All of
                   it is taken here. The state's first values are written at the first step.
    Communication: none; distributed parameters (FSDP2) are updated where their shards are.
    Exactness:     weights and state bitwise those of `torch.optim.AdamW` on the same device, with `math="fused"` of
                   its `fused=True`, with "torch" of its default on a CPU (the loop, to which `foreach` is bitwise
                   equal), for every chunk and number of slots; with a master, of the same on fp32 masters and fp32
                   copies of the gradients. Gradients are not changed.

    Args:
        params: Parameters or groups; groups may override the options up to `master`.
        lr: Learning rate, a number or a tensor of one.
        betas: Decay rates of both moments.
        eps: Offset of the denominator.
        weight_decay: Decoupled decay.
        amsgrad: Divides by the largest second moment so far.
        maximize: Follows the gradient up.
        master: Keeps an fp32 master weight for parameters that are narrower; False updates them in their own dtype.
        math: Which of torch's two orders of arithmetic.
        host: Bytes of state on the host, filled first; default: all of it, where there is no `disk` either.
        disk: Bytes of state on the disk.
        folder: Where on the disk; the file has no name and is gone with the process.
        cached: Let the system keep the file's pages in memory that nobody else wants.
        chunk_bytes: Largest chunk of state.
        slots: Chunks on their way at once; three keep all lanes busy.
        engine: Where state on the host is updated: "cpu" there, "device" where the parameters are, "hybrid" a share of
            the chunks here and the others there, "auto" where the parameters are. On a CPU "device" streams from host
            memory through slots all the same, at a loss. State on the disk is updated where the parameters are, but
            with "cpu".
        cpu_share: With "hybrid", the share that the CPU updates; default: as both are fast, measured now. It is saved
            with the state and is the saved one after loading, since two devices may round differently.

    Raises:
        ValueError: An option or parameter that does not fit; budgets that do not hold the state, with what would.

    Example:
        >>> weight = torch.ones(4, 2, requires_grad=True)
        >>> optimizer = StreamAdamW([weight], lr=1e-2)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[weight]["exp_avg"].read().shape
        torch.Size([4, 2])

    References:
        arXiv 2609.14306, section 3.4 and algorithm 4: OffloadStreamAdamW.
    """

    def __init__(  # noqa: PLR0913  the options of an optimizer
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        master: bool = True,
        math: Math = "fused",
        host: int | None = None,
        disk: int | None = None,
        folder: Path | None = None,
        cached: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        slots: int = SLOTS,
        engine: Engine = "auto",
        cpu_share: float | None = None,
    ) -> None:
        check_choices(math=math, slots=slots, engine=engine, cpu_share=cpu_share)
        self._math = math
        self._far = FarOptions(
            host=host, disk=disk, folder=folder, cached=cached, chunk_bytes=chunk_bytes, slots=slots, engine=engine
        )
        self._shelves: list[Shelf] = []
        self._places: dict[Tensor, list[tuple[Chunk, Piece]]] = {}
        self._flats: dict[Tensor, Flat] = {}
        self._slots: Slots | None = None
        self._scratch: Tensor | None = None
        self._half = self._begun = False
        self.cpu_share = cpu_share
        self._closing: weakref.finalize | None = None
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "master": master,
        }
        super().__init__(params, defaults | TORCH_OPTIONS)
        self._closing = weakref.finalize(self, _close, self._shelves)
        self._take_in(0)

    @property
    def tiers(self) -> tuple[FarTier, ...]:
        """Far memory that was taken."""
        return tuple(tier for shelf in self._shelves for tier in shelf.tiers)

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All state, in the order in which a step goes through it."""
        return tuple(interleave([chunk for shelf in self._shelves for chunk in shelf.chunks]))

    @property
    def resident(self) -> tuple[Tensor, ...]:
        """State that is updated where it lies, and the counts of steps."""
        blocks = [shelf.block for shelf in self._shelves if shelf.block is not None]
        return (*blocks, *(each["step"] for each in self.state.values()))

    @property
    def staging(self) -> tuple[Tensor, ...]:
        """Slots, and the room for wide gradients."""
        slots = None if self._slots is None else self._slots.staging
        return tuple(each for each in (slots, self._scratch) if each is not None)

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What the lanes did, by name: two for each tier, and the update."""
        lanes = {name: each for tier in self.tiers for name, each in tier.traffic.items()}
        return lanes | {"optim-update": Traffic(busy_s=0.0 if self._slots is None else self._slots.work_s)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and take the memory for their state from what is left of the budgets."""
        super().add_param_group(param_group)
        if self._closing is not None:  # torch's constructor adds the first groups
            try:
                self._take_in(len(self.param_groups) - 1)
            except ValueError:
                self.param_groups.pop()
                raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; returns the closure's loss.

        Raises:
            ValueError: A gradient that cannot be taken; nothing was changed.
            WorldFailed: Far memory failed, now or in an earlier step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_whole()
        due = {param: self._due(param, group) for group in self.param_groups for param in group["params"]
               if param.grad is not None}  # fmt: skip
        with self._all_or_nothing():
            self._update(due)
        return loss

    @contextmanager
    def update_in_backward(self) -> Iterator[None]:
        """Update each chunk as soon as the backward pass inside is done with its gradients, and free them.

        Take the last microbatch's backward pass inside; gradients of earlier ones are added as always. What had a
        gradient before and gets none inside is updated at the end. Clipping by the global norm is not possible: no
        gradient waits for it.

        Memory: gradients of the chunks that are not complete, and of those on their way.
        """
        self._require_whole()
        passing = InBackward(self._slots_at_work(), self._places, due=self._due_of_any, work=self._work)
        with self._all_or_nothing():
            with passing.hooked():
                yield
            with torch.no_grad():
                passing.finish()
        self.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return all state in torch's layout, tensors shaped like their parameters, on the CPU, "master" with them.

        Memory: all of it; `state[param][name].pieces()` goes through it without.
        """
        self._require_whole()
        saved = super().state_dict()
        saved["state"] = {
            index: {name: each.read() if isinstance(each, FarTensor) else each.clone() for name, each in state.items()}
            for index, state in saved["state"].items()
        }
        if self.cpu_share is not None:
            saved["cpu_share"] = self.cpu_share
        for group in saved["param_groups"]:
            group["fused"] = True if self._math == "fused" else None  # so that torch goes on in the same arithmetic
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Fill the memory that exists with a saved state, of this optimizer, planish's AdamW or torch's own.

        Moments stay as wide as they are here (torch's own loading would cast them to the parameter's dtype). Masters
        that were not saved are taken from the parameters.

        Raises:
            ValueError: Other groups, parameters, shapes or state than this optimizer has; nothing was changed.
        """
        check_saved(state_dict, self.param_groups, self.state)
        slots = self._slots_at_work()
        slots.abandon()
        self._half = True
        if self._far.engine == "hybrid" and "cpu_share" in state_dict:
            self.cpu_share = state_dict["cpu_share"]
            for shelf in self._shelves:
                split(shelf.chunks, state_dict["cpu_share"])
        load(state_dict, self.param_groups, self.state, self.chunks, slots)
        self._half = False

    def settle(self) -> None:
        """Wait until all write-backs are done.

        Raises:
            WorldFailed: One of them failed.
        """
        self._slots_at_work().settle()

    def close(self) -> None:
        """Give far memory back."""
        assert self._closing is not None
        self._closing()

    def _take_in(self, first_group: int) -> None:
        """Take memory for the state of the groups from `first_group` on."""
        kinds: dict[tuple[Kept, torch.dtype], list[Flat]] = {}
        for index, group in enumerate(self.param_groups[first_group:], first_group):
            check_group(group, index)
            for number, param in enumerate(group["params"]):
                if param.requires_grad:
                    flat = Flat.of(param, f"parameter {number} of group {index}")
                    kept = Kept.of(param.dtype.itemsize, master=group["master"], amsgrad=group["amsgrad"])
                    dtype = torch.float32 if kept.widened else param.dtype
                    kinds.setdefault((kept, dtype), []).append(flat)
        if not kinds:
            return
        flats = [flat for each in kinds.values() for flat in each]
        device = require_one_device([*self._flats, *(flat.param for flat in flats)])
        shelf = build_shelf(kinds, device, self._far.less(self._shelves))
        self._shelves.append(shelf)
        self._size_staging(torch.device("cpu") if self._far.engine == "cpu" else device)
        if self._far.engine == "hybrid":
            self._share_out(shelf, device)
        self._index(shelf, kinds)

    def _share_out(self, shelf: Shelf, device: torch.device) -> None:
        if self.cpu_share is None and shelf.placement.host_bytes:
            self.cpu_share = measured_share(shelf.chunks[0], device)
        split(shelf.chunks, self.cpu_share or 0.0)

    def _size_staging(self, device: torch.device) -> None:
        placements = [shelf.placement for shelf in self._shelves]
        num_slots = min(self._far.slots, sum(each.num_slots for each in placements))
        slot_bytes = max(each.slot_bytes for each in placements)
        before = self._slots
        if before is None or (num_slots, slot_bytes) != (before.num_slots, before.slot_bytes):
            if before is not None:
                before.settle()
            self._slots = before = None  # goes before the new ones come
            self._slots = Slots(num_slots, slot_bytes, device)
        scratch_bytes = max(each.scratch_bytes for each in placements)
        if scratch_bytes and (self._scratch is None or self._scratch.nbytes < scratch_bytes):
            self._scratch = None
            self._scratch = torch.empty(scratch_bytes // 4, dtype=torch.float32, device=device)

    def _index(self, shelf: Shelf, kinds: Mapping[tuple[Kept, torch.dtype], Sequence[Flat]]) -> None:
        for (kept, dtype), flats in kinds.items():
            for flat in flats:
                places = self._places[flat.param] = []
                self._flats[flat.param] = flat
                far = partial(FarTensor, flat=flat, places=places, dtype=dtype, slots=self._slots_when_whole)
                step = torch.zeros((), dtype=torch.float32, device="cpu")
                self.state[flat.param] = {"step": step} | {name: far(name) for name in kept.names}
        for chunk in shelf.chunks:
            for piece in chunk.pieces:
                self._places[piece.flat.param].append((chunk, piece))

    def _update(self, due: Mapping[Tensor, Due]) -> None:
        chunks = [chunk for chunk in self.chunks if any(piece.flat.param in due for piece in chunk.pieces)]
        self._slots_at_work().walk(chunks, partial(self._work, due=due))
        for each in due.values():
            each.step.add_(1)

    def _work(self, chunk: Chunk, arrays: Arrays, *, due: Mapping[Tensor, Due]) -> None:
        self._begun = True
        scratch = self._scratch if chunk.kept.widened else None
        update(chunk, arrays, due, math=self._math, scratch=scratch)

    def _due_of_any(self, param: Tensor) -> Due:
        group = next(group for group in self.param_groups if any(each is param for each in group["params"]))
        return self._due(param, group)

    def _due(self, param: Tensor, group: dict[str, Any]) -> Due:
        flat = self._flats.get(param)
        if flat is None:
            raise ValueError(
                f"a parameter {list(param.shape)} has a gradient and was frozen when its group was added, so there is "
                "no room for its state; add it to a group once it trains."
            )
        assert param.grad is not None
        if param.grad.layout != torch.strided:
            raise ValueError(
                f"the gradient of a parameter {list(param.shape)} is sparse; StreamAdamW takes dense ones "
                "(`sparse=False` of the embedding), or use SparseAdam."
            )
        return Due.of(flat, group, self.state[param]["step"])

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        self._begun = False
        try:
            yield
        except BaseException:
            self._half = self._begun
            self._slots_at_work().abandon()
            raise

    def _slots_at_work(self) -> Slots:
        if self._slots is None:
            self._slots = Slots(0, 0, torch.device("cpu"))
        return self._slots

    def _slots_when_whole(self) -> Slots:
        self._require_whole()
        return self._slots_at_work()

    def _require_whole(self) -> None:
        if self._half:
            raise WorldFailed(
                "an earlier step of StreamAdamW failed between its chunks, so weights and state are of two steps; load "
                "the last checkpoint into both."
            )


def _close(shelves: list[Shelf]) -> None:
    for shelf in shelves:
        for tier in shelf.tiers:
            tier.close()
