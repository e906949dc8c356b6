"""What a training is started with, and all that is needed to repeat it."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from bigbatch.errors import SettingError
from bigbatch.experiments.lr_schedule import LRSchedule
from bigbatch.optim.gsnr_options import Gamma, RMax
from bigbatch.runs.run_config import BEFORE
from bigbatch.setting_types import (
    Cosine,
    Count,
    In,
    NotNegative,
    Number,
    Share,
    Whole,
    checked,
    parsed,
    setting,
)

Value = bool | int | float | str


@checked
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything needed to repeat one training.

    Args:
        recipe, arm: what is trained, and which arm of its study it is ("" for none).
        seed: of the model's start, the order of the data, and dropout where there is some.
        data: folder of the real data; "" for what a recipe always has.
        samples: of the training data that are used, drawn once for all seeds; 0 for all of them.
        init_from: run whose weights the model begins with; a relative one is next to this run.
        lr_control_from: run with a VR optimizer whose mean r multiplies lr, except of what the
            recipe steps without r; "" for none.
        epochs: passes over the training data.
        policy: "simigrad", "fixed", or another of policies/parse.py with its values.
        target, min_batch, max_batch: of a policy that has such and does not give its own.
        smoothing, dead_band, warmup: of the controller; 0 for none.
        batch_size: where it starts.
        base_batch: batch size that lr is for.
        micro_batch: most samples in one backward.
        virtual_ranks: that the samples are dealt to; the groups compared, and so the run, are the
            same on any number of ranks that divides it.
        optimizer: a name of `OPTIMIZERS`.
        lr, momentum, weight_decay: the optimizer's; momentum is not used by sgd, adam and lamb.
        decay_all: whether biases and norms decay too.
        clip: largest norm of the mean gradient; 0 for any.
        gamma, r_max: clips of a VR optimizer; not used by others.
        lr_scaling: "sqrt", "linear", "adascale" or "none".
        lr_schedule: how the rate goes over the samples, as `LRSchedule` reads it.
        device: "cpu" or "cuda"; on several ranks each takes its own.
        precision: "float32" for the model's own type; "bfloat16" or "float16" by autocast.
        engine: what joins the ranks: "ddp", or "deepspeed".
        zero_stage: of DeepSpeed: 0, 1 or 2.
        workers: processes that load the data; 0 for none.
        checkpoint_every: steps between checkpoints.
        threads: CPU threads of torch.
        over_seeds: "mean" or "median": what tables show of several seeds.
        task: what this recipe alone has: the model's size, the length of a sequence.
    Raises:
        SettingError: a value of another type, or out of range.
    """

    recipe: str
    arm: str = ""
    seed: Annotated[int, In("[0, 4294967296)", "NumPy's generator takes no other")] = 0
    data: str = ""
    samples: Whole = 0
    init_from: str = ""
    epochs: Count
    policy: str = "simigrad"
    target: Cosine = 0.2
    min_batch: Count
    max_batch: Count
    smoothing: NotNegative = 0.0
    dead_band: NotNegative = 0.0
    warmup: NotNegative = 0.0
    batch_size: Count
    base_batch: Count
    micro_batch: Count
    virtual_ranks: Count = 1
    optimizer: str = "momentum"
    lr: NotNegative
    lr_control_from: str = ""
    momentum: Share = 0.9
    weight_decay: NotNegative = 0.0
    decay_all: bool = True
    clip: NotNegative = 0.0
    gamma: Gamma = 0.1
    r_max: RMax = 1.0
    lr_scaling: Literal["sqrt", "linear", "adascale", "none"] = "sqrt"
    lr_schedule: str = "constant"
    device: Literal["cpu", "cuda"] = "cpu"
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    engine: Literal["ddp", "deepspeed"] = "ddp"
    zero_stage: Whole = 0
    workers: Whole = 0
    checkpoint_every: Count = 100
    threads: Count = 1
    over_seeds: Literal["mean", "median"] = "mean"
    task: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.zero_stage not in ((0, 1, 2) if self.engine == "deepspeed" else (0,)):
            raise SettingError(
                f"zero_stage={self.zero_stage} with engine={self.engine}; DeepSpeed's 0, 1 and 2 "
                "are known (at 3 no rank has the weights that scores are of), others have 0"
            )
        LRSchedule(self.lr_schedule)

    def changed(self, changes: Mapping[str, Any]) -> "Settings":
        """A copy with some settings changed, those of `task` among them.

        Raises:
            SettingError: a name that there is not, or a value of another type.
        """
        of_all = {name: value for name, value in changes.items() if name in _names()}
        own = {name: value for name, value in changes.items() if name not in of_all}
        for name, value in own.items():
            if name not in self.task:
                raise self._unknown(name)
            own[name] = setting(name, value, _kind_of(self.task[name]))
        return replace(self, **{"task": {**self.task, **own}, **of_all})

    def parsed(self, text: str) -> dict[str, Value]:
        """A change that is written as KEY=VALUE, its value read in the type of the present one.

        A run that is to be finished before is sought from where we are now, not from its own place.

        Raises:
            SettingError: no such key, or the value is none of that type.
        """
        key, _, value = (part.strip() for part in text.partition("="))
        if key not in (_names() - {"task"}) | set(self.task):
            raise self._unknown(key)
        if not value:
            raise SettingError(f"{text!r} must be written KEY=VALUE")
        if key in BEFORE:
            value = str(Path(value).resolve())
        kind = _kind_of(self.task[key]) if key in self.task else _kinds()[key]
        return {key: parsed(key, value, kind)}

    @property
    def before(self) -> dict[str, str]:
        """The runs that have to be finished before, by the settings that name them."""
        return {name: run for name in BEFORE if (run := getattr(self, name))}

    def _unknown(self, name: str) -> SettingError:
        known = sorted((_names() - {"task"}) | set(self.task))
        return SettingError(
            f"recipe {self.recipe!r} has no setting {name!r}; it has {', '.join(known)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For a config file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Settings":
        """From a config file.

        Raises:
            SettingError: a name that this release does not know, or one is missing.
        """
        if unknown := sorted(set(values) - _names()):
            raise SettingError(f"unknown settings {unknown}; known are {sorted(_names())}")
        required = {
            one.name for one in fields(cls) if one.default is one.default_factory is MISSING
        }
        if missing := sorted(required - set(values)):
            raise SettingError(f"settings {missing} are missing")
        return cls(**values)


def _names() -> set[str]:
    return {one.name for one in fields(Settings)}


def _kinds() -> dict[str, Any]:
    return {one.name: one.type for one in fields(Settings)}


def _kind_of(value: Value) -> Any:
    """The type of what a recipe alone has, by its present value."""
    return Number if isinstance(value, float) else type(value)


def require_choice(what: str, name: str, choices: Iterable[str]) -> None:
    """Raises SettingError where `name` is none of the choices."""
    if name not in choices:
        raise SettingError(f"{what} {name!r} is unknown; choose one of: {', '.join(choices)}")
