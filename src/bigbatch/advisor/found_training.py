"""What trains in a program: model, engine and settings behind an optimizer that has stepped."""

import gc
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from traceback import walk_stack
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from bigbatch.errors import SettingError
from bigbatch.gradients import parameters_of
from bigbatch.optim.optimizer_settings import parts_of

_ENGINES = {  # package whose function is on the stack of an optimizer step -> its name
    "deepspeed": "DeepSpeed",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "transformers": "HF Trainer",
    "accelerate": "Accelerate",
}


Thing = TypeVar("Thing")

LATER = (
    "parameters began to train after the training had been found (layers that were unfrozen, "
    "add_param_group), so their noise was not measured; observe the steps before or after that "
    "alone, `with bb.advise(model, optimizer)`"
)


@dataclass(frozen=True)
class Caller:
    """Who called `optimizer.step()`."""

    engine: str  # name of the trainer; empty for a loop of the user's own
    # the GradScaler that stepped; None if there is none, or it is disabled
    scaler: GradScaler | None

    @classmethod
    def find(cls, frame: FrameType) -> "Caller":
        """Looks at the functions that are being executed, from this one outwards."""
        engine, scaler = "", None
        for caller, _ in walk_stack(frame):
            package = str(caller.f_globals.get("__name__")).partition(".")[0]
            # the outermost trainer, since one may use another: the HF Trainer uses Accelerate
            engine = _ENGINES.get(package, engine)
            owner = caller.f_locals.get("self")
            if isinstance(owner, GradScaler) and owner.is_enabled():
                scaler = owner
        return cls(engine, scaler)


@dataclass(frozen=True)
class FoundTraining:
    """A training that was found."""

    optimizers: tuple[Optimizer, ...]  # the optimizers that step after the same backwards
    parameters: tuple[Tensor, ...]  # what they train, each once
    # the outermost module that has the parameters; a list of them if there are several
    model: nn.Module
    outermost: tuple[nn.Module, ...]  # these modules
    caller: Caller  # who steps
    composite: str = ""  # arguments of a `Composite`; empty for one optimizer

    @classmethod
    def find(
        cls, optimizers: Iterable[Optimizer], caller: Caller, model: nn.Module | None = None
    ) -> "FoundTraining":
        """Finds the model of some optimizers.

        Raises:
            SettingError: the training cannot be measured; says what was seen.
        """
        optimizers = tuple(optimizers)
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            raise SettingError(
                "LBFGS evaluates the gradient several times in a step, at other weights each time, "
                "so no noise scale belongs to its step"
            )
        parameters = _trained(optimizers)
        modules = outermost_modules(parameters) if model is None else [model]
        if caller.engine == "DeepSpeed":
            raise SettingError(
                "DeepSpeed steps on its own copies of the parameters and reduces gradients itself; "
                "train by bigbatch.integrations.deepspeed.initialize, whose Shadow(Goodput()) "
                "policy logs the same advice and changes nothing"
            )
        whole = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        composite = names_in_program(optimizers) if len(optimizers) > 1 else ""
        found = cls(optimizers, parameters, whole, tuple(modules), caller, composite)
        if not modules:
            raise SettingError(
                f"no nn.Module holds the {len(parameters)} parameters of {found.names}: an engine "
                "that steps on copies, or functional parameters; pass the model, "
                "`with bb.advise(model, optimizer)`"
            )
        configs = (vars(module).get("_join_config") for top in modules for module in top.modules())
        if any(getattr(config, "enable", False) for config in configs):
            raise SettingError(
                "DDP's join() lets ranks end at different steps, and a measurement needs them all; "
                "observe a run with equal numbers of batches on all ranks"
            )
        return found

    @property
    def has_all_parameters(self) -> bool:
        """Whether the optimizers train no parameters that were not found."""
        return set(self.parameters).issuperset(_trained(self.optimizers))

    @property
    def names(self) -> str:
        """The optimizers' class names; of a composite, those of its parts."""
        return " and ".join(type(part).__name__ for part in self._parts)

    @property
    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """The parameter groups of the optimizers of each class name."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for part in self._parts:
            groups.setdefault(type(part).__name__, []).extend(part.param_groups)
        return groups

    @property
    def _parts(self) -> list[Optimizer]:
        return [part for optimizer in self.optimizers for part in parts_of(optimizer)]

    @property
    def engine(self) -> str:
        """The trainer, or what wraps the model; "PyTorch" if neither is there."""
        return self.caller.engine or self.wrapper or "PyTorch"

    @property
    def wrapper(self) -> str:
        """What shares the model between ranks; empty if nothing does."""
        names = {base.__name__ for m in self.model.modules() for base in type(m).__mro__}
        wrappers = {"DistributedDataParallel": "DDP", "FSDPModule": "FSDP2"}
        return next((short for name, short in wrappers.items() if name in names), "")

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile compiles a part of the model."""
        return any(_is_compiled(module) for module in self.model.modules())


def names_in_program(optimizers: Sequence[Optimizer]) -> str:
    """The program's names of some optimizers, as arguments: `*optimizers`, or `muon, adamw`.

    They are read from the functions that are being executed, this one's caller first; "..." if
    none of them has all.
    """
    wanted = set(map(id, optimizers))
    for frame, _ in walk_stack(sys._getframe()):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in ("bigbatch", "torch"):
            continue
        variables = dict(frame.f_locals)
        attributes = getattr(variables.get("self"), "__dict__", {})
        variables |= {f"self.{name}": value for name, value in attributes.items()}
        for name, value in variables.items():
            values = [*value.values()] if isinstance(value, dict) else value
            if isinstance(values, list | tuple) and {*map(id, values)} == wanted:
                return f"*{name}" + ".values()" * isinstance(value, dict)
        names = {id(value): name for name, value in reversed(variables.items())}
        if wanted <= names.keys():
            return ", ".join(names[id(optimizer)] for optimizer in optimizers)
    return "..."


def outermost_modules(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """The modules that hold some of these parameters and are in no other module."""
    wanted = set(parameters)
    modules = living(nn.Module)
    # a module whose __init__ did not finish may have none yet
    parts = [(vars(module).get("_modules") or {}).values() for module in modules]
    inner = {id(child) for children in parts for child in children}
    outermost = [module for module in modules if id(module) not in inner]
    found = [m for m in outermost if not wanted.isdisjoint(parameters_of(m))]
    return outermost_modules(wanted) if not found and _unfreeze() else found


def living(kind: type[Thing]) -> list[Thing]:
    """The program's objects of a class."""
    things = [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]
    return living(kind) if not things and _unfreeze() else things


def _unfreeze() -> bool:
    """Shows what `gc.freeze()` has hidden, if it has; not frozen again, as garbage would be too."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    return is_frozen


def candidates(outermost: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that a loop may call: these and those in them, except in one that is compiled.

    A criterion without parameters, which a model may hold, is none.
    """
    found = dict.fromkeys(outermost)
    pending = list(found)
    for module in pending:
        children = [] if _is_compiled(module) else [m for m in module.children() if m not in found]
        children = [m for m in children if next(m.parameters(), None) is not None]
        found.update(dict.fromkeys(children))
        pending += children
    return pending


def _is_compiled(module: nn.Module) -> bool:
    compiles = vars(module).get("_compiled_call_impl") is not None  # by module.compile()
    return compiles or type(module).__name__ == "OptimizedModule"


def _trained(optimizers: Iterable[Optimizer]) -> tuple[Tensor, ...]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return tuple(dict.fromkeys(p for group in groups for p in group["params"] if p.requires_grad))
