"""Which module is at work: forward, when a checkpointed layer runs again, and in backward, node by node."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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
    """

    def __init__(self) -> None:
        # (module, who is at work in it): the two differ after the head, where the loss follows in the same module.
        self._frames: list[tuple[Owner, Owner]] = []
        self._in_backward = LOSS

    @property
    def current(self) -> Owner:
        """Who is at work now."""
        if self._frames:
            return self._frames[-1][1]
        return self._in_backward if torch._C._current_graph_task_id() != -1 else NOBODY

    def attach(self, model: nn.Module, head: nn.Module | None) -> list[Any]:
        """Install the hooks on every module of `model` and return their handles."""
        in_head = set() if head is None else set(head.modules())
        handles: list[Any] = []
        for name, module in model.named_modules():
            owner = Owner(name, is_head=module in in_head)
            enter = functools.partial(self._enter, owner, module is model)
            leave = functools.partial(self._leave, owner, module is head)
            handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        return handles

    def _enter(self, owner: Owner, is_root: bool, _: nn.Module, args: Any, kwargs: Any) -> None:
        if is_root:
            self._frames.clear()  # an interrupt may have left some
        if not self._frames and torch._C._current_graph_task_id() == -1:
            self._in_backward = LOSS
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

    def _tag(self, value: Any, owner: Owner) -> None:
        for tensor in _tensors(value):
            node = tensor.grad_fn
            if node is not None and _TAG not in node.metadata:
                node.metadata[_TAG] = owner.name
                node.register_prehook(functools.partial(self._work, owner))

    def _work(self, owner: Owner, _: Any) -> None:
        self._in_backward = owner


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
