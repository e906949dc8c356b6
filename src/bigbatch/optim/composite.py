"""Several optimizers as one: `Composite`, and the containers of other packages."""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bigbatch.errors import SettingError, StateError
from bigbatch.optim.gsnr_state import GsnrState
from bigbatch.optim.optimizer_settings import (
    load_into,
    load_with_hooks,
    name_of,
    required_argument,
    save_with_hooks,
)
from bigbatch.state_checks import loads_state


class Composite(Optimizer):
    """Several optimizers as one, each with parameters of its own.

        step()  =  optimizers[0].step(), optimizers[1].step(), ...

    `param_groups` has the groups of all optimizers, in their order, and they are the same dicts: a
    rate that is set in one is set in the other. So a learning-rate scheduler may be built over the
    composite, or over each optimizer: `AdaptiveBatch(scheduler=[...])`. A state dict is that of one
    optimizer with all groups, with which torch's distributed checkpoints work.

    Scale all gradients by their GSNR with `VarianceReduced(Composite(...))`.

    Args:
        optimizers: torch optimizers whose `step()` needs no closure.
    Raises:
        SettingError: no optimizer, something that is not one, a parameter that two of them train,
            a variance-reduced optimizer, or one that needs a closure or saves more than a state
            and groups.
    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> muon = torch.optim.Muon([model.weight], lr=0.02)
        >>> adamw = torch.optim.AdamW([model.bias], lr=3e-4)
        >>> optimizer = Composite(muon, adamw)
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.02, 0.0003]
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        parts = [one_optimizer(optimizer) for optimizer in optimizers]
        if not parts:
            raise SettingError(f"{type(self).__name__} has no optimizers; pass two or more")
        for part in parts:
            _require_part(part)
        _require_disjoint(parts)
        self.optimizers = parts
        self._groups: list[dict[str, Any]] = []  # always the same list, which schedulers compare
        self.__setstate__({"defaults": {}})  # makes torch's hooks and step profiling

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "optimizers" in state:
            Composite.__init__(self, *state["optimizers"])
        else:
            super().__setstate__(state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers."""
        self._groups[:] = [group for part in self.optimizers for group in part.param_groups]
        return self._groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The states of all optimizers, by parameter."""
        return StateOfParts(self.optimizers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: a group belongs to one of the optimizers."""
        raise SettingError(
            f"{name_of(self)} does not know which optimizer a new group is for; add it to that: "
            "composite.optimizers[0].add_param_group(...)"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all optimizers."""
        for part in self.optimizers:
            part.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Steps each optimizer, in their order.

        Args:
            closure: computes the loss and its gradients; called once, before the first step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_parts()
        return loss

    def _step_parts(self) -> None:
        for part in self.optimizers:
            part.step()

    def train(self) -> None:
        """Switches schedule-free optimizers to training mode; others have no mode."""
        for part in self.optimizers:
            getattr(part, "train", lambda: None)()

    def eval(self) -> None:
        """Switches schedule-free optimizers to evaluation mode."""
        for part in self.optimizers:
            getattr(part, "eval", lambda: None)()

    def state_dict(self) -> dict[str, Any]:
        """States and groups of all optimizers, as those of one, whose parameters are numbered."""
        return save_with_hooks(self, self._save)

    def _save(self) -> dict[str, Any]:
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        for part, own in enumerate(each.state_dict() for each in self.optimizers):
            first = sum(len(group["params"]) for group in groups)
            number = {key: first + i for i, key in enumerate(_keys(own["param_groups"]))}
            # an entry that is of no parameter has the number of its optimizer
            state |= {number.get(key, (part, key)): value for key, value in own["state"].items()}
            groups += [
                {**group, "params": [number[key] for key in group["params"]]}
                for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    @loads_state
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of `state_dict()`; after an error all optimizers are as they were.

        Raises:
            StateError: the groups of the state are not those of these optimizers.
        """
        load_with_hooks(self, partial(load_into, self, self._load), state_dict)

    def _load(self, state_dict: dict[str, Any]) -> None:
        state, groups = state_dict["state"], state_dict["param_groups"]
        saved, own = ([len(g["params"]) for g in each] for each in (groups, self.param_groups))
        if saved != own:
            raise StateError(
                f"the state has groups of {saved} parameters, and {name_of(self)} has groups of "
                f"{own}; build the same optimizers with the same groups, in the same order"
            )
        first = 0
        for number, part in enumerate(self.optimizers):
            last = first + len(part.param_groups)
            of_part, first = groups[first:last], last
            keys = {*_keys(of_part)}
            states = {key: value for key, value in state.items() if key in keys}
            for key, value in state.items():
                if isinstance(key, tuple) and key[0] == number:
                    states[key[1]] = value
            part.load_state_dict({"state": states, "param_groups": of_part})


class ContainerOfOptimizers(Composite):
    """A container of another package as a composite, which steps by its own methods.

    The groups of torchtitan's OptimizersContainer are copies that its step does not read; those of
    its optimizers are what a step uses.
    """

    def __init__(self, container: Any) -> None:
        super().__init__(*container.optimizers)
        self.container = container

    def __getstate__(self) -> dict[str, Any]:
        raise SettingError(
            f"a {type(self.container).__name__} does not copy the optimizers in it; save its "
            "state_dict(), or copy bb.Composite(*container.optimizers)"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients as the container does."""
        self.container.zero_grad(set_to_none=set_to_none)

    def _step_parts(self) -> None:
        self.container.step()


@dataclass(eq=False, repr=False)
class StateOfParts(MutableMapping[Tensor, Any]):
    """The `state` of several optimizers, each of which has that of its own parameters."""

    optimizers: Sequence[Optimizer]

    def _part_of(self, parameter: Tensor) -> Optimizer:
        for part in self.optimizers:
            if parameter in part.state:
                return part
        for part in self.optimizers:
            if any(parameter is p for group in part.param_groups for p in group["params"]):
                return part
        raise KeyError(parameter)

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._part_of(parameter).state[parameter]

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        self._part_of(parameter).state[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        del self._part_of(parameter).state[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in part.state for part in self.optimizers)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """The state, if there is one; torch's own makes an empty one where it is asked for."""
        for part in self.optimizers:
            if parameter in part.state:
                return part.state[parameter]
        return default

    def __iter__(self) -> Iterator[Tensor]:
        for part in self.optimizers:
            yield from part.state

    def __len__(self) -> int:
        return sum(len(part.state) for part in self.optimizers)


def one_optimizer(optimizer: Any) -> Any:
    """The optimizer itself; a container of another package as a `Composite`.

    Raises SettingError for a list or dict of optimizers.
    """
    if isinstance(optimizer, (list, tuple, dict)):
        values = ".values()" * isinstance(optimizer, dict)
        raise SettingError(
            f"{len(optimizer)} optimizers are given as a {type(optimizer).__name__}, and one can "
            f"be stepped; make one of them: bb.Composite(*optimizers{values})"
        )
    is_container = isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizers")
    if is_container and not isinstance(optimizer, Composite):
        return ContainerOfOptimizers(optimizer)
    return optimizer


def _keys(groups: Sequence[dict[str, Any]]) -> list[Any]:
    """The parameters of groups in a state dict: numbers, or names."""
    return [key for group in groups for key in group["params"]]


def _require_part(part: Any) -> None:
    """Raises SettingError for what cannot be stepped as a part."""
    name = type(part).__name__
    if not isinstance(part, Optimizer):
        raise SettingError(f"{name} is not a torch.optim.Optimizer; pass each optimizer by itself")
    if isinstance(vars(part).get("gsnr_state"), GsnrState):
        raise SettingError(
            f"{name} inside a Composite would not see the micro-batches; wrap the composite: "
            "VarianceReduced(Composite(...)), with vr=False in the groups that it shall not scale"
        )
    if argument := required_argument(part):
        raise SettingError(f"{name}.step() needs a {argument}, and a Composite steps without")
    try:
        keys = part.state_dict().keys()
    except RuntimeError:  # the state is scattered over ranks, which have to gather it first
        return
    if others := keys - {"state", "param_groups"}:
        raise SettingError(
            f"{name} saves {', '.join(sorted(map(str, others)))} next to its state and groups, and "
            "the state dict of a Composite has no place for it; step it in a loop of your own"
        )


def _require_disjoint(parts: Sequence[Optimizer]) -> None:
    owners: dict[Tensor, int] = {}
    for number, part in enumerate(parts):
        for parameter in (p for group in part.param_groups for p in group["params"]):
            if owners.setdefault(parameter, number) != number:
                other, name = type(parts[owners[parameter]]).__name__, type(part).__name__
                raise SettingError(
                    f"a parameter of shape {tuple(parameter.shape)} is in {other} and in {name}, "
                    "which would both step it; give each parameter to one optimizer"
                )
