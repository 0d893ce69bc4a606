"""Follows the memory of tensors through a step that is computed on fake tensors, which have shapes but no values.

Every operator that runs makes or frees storages; their sizes, rounded as CUDA's allocator rounds them, give what is
held at any moment. Gradients of weights are kept apart from everything else, because they are what FSDP cuts.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

_GRAIN = 512
"""CUDA's allocator hands out memory in multiples of so many bytes."""

COPIES = "weights for products"
"""The region of copies of weights in the precision of matrix products."""


class _Storage:
    __slots__ = ("bytes", "gradient", "owner", "region")

    def __init__(self, size: int, region: str) -> None:
        self.bytes, self.region = size, region
        self.gradient = -1
        self.owner: Any = None


class Meter(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        groups: weights in groups; gradients of each group are counted on their own.
        known: tensors whose memory does not count, as it is counted elsewhere.

    Attributes:
        region: what memory made from now on belongs to.
        frontier: by bytes of gradients of each group, the most bytes of everything else at such a moment.
        operators: kernels queued so far, by region.
        moved: bytes that operators have read and written, by region.
    """

    def __init__(self, groups: Iterable[Iterable[nn.Parameter]], known: Iterable[Tensor]) -> None:
        super().__init__()
        self.region = ""
        self.operators: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()
        self._live: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._hooks: list[Callable[[], None]] = []
        self._other = 0
        self._weights: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for tensor in known:
            self._known[tensor.untyped_storage()] = True
        listed = [list(group) for group in groups]
        self._gradients = [0] * len(listed)
        self.frontier: dict[tuple[int, ...], int] = {tuple(self._gradients): 0}
        for number, group in enumerate(listed):
            for parameter in group:
                storage = parameter.untyped_storage()
                self._weights[storage] = self._known[storage] = True
                handle = parameter.register_post_accumulate_grad_hook(self._gradient_hook(number))
                self._hooks.append(handle.remove)

    @property
    def other(self) -> int:
        """Bytes held now but for gradients of weights."""
        return self._other

    def held(self) -> dict[str, int]:
        """Bytes held now, by the region that made them; gradients of weights left out."""
        by_region: Counter[str] = Counter()
        for storage in self._live.values():
            if storage.gradient < 0:
                by_region[storage.region] += storage.bytes
        return dict(by_region)

    def __exit__(self, *arguments: Any) -> None:
        for remove in self._hooks:
            remove()
        super().__exit__(*arguments)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # asked for thousands of times
            return result
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        region = self.region
        if made and not _free(func):
            taken = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            self.operators[region] += 1
            self.moved[region] += sum(t.numel() * t.element_size() for t in (*taken, *made))
            if func.overloadpacket is torch.ops.aten._to_copy and taken[0].untyped_storage() in self._weights:
                region = COPIES
        for tensor in made:
            self._add(tensor, region)
        return result

    def _add(self, tensor: Tensor, region: str) -> None:
        storage = tensor.untyped_storage()
        if storage in self._live or storage in self._known or not storage.nbytes():
            return
        found = _Storage(-(-storage.nbytes() // _GRAIN) * _GRAIN, region)
        # The table of live storages forgets one by itself; what it held must be taken off the sums.
        found.owner = weakref.ref(storage, lambda _: self._freed(found))
        self._live[storage] = found
        self._other += found.bytes
        self._note()

    def _freed(self, storage: _Storage) -> None:
        if storage.gradient < 0:
            self._other -= storage.bytes
        else:
            self._gradients[storage.gradient] -= storage.bytes

    def _gradient_hook(self, group: int) -> Callable[[Tensor], None]:
        def accumulated(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            storage = self._live.get(parameter.grad.untyped_storage())
            if storage is not None and storage.gradient < 0:
                self._other -= storage.bytes
                storage.gradient = group
                self._gradients[group] += storage.bytes
                self._note()

        return accumulated

    def _note(self) -> None:
        key = tuple(self._gradients)
        if self._other > self.frontier.get(key, -1):
            self.frontier[key] = self._other


@cache
def _free(func: Any) -> bool:
    """Whether an operator queues no kernel and moves no byte: it makes a view, or memory that is not filled."""
    views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
    return any(views) or "empty" in func.overloadpacket.__name__
