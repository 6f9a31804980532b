"""A model with the plan's methods in place, counted by the ledger: what training, evaluation and dry runs share."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from planish.data.batch import Batch
from planish.memory.ledger import Ledger
from planish.methods import Packed, Plan
from planish.models.anatomy import Anatomy, find
from planish.models.head import HeadLoss, head_loss
from planish.models.install import install
from planish.peaks.activation.keep import Keeper
from planish.train.facts import Facts


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
    """

    device: torch.device
    anatomy: Anatomy
    head: HeadLoss
    packed: bool
    ledger: Ledger
    facts: Facts
    keepers: Mapping[str, Keeper]

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


def build_engine(
    load: Callable[[], PreTrainedModel],
    plan: Plan,
    *,
    tokens: int,
    ledger: Ledger,
    facts: Facts,
    scope: ExitStack,
    dry: bool = False,
) -> Engine:
    """Return the model that `load` makes, until `scope` closes with the methods of `plan` and watched by `ledger`.

    Args:
        load: Makes or returns the model.
        plan: One method per peak.
        tokens: Rows x context of the largest microbatch.
        ledger: Counts, where it is entered.
        facts: Reads numbers out of tensors.
        scope: Undoes everything when it closes.
        dry: The model's tensors are fake.

    Raises:
        UsageError: What `load` raises, or a model without the parts that the plan's methods replace.
        BudgetExceeded: The weights alone are above the budget.
    """
    with ledger.phase("init"):
        model = load().train()
        anatomy = find(model)
        names = list(anatomy.layers)

        def restored(index: int, tensor: Tensor) -> None:
            ledger.adopt(tensor, "boundaries", owner=names[index])

        with ledger.category("staging"):
            installed = install(model, plan, tokens=tokens, label=restored, dry=dry)
            scope.callback(installed.undo)
        scope.enter_context(ledger.watch(model, head=anatomy.head))
        _label_boundaries(anatomy, ledger, scope)
    return Engine(
        device=model.device,
        anatomy=anatomy,
        head=head_loss(anatomy, plan.vocab),
        packed=isinstance(plan.attention, Packed),
        ledger=ledger,
        facts=facts,
        keepers=installed.keepers,
    )


def _label_boundaries(anatomy: Anatomy, ledger: Ledger, scope: ExitStack) -> None:
    """Count the input of each checkpointed layer, the one tensor that it keeps, as a boundary."""
    if not anatomy.model.is_activation_checkpointing:
        return

    for name, layer in anatomy.layers.items():

        def label(module: torch.nn.Module, args: tuple[object, ...], owner: str = name) -> None:
            if module.training:
                ledger.adopt([each for each in args if isinstance(each, Tensor)], "boundaries", owner=owner)

        scope.callback(layer.register_forward_pre_hook(label).remove)
