"""Which module is at work: forward, when a checkpointed layer runs again, and in backward, node by node."""

import functools
from typing import Any

import torch
from torch import nn

from planish.memory.tensors import tensors_in

_TAG = "planish.owner"


class Owner:
    """Who a tensor is born to: a module's path, and whether it belongs to the head."""

    __slots__ = ("is_head", "name")

    def __init__(self, name: str, *, is_head: bool = False) -> None:
        self.name = name
        self.is_head = is_head


NOBODY = Owner("")
LOSS = Owner("loss", is_head=True)


class OwnerTracker:
    """Follows the watched model's modules, and its autograd nodes in backward.

    [Note: owners in backward] At a module's exit the nodes of its outputs are tagged with the module, at its entry
    the nodes of its inputs with the module around it; the first tag stays, so the deepest module wins. A tagged node
    that is about to run makes its module the current one, and nodes without a tag (an attention call between two
    linears) run under the module whose tag came before, which is the one that called them. What runs before any
    tagged node is the loss. The tags live in the nodes and die with the graph; they hold no tensor.

    [Note: running again] A checkpointed layer runs again inside the backward of one of its nodes, possibly without
    its own hooks (transformers checkpoints `forward`, not the call). Its first module then names the module around
    it, which stays at work between its modules until the last one is cut short by an exception, as checkpointing
    does when it has all it needs, or until the next tagged node.
    """

    def __init__(self) -> None:
        # (module, who is at work in it): the two differ after the head, where the loss follows in the same module.
        self._frames: list[tuple[Owner, Owner]] = []
        self._in_backward = LOSS
        self._again: Owner | None = None

    @property
    def current(self) -> Owner:
        """Who is at work now."""
        if self._frames:
            return self._frames[-1][1]
        if torch._C._current_graph_task_id() == -1:
            return NOBODY
        return self._again or self._in_backward

    def attach(self, model: nn.Module, head: nn.Module | None) -> list[Any]:
        """Install the hooks on every module of `model` and return their handles."""
        in_head = set() if head is None else set(head.modules())
        handles: list[Any] = []
        owners: dict[str, Owner] = {}
        for name, module in model.named_modules():
            owner = owners[name] = Owner(name or type(model).__name__, is_head=module in in_head)
            around = owners[name.rpartition(".")[0]]
            enter = functools.partial(self._enter, owner, around)
            leave = functools.partial(self._leave, owner, module is head)
            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        return handles

    def _enter(self, owner: Owner, around: Owner, _: nn.Module, args: Any, kwargs: Any) -> None:
        if owner is around:  # the root; an interrupt may have left frames
            self._frames.clear()
        if not self._frames:
            if torch._C._current_graph_task_id() == -1:
                self._in_backward, self._again = LOSS, None
            else:
                self._again = around
        if torch.is_grad_enabled() and self._frames:
            self._tag((args, kwargs), self._frames[-1][1])
        self._frames.append((owner, owner))

    def _leave(self, owner: Owner, is_head: bool, _: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        while self._frames:
            module, at_work = self._frames.pop()
            if module is owner:
                if torch.is_grad_enabled():
                    self._tag(output, at_work)
                break
        if is_head and self._frames:
            self._frames[-1] = (self._frames[-1][0], LOSS)
        if output is None and not self._frames:
            self._again = None

    def _tag(self, value: Any, owner: Owner) -> None:
        for tensor in tensors_in(value):
            node = tensor.grad_fn
            if node is not None and _TAG not in node.metadata:
                node.metadata[_TAG] = owner.name
                node.register_prehook(functools.partial(self._work, owner))

    def _work(self, owner: Owner, _: Any) -> None:
        self._in_backward, self._again = owner, None
