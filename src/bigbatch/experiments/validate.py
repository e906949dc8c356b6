"""What a recipe refuses of its settings: before data are read, and the same everywhere."""

import torch
from torch import nn

from bigbatch.errors import BigbatchError, SettingError
from bigbatch.experiments.build_optimizer import build_controller, build_optimizer
from bigbatch.experiments.recipe import Recipe
from bigbatch.experiments.settings import CONTROLLER_SETTINGS, Settings, policy_settings
from bigbatch.policies.parse import POLICIES

CAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # precisions of autocast


def build_on_meta_device(recipe: Recipe, settings: Settings) -> nn.Module:
    """The model, its tensors without memory."""
    with torch.device("meta"):
        return recipe.model(settings)


def require_trainable(recipe: Recipe, *asked: Settings) -> None:
    """Raises SettingError where no data would let the recipe train at these settings.

    A training, a study, a sweep and a dry run all ask here. Policy and optimizer are built as they
    are named; what a recipe cannot make of its own settings, its `example` and its `model` say.
    """
    for settings in asked:
        build_controller(settings)
        if settings.engine == "deepspeed" and settings.confidence and not settings.smoothing:
            raise SettingError(
                "confidence with engine=deepspeed is that of a window; set smoothing"
            )
        build_optimizer(settings, [("weight", nn.Parameter(torch.zeros(1)))])
    unlike = {repr((one.task, one.precision, one.engine)): one for one in asked}
    for settings in unlike.values():
        kinds = {p.dtype for p in _built(recipe, settings).parameters()}
        _require_castable(kinds, settings.precision)
        if settings.engine == "deepspeed":
            _require_for_deepspeed(kinds, settings.precision)


def _built(recipe: Recipe, settings: Settings) -> nn.Module:
    """The model on paper, after an example for it; what torch refuses there is said as ours."""
    try:
        recipe.example(settings, 1)
        return build_on_meta_device(recipe, settings)
    except BigbatchError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        own = ", ".join(f"{name}={value}" for name, value in settings.task.items())
        raise SettingError(f"recipe {recipe.name!r} cannot be built with {own}: {error}") from error


def _require_castable(kinds: set[torch.dtype], precision: str) -> None:
    """Raises SettingError where autocast would leave everything as it is."""
    if precision in CAST and torch.float64 in kinds:
        raise SettingError(
            f"precision={precision} has no effect on a model in float64, which autocast leaves as "
            "it is; set the model to float32"
        )


def _require_for_deepspeed(kinds: set[torch.dtype], precision: str) -> None:
    """Raises SettingError for what DeepSpeed, or its connection, gives wrong numbers in.

    Source:
        integrations/deepspeed/config_checks.py, of float16.
    """
    if others := kinds - {torch.float32}:
        raise SettingError(
            f"engine=deepspeed makes float32 of parameters, and {others.pop()} is asked for; leave "
            "engine out, or set the model to float32"
        )
    if precision == "float16":
        raise SettingError(
            "engine=deepspeed with precision=float16: DeepSpeed's loss scale was not tried with "
            "batches that change, and at stage 0 gradients are divided by one that they never "
            "had; set precision=bfloat16"
        )


def unused_in(settings: Settings) -> set[str]:
    """All of them."""
    return unused_by_policy(settings.policy) | unused_by_optimizer(settings.optimizer)


def unused_by_policy(policy: str) -> set[str]:
    """Those that the policy of this name does not have, or that cannot change what it decides."""
    unused = {name for each in POLICIES for name in policy_settings(each).values()}
    unused -= {"batch_size", *policy_settings(policy).values()}
    if policy == "schedule":  # whatever was measured
        unused |= {"smoothing", "dead_band", "confidence", "batch_size"}
    return unused | set(CONTROLLER_SETTINGS if policy == "fixed" else ())


def unused_by_optimizer(optimizer: str) -> set[str]:
    """Those that the optimizer of this name does not have."""
    base = optimizer.removeprefix("vr-")
    unused = set() if optimizer.startswith("vr-") else {"gamma", "r_max"}
    unused |= set() if base in ("momentum", "lars") else {"momentum"}
    return unused | ({"decay_all"} if base in ("lars", "lamb") else set())
