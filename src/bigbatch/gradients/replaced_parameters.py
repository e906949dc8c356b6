"""Where a model holds its parameters, to see that those watched are still its own."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from bigbatch.errors import GradientError
from bigbatch.gradients import GradientSource

NO_GRADIENT = (
    "no parameter that is trained or measured got a gradient, so the step would train nothing: "
    "were parameters replaced after the optimizer or the meter was made, or is the loss that of "
    "another model? Build the optimizer, and AdaptiveBatch or the GradientMeter, from the model "
    "whose loss it is"
)

_NAMED = 3  # parameters named in an error


class ReplacementCheck:
    """Every place of a model that holds a parameter or a module, and what it holds.

    `require_held` compares identities alone. Only where one has changed is the model walked
    through. FSDP2 puts whole parameters where its shards were, for a forward and
    a backward; that is no change.

    Args:
        model: wrapped and compiled as it is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[tuple[int, str], Any] = {}  # (place, name) -> what it held
        self._look()

    def require_held(self, watched: Iterable[Tensor]) -> None:
        """Whether the watched parameters that were the model's are not replaced by others.

        One that was tied to another since, or removed with its layer, is none that is replaced: no
        parameter has come for it that nobody watches.

        Raises:
            GradientError: some were, so their gradients will not come.
        """
        if all(slots.get(name) is value for slots, name, value in self._slots):
            return
        watched = list(watched)
        now = self._parameters()
        lost = [self._names[p] for p in watched if p in self._names and p not in now]
        others = set(watched) | set(self._names)
        if lost and any(p not in others for p in now):
            raise GradientError(_replaced(lost))
        self._look()

    def _look(self) -> None:
        """Takes the model as it is."""
        self._names = self._parameters()
        self._slots = list(self._places())
        self._before = {(id(slots), name): value for slots, name, value in self._slots}

    def _parameters(self) -> dict[Tensor, str]:
        """Every parameter, with its first name."""
        return {
            value: f"{prefix}.{name}" if prefix else name
            for prefix, module in self._model.named_modules()
            for _, name, value in self._contents(module._parameters)
            if value is not None
        }

    def _places(self) -> Iterator[tuple[dict[str, Any], str, Any]]:
        for module in self._model.modules():
            yield from self._contents(module._parameters)
            yield from self._contents(module._modules)

    def _contents(self, slots: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """What a module holds; of a shard that is whole at present, the shard."""
        for name, value in slots.items() if isinstance(slots, dict) else ():
            before = self._before.get((id(slots), name))
            gathered = value is not before and _is_shard(before) and not _is_shard(value)
            yield slots, name, before if gathered and value is not None else value


def has_gradient(source: GradientSource) -> bool:
    """Whether this rank has a part of any gradient; one that is zero counts."""
    return any(source.local_grad(parameter) is not None for parameter in source.parameters)


def _is_shard(value: Any) -> bool:
    """Whether it is a DTensor, without importing DTensor for those who have none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _replaced(names: list[str]) -> str:
    dots = ", ..." if len(names) > _NAMED else ""
    return (
        f"{len(names)} of the parameters that are trained or measured ({', '.join(names[:_NAMED])}"
        f"{dots}) are not the model's any more, which holds others: a layer was replaced, or "
        "load_state_dict(assign=True) called; build the optimizer, and AdaptiveBatch or the "
        "GradientMeter, after that, or leave assign=True out"
    )
