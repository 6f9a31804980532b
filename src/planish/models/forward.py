"""The causal LM's forward with labels, by a head that forms no logits; without labels it is transformers' own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_outputs import CausalLMOutputWithPast

from planish.comm.ring import Circle
from planish.errors import UsageError
from planish.models.anatomy import Anatomy
from planish.models.head import HeadLoss

IGNORED = -100


def loss_forward(anatomy: Anatomy, head: HeadLoss, sequence: Circle | None = None) -> Callable[..., Any]:
    """Return what takes the place of the model's `forward`.

    With `labels` (or `shift_labels`) the result has a loss and no logits: the mean over the counted tokens, or their
    sum over `num_items_in_batch` where a trainer gives that. In evaluation HF Trainer then needs
    `prediction_loss_only=True`.

    Args:
        anatomy: The model's parts.
        head: Hidden states and targets in, summed loss out.
        sequence: Ranks that share rows; the label after a span's last token is then the next rank's first, the mean is
            over the counted tokens of all spans, and each rank's loss is its part of it.
    """
    original = anatomy.model.forward

    def forward(
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        if kwargs.get("fused_lm_head"):
            raise UsageError(
                "`fused_lm_head` asks for the fused head of TRL's trainer, which planish's would hide; call "
                "`planish.install` before the trainer is made: it then puts its head over this one."
            )
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            **kwargs,
        }
        if labels is None and shift_labels is None:
            return original(**inputs)
        outputs = anatomy.backbone(**{name: value for name, value in inputs.items() if name != "logits_to_keep"})
        target = shift_labels if shift_labels is not None else _shifted(labels, sequence)
        num_valid = int((target != IGNORED).sum())
        total = head(outputs.last_hidden_state, target, num_valid)
        divisor = num_items_in_batch
        if divisor is None:
            divisor = max(1, num_valid if sequence is None else _sum(num_valid, sequence, target.device))
        if isinstance(divisor, Tensor):
            divisor = divisor.to(total.device)
        return CausalLMOutputWithPast(
            loss=total / divisor, logits=None, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )

    return forward


def _shifted(labels: Tensor, sequence: Circle | None) -> Tensor:
    """Return the label after each token; after the last of a span that is the first of the next one."""
    if sequence is None:
        return pad(labels[..., 1:], (0, 1), value=IGNORED)
    firsts = labels.new_full((sequence.size, *labels.shape[:-1]), IGNORED)
    sequence.gather(firsts, labels[..., 0].contiguous())
    later = sequence.rank + 1
    following = firsts[later] if later < sequence.size else torch.full_like(firsts[0], IGNORED)
    return torch.cat([labels[..., 1:], following.unsqueeze(-1)], -1)


def _sum(number: int, sequence: Circle, device: torch.device) -> int:
    return int(sequence.add(torch.tensor(number, device=device)))
