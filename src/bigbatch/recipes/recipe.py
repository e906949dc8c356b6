"""What a recipe is: settings, the arms of its study, and how to build what is trained."""

import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from bigbatch.decide.controller import Controller
from bigbatch.decide.named import policy_named
from bigbatch.decide.plan import require_positive
from bigbatch.errors import SettingError
from bigbatch.optim import LAMB, LARS, VarianceReduced
from bigbatch.optim.options import Options

Named = tuple[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything needed to repeat one training.

    Args:
        recipe, arm: what is trained, and which arm of its study it is ("" for none).
        seed: of the model's start, the order of the data, and dropout where there is some.
        epochs: passes over the training data.
        policy: "simigrad", "fixed", or another of decide/named.py with its values.
        target, min_batch, max_batch: of a policy that has such and does not give its own.
        smoothing, dead_band, warm_up: of the controller; 0 for none.
        batch_size: where it starts.
        base_batch: batch size that lr is for.
        micro_batch: most samples in one backward.
        virtual_ranks: that the samples are dealt to; the groups compared, and so the run, are the
            same on any number of ranks that divides it.
        optimizer: a name of `OPTIMIZERS`.
        lr, weight_decay: the optimizer's.
        gamma, r_max: clips of a VR optimizer; not used by others.
        lr_scaling: "sqrt", "linear", "adascale" or "none".
        checkpoint_every: steps between checkpoints.
        threads: CPU threads of torch.
    Raises:
        SettingError: a value of another type, or out of range.
    """

    recipe: str
    arm: str = ""
    seed: int = 0
    epochs: int
    policy: str = "simigrad"
    target: float = 0.2
    min_batch: int
    max_batch: int
    smoothing: float = 0.0
    dead_band: float = 0.0
    warm_up: float = 0.0
    batch_size: int
    base_batch: int
    micro_batch: int
    virtual_ranks: int = 1
    optimizer: str = "momentum"
    lr: float
    weight_decay: float = 0.0
    gamma: float = 0.1
    r_max: float = 1.0
    lr_scaling: str = "sqrt"
    checkpoint_every: int = 100
    threads: int

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (float, int) if field.type is float else (field.type,)
            if type(value) not in kinds:
                raise SettingError(f"{field.name}={value!r} is of another type than {kinds[0]}")
            if isinstance(value, float | int) and not math.isfinite(value):
                raise SettingError(f"{field.name}={value} must be finite")
        sizes = ("epochs", "min_batch", "max_batch", "batch_size", "base_batch", "micro_batch")
        for name in (*sizes, "virtual_ranks", "checkpoint_every", "threads"):
            require_positive(**{name: getattr(self, name)})
        require_choice("lr_scaling", self.lr_scaling, ("sqrt", "linear", "adascale", "none"))
        if self.seed >= 2**32:
            raise SettingError(
                f"seed={self.seed} must be below 2^32, which NumPy's generator takes"
            )
        for name in ("seed", "weight_decay", "lr"):
            if getattr(self, name) < 0:
                raise SettingError(f"{name}={getattr(self, name)} must not be negative")

    def changed(self, changes: dict[str, Any]) -> "Settings":
        """A copy with some settings changed."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """For a config file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Settings":
        """From a config file.

        Raises:
            SettingError: a name that this release does not know, or one is missing.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise SettingError(f"unknown settings {unknown}; known are {sorted(known)}")
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if missing := sorted(required - set(values)):
            raise SettingError(f"settings {missing} are missing")
        return cls(**values)


@dataclass(frozen=True)
class Task:
    """What one training needs, built from settings.

    Args:
        model: to be trained.
        loader: its training batches, on several ranks this rank's share.
        loss_of: mean loss of one micro-batch, by the model that is called.
        accuracy: share of the test samples that are right, in [0, 1]; draws no random numbers, and
            is asked for on rank 0 alone.
    """

    model: nn.Module
    loader: Iterable[Any]
    loss_of: Callable[[nn.Module, Any], Tensor]
    accuracy: Callable[[], float]


@dataclass(frozen=True)
class Recipe:
    """One experiment.

    Args:
        name: on the command line.
        summary: one line.
        settings: the defaults.
        arms: what its study compares, as changes of the settings.
        build: makes the task.
    """

    name: str
    summary: str
    settings: Settings
    arms: dict[str, dict[str, Any]]
    build: Callable[[Settings], Task]


def build_controller(settings: Settings) -> Controller:
    """The policy that the settings name, with the controller's options.

    The recipe's target, bounds and batch are those of a policy whose text does not give its own.

    Raises:
        SettingError: an unknown name, or a value out of range.
    """
    policy = policy_named(
        settings.policy,
        target=settings.target,
        min_batch=settings.min_batch,
        max_batch=settings.max_batch,
        batch_size=settings.batch_size,
    )
    return Controller(
        policy,
        getattr(policy, "batch_size", settings.batch_size),
        settings.base_batch,
        smoothing=settings.smoothing or None,
        dead_band=settings.dead_band,
        warm_up=settings.warm_up,
    )


def build_optimizer(settings: Settings, parameters: Iterable[Named]) -> Optimizer:
    """The optimizer that the settings name, over a model's named parameters.

    Raises:
        SettingError: an unknown name, or a value out of range.
    """
    require_choice("optimizer", settings.optimizer, OPTIMIZERS)
    base = _BASES[settings.optimizer.removeprefix("vr-")](list(parameters), settings)
    if not settings.optimizer.startswith("vr-"):
        return base
    beta3 = 0.9 if isinstance(base, AdamW | LAMB) else None  # VR-Adam and VR-LAMB average r
    options = Options(gamma=settings.gamma, r_max=settings.r_max, beta3=beta3, watch=True)
    return VarianceReduced(base, **options)


_BASES: dict[str, Callable[[list[Named], Settings], Optimizer]] = {
    "sgd": lambda p, s: SGD(p, s.lr, weight_decay=s.weight_decay),
    "momentum": lambda p, s: SGD(p, s.lr, momentum=0.9, weight_decay=s.weight_decay),
    "adam": lambda p, s: AdamW(p, s.lr, weight_decay=s.weight_decay),
    "lars": lambda p, s: LARS(p, s.lr, weight_decay=s.weight_decay),
    "lamb": lambda p, s: LAMB(p, s.lr, weight_decay=s.weight_decay),
}
OPTIMIZERS = (*_BASES, *(f"vr-{name}" for name in _BASES))


def require_choice(what: str, name: str, choices: Iterable[str]) -> None:
    """Raises SettingError where `name` is none of the choices."""
    if name not in choices:
        raise SettingError(f"{what} {name!r} is unknown; choose one of: {', '.join(choices)}")
