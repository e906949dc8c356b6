"""What a program computes from outputs to its loss, so that parts of a batch can repeat it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import _C, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from bigbatch.advisor.forward_watch import tensors_in
from bigbatch.errors import GradientError
from bigbatch.gradients.groups.backward_graph import Node


@dataclass(frozen=True)
class RecordedCall:
    """A call of a torch function, with what it had and what it returned."""

    function: Callable[..., Any]
    arguments: tuple[Any, Any]  # args, kwargs
    results: list[Tensor]
    versions: dict[int, int]  # of the tensors among the arguments, by their ids
    with_grad: bool


class LossTape(TorchFunctionMode):
    """Records the torch functions of a model's outputs, and of what comes from these.

    Each function runs as it would without the tape, so the program's results are the same.

    Args:
        outputs: the tensors that the model has returned.
        rows: entries of the batch, in dimension 0.
    Raises:
        GradientError: the program has a mode of torch functions of its own.
    """

    def __init__(self, outputs: Sequence[Tensor], rows: int) -> None:
        super().__init__()
        if _C._len_torch_function_stack():
            raise GradientError("the program runs under a TorchFunctionMode (torch.device?)")
        self.is_recording = True
        self.roots: list[Node] = []  # of the backward that has begun
        self.rows = rows
        self._outputs = list(outputs)
        self._calls: list[RecordedCall] = []
        self._versions = {id(x): x._version for x in outputs}  # of outputs and results
        self._is_stale = False  # whether one of them was written to by what is not recorded
        _C._push_on_torch_function_stack(self)

    def leave(self) -> None:
        """Leaves the stack of modes, wherever it is there."""
        depth = _C._len_torch_function_stack()
        stack = [_C._get_function_stack_at(i) for i in range(depth)]
        if self in stack:
            above = stack[stack.index(self) + 1 :]
            for _ in (self, *above):
                _C._pop_torch_function_stack()
            for mode in above:
                _C._push_on_torch_function_stack(mode)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A torch function is called."""
        arguments = args, kwargs or {}
        tensors = tensors_in(arguments) if self.is_recording else []
        if not any(id(x) in self._versions for x in tensors):
            return func(*args, **arguments[1])
        versions = {id(x): x._version for x in tensors}
        self._is_stale |= any(self._versions.get(key, n) != n for key, n in versions.items())
        with_grad = torch.is_grad_enabled()
        result = func(*args, **arguments[1])
        results = tensors_in(result)
        if results and self.is_recording:  # which a backward ends
            self._calls.append(RecordedCall(func, arguments, results, versions, with_grad))
            self._versions |= {id(x): x._version for x in results}
        return result

    def loss(self, outputs: Sequence[Tensor], first: int) -> Tensor:
        """The loss of a part of the batch.

        Args:
            outputs: those of the part.
            first: its first row.
        Raises:
            GradientError: the program's own loss is not a function of its outputs and constants.
        """
        computed = [*self._outputs, *(x for call in self._calls for x in call.results)]
        losses = [x for x in computed if x.grad_fn is not None and x.grad_fn in self.roots]
        if not losses or len(self.roots) > 1 or losses[-1].numel() > 1 or self._is_stale:
            raise GradientError(
                "its loss is not one number that torch functions compute from the model's outputs"
            )
        values = dict(zip(map(id, self._outputs), outputs, strict=True))
        for call in self._calls_for(losses[-1]):
            if not call.with_grad and any(x.requires_grad for x in call.results):
                raise GradientError("its loss has an autograd.Function, whose backward is its own")
            args, kwargs = self._cut_arguments(call, values, first)
            with torch.set_grad_enabled(call.with_grad):
                results = tensors_in(call.function(*args, **kwargs))
            values |= dict(zip(map(id, call.results), results, strict=True))
        return values[id(losses[-1])]

    def _calls_for(self, loss: Tensor) -> list[RecordedCall]:
        """The calls that the loss needs."""
        needed, calls = {id(loss)}, []
        for call in reversed(self._calls):
            if not needed.isdisjoint(map(id, call.results)):
                calls.append(call)
                needed |= call.versions.keys()
        return calls[::-1]

    def _cut_arguments(self, call: RecordedCall, values: dict[int, Tensor], first: int) -> Any:
        """Results of the part in place of those of the batch; its rows of the constants."""
        pairs = [(x, values[id(x)]) for x in tensors_in(call.arguments) if id(x) in values]
        lengths = {len(old): len(new) for old, new in pairs if old.dim() and len(old) != len(new)}

        def cut(leaf: Tensor) -> Tensor:
            if id(leaf) in values:
                return values[id(leaf)]
            if leaf.requires_grad or leaf._version != call.versions[id(leaf)]:
                raise GradientError(
                    "its loss takes more than the model's outputs and constants (a penalty on "
                    "weights, a sum in place over several backwards?)"
                )
            length = lengths.get(len(leaf)) if leaf.dim() else None
            if length is None:
                return leaf
            return leaf.narrow(0, first * len(leaf) // self.rows, length)

        return tree_map_only(Tensor, cut, call.arguments)
