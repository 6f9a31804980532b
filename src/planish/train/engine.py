"""A model with the plan's methods in place, counted by the ledger: what training, evaluation and dry runs share."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from planish.comm.world import ALONE, World
from planish.data.batch import Batch
from planish.memory.far import FarTier
from planish.memory.ledger import Ledger
from planish.methods import Offload, Packed, Plan
from planish.models.anatomy import Anatomy, find
from planish.models.head import HeadLoss, filter_of, head_loss
from planish.models.install import Installed, install
from planish.peaks.activation.keep import Keeper
from planish.peaks.vocab.filter import GradientFilter
from planish.train.facts import Facts
from planish.train.routing import Routing
from planish.train.spread import Spread
from planish.train.staged import Staged, divide, most_in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The methods of a plan, in place.

    Attributes:
        installed: What the model's parts were replaced by.
        head: Hidden states and targets in, summed loss out.
        gradient_filter: What leaves part of the head's gradients out, where the plan has one.
    """

    installed: Installed
    head: HeadLoss
    gradient_filter: GradientFilter | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One model, ready to run.

    Attributes:
        device: Where the model lives.
        anatomy: The model and its parts.
        head: Hidden states and targets in, summed loss out.
        packed: Whether attention takes document bounds.
        ledger: Counts every byte.
        facts: Reads numbers out of tensors.
        keepers: What keeps the activations of each feed-forward network that packs them.
        gradient_filter: What leaves part of the head's gradients out, where the plan has one.
        routing: What the routers did, where experts are pipelined.
        tiers: Far memory that the plan's methods use.
        fit: Puts the methods of another plan in the place of those before, between two steps.
        world: The ranks that train together.
        spread: What the other ranks take part in; None where there is one rank, or a pipeline.
        staged: This rank's stages of a pipeline; None without one.
    """

    device: torch.device
    anatomy: Anatomy
    head: HeadLoss
    packed: bool
    ledger: Ledger
    facts: Facts
    keepers: Mapping[str, Keeper]
    gradient_filter: GradientFilter | None
    routing: Routing
    tiers: tuple[FarTier, ...]
    fit: Callable[[Plan], Fitted]
    world: World = ALONE
    spread: Spread | None = None
    staged: Staged | None = None

    def take(self, batch: Batch) -> Batch:
        """Return the batch where the model lives, on the books."""
        moved = replace(
            batch,
            input_ids=batch.input_ids.to(self.device),
            target=batch.target.to(self.device),
            position_ids=batch.position_ids.to(self.device),
        )
        self.ledger.adopt((moved.input_ids, moved.target, moved.position_ids), "other", owner="batch")
        return moved

    def hidden(self, batch: Batch) -> Tensor:
        """Return the hidden states [B, S, D] of a batch, each document attending to itself."""
        bounds = {"cu_seq_lens_q": batch.cu_seq_lens} if self.packed else {}
        return self.anatomy.backbone(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, **bounds
        ).last_hidden_state

    def loss(self, batch: Batch, *, last: bool = True) -> Tensor:
        """Return the loss of this rank's rows, summed over the tokens that count; all ranks call it together.

        Args:
            batch: From `take`.
            last: Gradients of all microbatches so far are exchanged in this one's backward pass.
        """
        if self.staged is not None:
            return self.staged.losses([batch])[0]
        if self.spread is None:
            return self.local_loss(batch)
        with self.ledger.phase("forward") if self.anatomy.model.training else nullcontext():
            self.spread.gather()
        return self.spread(batch, last=last)

    def refitted(self, plan: Plan) -> Self:
        """Return the engine with `plan`, which differs from the one before in the sizes of tiles alone.

        Exactness:     weights and optimizer state are as they were; steps go on in another order of summation.
        """
        with self.ledger.phase("init"):
            fitted = self.fit(plan)
        engine = replace(
            self,
            head=fitted.head,
            keepers=fitted.installed.keepers,
            gradient_filter=fitted.gradient_filter,
            tiers=fitted.installed.tiers,
        )
        if engine.spread is not None:
            engine.spread.bind(engine.local_loss)
        return engine

    def label_buckets(self) -> None:
        """Count what replicas exchange their gradients in as gradients, which are views of it by now."""
        if self.spread is not None and self.spread.buckets:
            grads = [param.grad for param in self.anatomy.model.parameters() if param.grad is not None]
            self.ledger.adopt(grads, "gradients", owner="buckets")

    def local_loss(self, batch: Batch) -> Tensor:
        """Return `loss` as the ranks gather their weights; in training, layers and head are phases of their own."""
        training = self.anatomy.model.training
        with self.ledger.phase("forward") if training else nullcontext():
            hidden = self.hidden(batch)
        with self.ledger.phase("head") if training else self.ledger.category("head tiles"):
            return self.head(hidden, batch.target, batch.num_valid)


def build_engine(
    load: Callable[[], PreTrainedModel],
    plan: Plan,
    *,
    tokens: int,
    ledger: Ledger,
    facts: Facts,
    scope: ExitStack,
    dry: bool = False,
    world: World = ALONE,
) -> Engine:
    """Return the model that `load` makes, until `scope` closes with the methods of `plan` and watched by `ledger`.

    Args:
        load: Makes or returns the model.
        plan: One method per peak.
        tokens: Of the largest microbatch: rows x context, or x the largest span of it.
        ledger: Counts, where it is entered.
        facts: Reads numbers out of tensors.
        scope: Undoes everything when it closes.
        dry: The model's tensors are fake.
        world: The ranks that train together; default: this one alone.

    Raises:
        UsageError: What `load` raises, or a model without the parts that the plan's methods replace.
        BudgetExceeded: The weights alone are above the budget.
    """
    with ledger.phase("init"):
        model = load().train()
        anatomy = find(model)
        part = pace = None
        in_flight = 1
        if world.pipeline is not None:
            part, pace = divide(anatomy, plan, world)
            anatomy = part.anatomy
            if isinstance(plan.boundary, Offload):
                in_flight = most_in_flight(pace, world)
        spread = None if world.size == 1 or part is not None else Spread(anatomy, world)
        routing, methods = Routing(), scope.enter_context(ExitStack())
        vocab, experts = (
            None if mesh is None else mesh[axis].get_group()
            for mesh, axis in ((world.vocab, "vp"), (world.experts, "ep"))
        )

        def fit(plan: Plan) -> Fitted:
            methods.close()
            with ledger.category("staging"):
                installed = install(
                    model,
                    plan,
                    tokens=tokens,
                    label=_restored(anatomy, ledger),
                    seen=routing.see,
                    dry=dry,
                    experts=experts,
                    vocab=vocab,
                    sequence=world.circle,
                    in_flight=in_flight,
                )
                methods.callback(installed.undo)
            methods.enter_context(ledger.watch(model, head=anatomy.head))
            _label_boundaries(anatomy, ledger, methods)
            gradient_filter = filter_of(plan.vocab)
            head = head_loss(anatomy, plan.vocab, group=vocab, gradient_filter=gradient_filter)
            return Fitted(installed=installed, head=head, gradient_filter=gradient_filter)

        fitted = fit(plan)
    engine = Engine(
        device=model.device,
        anatomy=anatomy,
        head=fitted.head,
        packed=isinstance(plan.attention, Packed),
        ledger=ledger,
        facts=facts,
        keepers=fitted.installed.keepers,
        gradient_filter=fitted.gradient_filter,
        routing=routing,
        tiers=fitted.installed.tiers,
        fit=fit,
        world=world,
        spread=spread,
        staged=None
        if part is None or pace is None
        else Staged(part, pace, plan, ledger, world, end_tape=fitted.installed.end_tape),
    )
    if spread is not None:
        spread.bind(engine.local_loss)
    return engine


def _restored(anatomy: Anatomy, ledger: Ledger) -> Callable[[int, Tensor], None]:
    """Return what counts each boundary that is back on the device."""
    names = list(anatomy.layers)

    def restored(index: int, tensor: Tensor) -> None:
        ledger.adopt(tensor, "boundaries", owner=names[index])

    return restored


def _label_boundaries(anatomy: Anatomy, ledger: Ledger, scope: ExitStack) -> None:
    """Count the input of each checkpointed layer, the one tensor that it keeps, as a boundary."""
    if not anatomy.model.is_activation_checkpointing:
        return

    for name, layer in anatomy.layers.items():

        def label(module: torch.nn.Module, args: tuple[object, ...], owner: str = name) -> None:
            if module.training:
                ledger.adopt([each for each in args if isinstance(each, Tensor)], "boundaries", owner=owner)

        scope.callback(layer.register_forward_pre_hook(label).remove)
