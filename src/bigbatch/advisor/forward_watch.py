"""The forwards of a training: which modules the loop calls, with how many samples."""

import itertools
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import GradientError
from bigbatch.gradients.groups.backward_graph import Node
from bigbatch.gradients.groups.coupling import coupling_function, running_roots


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module, without graphs."""

    module: nn.Module
    # args, kwargs: what it was called with
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shape: torch.Size  # of the first tensor in these
    dim: int  # its dimension in which the samples are looked for
    lengths: tuple[int, ...]  # those of all tensors, each once
    autocast_dtype: torch.dtype | None  # of autocast; None without it

    @property
    def samples(self) -> int:
        """Entries of that dimension."""
        return self.shape[self.dim]

    def autocast(self, device: str) -> torch.autocast:
        """The call's autocast."""
        dtype = self.autocast_dtype
        return torch.autocast(device, dtype=dtype, enabled=dtype is not None)


@dataclass(frozen=True)
class Input:
    """The first tensor of a call; holding it keeps its memory from being used again."""

    tensor: Tensor
    version: int

    def follows(self, other: "Input") -> bool:
        """Whether it is the part of one batch that comes after the other part."""
        base, step = self.tensor._base, self.tensor.stride(0) * self.tensor.element_size()
        is_part = base is not None and base is other.tensor._base
        after = self.tensor.data_ptr() - other.tensor.data_ptr()
        same_rows = is_part and base is not None and base.dim() == self.tensor.dim()
        return same_rows and after == len(other.tensor) * step != 0

    def is_same(self, other: "Input") -> bool:
        """Whether both are the same samples."""
        same_memory = self.tensor.data_ptr() == other.tensor.data_ptr()
        return same_memory and self.version == other.version and len(self.tensor) > 0


class ForwardHook:
    """A hook of some watch. Its copies, in copied and in saved models, do nothing."""

    def __init__(self, watch: object | None = None, method: str = "") -> None:
        self._watch = None if watch is None else weakref.ref(watch)
        self._method = method

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ForwardHook, ()

    @_disable_dynamo
    def __call__(self, *arguments: Any) -> None:
        """A forward begins or ends."""
        watch = None if self._watch is None else self._watch()
        in_backward = torch._C._current_graph_task_id() != -1  # activation checkpointing
        if watch is not None and not in_backward:
            getattr(watch, self._method)(*arguments)


class ForwardWatch:
    """Watches the calls that a loop makes of its modules, not those inside these calls.

    The modules have hooks from `start` to `stop` alone. Forwards without gradients, and those that
    activation checkpointing repeats in a backward, do not count.
    """

    def __init__(self, modules: Iterable[nn.Module], on_error: Callable[[Exception], None]) -> None:
        self.called: dict[nn.Module, None] = {}
        self.last: ModuleCall | None = None
        self.dim = 0  # of the first tensor in which the samples are
        self.sizes: list[int | None] = []  # samples of the forwards before the last backward
        self.is_sum = False  # whether the forwards of a backward are of different samples
        self.after_forward: Callable[[nn.Module, Any, Any, Any], None] | None = None
        self._modules = list(modules)
        self._on_error = on_error
        self._handles: list[RemovableHandle] = []
        self._reset()

    def _reset(self) -> None:
        """Has seen nothing of this step yet."""
        self.waited = 0.0  # seconds until the first forward of the step
        self._started = time.perf_counter()
        self._depth = 0
        self._samples: list[int | None] = []  # of the forwards since the last backward
        self._inputs: list[Input] = []  # likewise
        self._outputs: list[Node] = []  # likewise, what computed their outputs
        self._earlier_inputs: list[Input] = []  # of earlier backwards of the step

    def keep_called(self) -> None:
        """Leaves alone the modules that were not called."""
        self._modules = [*self.called]

    def start(self) -> None:
        """A step starts."""
        self._reset()
        for module in self._modules:
            before, after = ForwardHook(self, "before"), ForwardHook(self, "after")
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True, always_call=True),
            ]

    def stop(self) -> None:
        """The step has ended; removes every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs.clear()

    def take_samples(self) -> list[int | None]:
        """The samples of each forward since the last backward; None where no tensor has any.

        Raises:
            GradientError: an earlier backward of the step was of the same samples.
        """
        self._depth = 0
        samples, self._samples = self._samples, []
        self.sizes = samples
        inputs, self._inputs = self._inputs, []
        if any(one.is_same(other) for one in inputs for other in self._earlier_inputs):
            raise GradientError(
                "two backwards of one step are of the same samples, as those of several losses "
                "(actor and critic, several tasks), so they are no micro-batches"
            )
        self._earlier_inputs += inputs
        parts = len(inputs) > 1 and all(b.follows(a) for a, b in itertools.pairwise(inputs))
        self.is_sum |= parts
        return [sum(filter(None, samples))] if samples and self.is_sum else samples

    def take_coupling(self) -> str:
        """The function above these forwards by which the running backward's loss mixes samples."""
        outputs, self._outputs = self._outputs, []
        call = self.last
        return "" if call is None else coupling_function(running_roots(), outputs, call.samples)

    def input_moments(self) -> tuple[float, ...]:
        """Mean and mean square of each tensor of the last call, to six digits.

        They are those of the same samples in any order.
        """
        call = self.last
        leaves = [] if call is None else tensors_in((call.args, call.kwargs))
        tensors = [x.double() for x in leaves if x.numel()]
        moments = [moment.item() for x in tensors for moment in (x.mean(), x.square().mean())]
        return tuple(float(f"{moment:.6g}") for moment in moments)

    # what the hooks call

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward begins."""
        self._depth += 1
        self.waited = self.waited or time.perf_counter() - self._started

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward has ended, or has raised an exception: then the output is None."""
        self._depth -= 1
        if self._depth or not torch.is_grad_enabled():
            return
        try:
            self._note(module, args, kwargs, output)
        except Exception as error:
            self._on_error(error)

    def _note(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        roots = [x for x in tensors_in(output) if x.requires_grad]
        if not roots:
            return
        self.called[module] = None
        self._outputs += [x.grad_fn for x in roots if x.grad_fn is not None]
        tensors = [x for x in tensors_in((args, kwargs)) if x.dim()]
        first = tensors[0] if tensors else None
        dim = self.dim if first is not None and self.dim < first.dim() else 0
        self._samples.append(None if first is None else first.shape[dim])
        if first is not None:
            kind = first.device.type
            enabled = torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if enabled else None
            own_args, own_kwargs = tree_map_only(Tensor, Tensor.detach, (args, kwargs))
            self._inputs.append(Input(first, first._version))
            lengths = tuple(dict.fromkeys(map(len, tensors)))
            self.last = ModuleCall(module, own_args, own_kwargs, first.shape, dim, lengths, dtype)
        if self.after_forward is not None:
            self.after_forward(module, args, kwargs, output)
