"""Builds the optimizer, the controller and the loop of a training, as the settings say."""

import math
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from bigbatch.data.batches import Batches
from bigbatch.data.sampler import ElasticDistributedSampler
from bigbatch.errors import SettingError
from bigbatch.optim import LAMB, LARS, VarianceReduced
from bigbatch.optim.optimizer_settings import VROptions
from bigbatch.policies.batch_schedule import Schedule
from bigbatch.policies.controller import Controller
from bigbatch.policies.lr_scaling import LRScaling
from bigbatch.policies.parse import build_policy, is_own, parse_policy
from bigbatch.policies.policy import Policy, needs_of
from bigbatch.statistics.meter import GradientMeter
from bigbatch.training.adaptive_batch import AdaptiveBatch
from bigbatch_recipes.datasets.in_memory import Subset, chosen_indices, identity_collate
from bigbatch_recipes.earlier_runs import replay_of
from bigbatch_recipes.process_group import world_size
from bigbatch_recipes.recipe import Data
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.settings import CONTROLLER_SETTINGS, Settings, policy_settings, require_choice

Named = tuple[str, Tensor]


def build_controller(settings: Settings) -> Controller:
    """The controller with the policy of the settings."""
    policy = _build_policy(settings)
    batch_size = needs_of(policy).batch_size or settings.batch_size
    return Controller(
        policy,
        batch_size,
        settings.base_batch,
        **{name: getattr(settings, name) for name in CONTROLLER_SETTINGS},
    )


def _build_policy(settings: Settings) -> Policy:
    if is_own(settings.policy):
        return parse_policy(settings.policy)
    if settings.policy == "schedule" and settings.replay_from:
        return _replay(settings)
    if settings.policy == "schedule" and not settings.batch_schedule:
        raise SettingError('policy=schedule needs batch_schedule, "64, x2 every 20 epochs" say')
    names = policy_settings(settings.policy)
    values = {argument: getattr(settings, name) for argument, name in names.items()}
    return build_policy(settings.policy, values)


def _replay(settings: Settings) -> Schedule:
    pattern = Path(settings.replay_from)
    paths = sorted(pattern.parent.glob(pattern.name))
    runs = [path for path in paths if RunDirectory.open(path).settings["seed"] != settings.seed]
    if not runs:
        raise SettingError(
            f"replay_from={settings.replay_from!r} names {len(paths)} runs, none of another seed "
            f"than {settings.seed}; name finished runs of other seeds"
        )
    return replay_of(*runs)


def build_optimizer(
    settings: Settings,
    parameters: Iterable[Named],
    without_vr: frozenset[str] = frozenset(),
    lr_factor: float = 1.0,
) -> Optimizer:
    """The optimizer of the settings for a model's named parameters.

    LARS and LAMB apply no decay and no trust ratio to biases and norms (one dimension at most); the
    others decay them if `decay_all`.
    """
    require_choice("optimizer", settings.optimizer, OPTIMIZERS)
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in parameters:
        decays = settings.decay_all or parameter.ndim > 1
        group = groups.setdefault((decays, name not in without_vr), {"params": []})
        group["params"].append((name, parameter))
    is_vr = settings.optimizer.startswith("vr-")
    for (decays, vr), group in groups.items():
        group |= {} if decays else {"weight_decay": 0.0}
        group |= {"lr": lr_factor * settings.lr} if vr else {}
        group |= {} if vr or not is_vr else {"vr": False}
    base = _BASES[settings.optimizer.removeprefix("vr-")](list(groups.values()), settings)
    if not is_vr:
        return base
    return VarianceReduced(base, **_vr_options(settings, base))


def _vr_options(settings: Settings, base: Optimizer) -> VROptions:
    beta3 = settings.beta3
    if beta3 is None and isinstance(base, AdamW | LAMB):
        beta3 = 0.9  # VR-Adam and VR-LAMB average r
    return VROptions(
        gamma=settings.gamma,
        r_max=settings.r_max,
        beta3=beta3 or None,  # with 0, r needs no memory for an average
        watch=True,
    )


def base_of(optimizer: Optimizer) -> Optimizer:
    """The base of a VR optimizer, or the optimizer itself; LR schedulers patch its `step`."""
    return getattr(optimizer, "base", optimizer)


_BASES: dict[str, Callable[[list[dict[str, Any]], Settings], Optimizer]] = {
    "sgd": lambda p, s: SGD(p, s.lr, weight_decay=s.weight_decay),
    "momentum": lambda p, s: SGD(p, s.lr, momentum=s.momentum, weight_decay=s.weight_decay),
    "adam": lambda p, s: AdamW(p, s.lr, weight_decay=s.weight_decay),
    "lars": lambda p, s: LARS(p, s.lr, momentum=s.momentum, weight_decay=s.weight_decay),
    "lamb": lambda p, s: LAMB(p, s.lr, weight_decay=s.weight_decay),
}
OPTIMIZERS = (*_BASES, *(f"vr-{name}" for name in _BASES))


def build_loop(
    data: Data,
    settings: Settings,
    model: nn.Module,
    optimizer: Optimizer,
    controller: Controller,
    scaler: GradScaler | None,
) -> AdaptiveBatch:
    """The loop of the settings over a data set."""
    return AdaptiveBatch(
        model,
        optimizer,
        Batches(
            _loader(data, settings),
            remainder=settings.remainder,
            virtual_ranks=_virtual_ranks(settings),
        ),
        policy=controller,
        micro_batch=settings.micro_batch,
        fixed_micro_batch=settings.fixed_micro_batch,
        min_micro_batches=settings.min_micro_batches,
        groups=settings.groups,
        lr_scaling=lr_scaling_of(settings),
        transport=settings.transport,
        every=settings.every,
        meter=GradientMeter(
            model, per_layer=settings.per_layer, half_batch_cosine=settings.half_batch_cosine
        ),
        scaler=scaler,
    )


def lr_scaling_of(settings: Settings) -> LRScaling:
    """The rule that scales lr with the batch size; None for none."""
    return None if settings.lr_scaling == "none" else settings.lr_scaling


def _loader(data: Data, settings: Settings) -> DataLoader[Any]:
    dataset, samples = data.train, len(data.train)  # type: ignore[arg-type]
    if 0 < settings.samples < samples:
        dataset = Subset(dataset, chosen_indices(samples, settings.samples))
    return DataLoader(
        dataset,
        min(settings.base_batch, settings.micro_batch),
        sampler=ElasticDistributedSampler(dataset, seed=settings.seed),  # type: ignore[arg-type]
        collate_fn=identity_collate,
        num_workers=settings.workers,
    )


def _virtual_ranks(settings: Settings) -> int:
    """`virtual_ranks`, or its smallest multiple that the number of ranks divides."""
    needed = math.lcm(settings.virtual_ranks, world_size())
    if needed != settings.virtual_ranks:
        _warn_of_groups(settings.virtual_ranks, world_size(), needed)
    return needed


@cache
def _warn_of_groups(given: int, ranks: int, needed: int) -> None:
    """Warns once per process, not for each training of a study."""
    warnings.warn(
        f"virtual_ranks={given} is no multiple of the {ranks} ranks, so {needed} are used: other "
        "groups of samples, and another run, than on fewer ranks",
        stacklevel=4,
    )
