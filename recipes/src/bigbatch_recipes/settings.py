"""Settings of a training: all that is needed to repeat it."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from bigbatch.errors import SettingError
from bigbatch.policies.amounts import AmountIn, Smoothing, WarmupLength
from bigbatch.policies.dead_band import DeadBand
from bigbatch.policies.lr_policies import RateShare
from bigbatch.policies.parse import POLICIES, arguments_of, is_own
from bigbatch.policies.policy import NoiseScale, Shrinkage, SimiGrad
from bigbatch.setting_types import (
    Coefficient,
    Cosine,
    Count,
    Gamma,
    Groups,
    Growth,
    In,
    Number,
    Positive,
    Remainder,
    RMax,
    Share,
    Whole,
    check_setting,
    checked,
    parse_setting,
)
from bigbatch_recipes.lr_schedule import LRSchedule
from bigbatch_recipes.run_config import PREREQUISITES

Value = bool | int | float | str
Period = Annotated[str, AmountIn("step", "sample", "epoch", whole_epochs=False)]


@checked
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything needed to repeat one training.

    The command line has an option for each setting, with its line here as help. A field's `section`
    is the heading in the help from there on.

    Args:
        recipe: experiment that is trained.
        arm: arm of its study; "" for none.
        seed: seed of the weights, the order of the data, and dropout.
        data: folder of the real data; "" for what a recipe always has.
        samples: training samples to use, the same for all seeds; 0 for all.
        held_out: training samples that are not trained on, and scored in place of the test data; 0
            for none.
        init_from: run whose weights the model begins with; a relative path is next to this run.
        epochs: passes over the training data.
        policy: rule that decides the batch size: fixed, simigrad, noise-scale, goodput, schedule,
            seesaw, late-switch; or a class of your own, module:Class or file.py:Class, with
            :KEY=VALUE,... for its arguments.
        target: gradient similarity that simigrad keeps.
        grow: factor by which simigrad grows the batch.
        shrink: factor by which simigrad shrinks the batch.
        multiple: batch size of noise-scale, in noise scales.
        overhead: samples that take goodput as long as the fixed part of a step; left out, it is
            fitted to the run's own steps.
        replay_from: runs whose mean batch size schedule repeats, in place of batch_schedule: paths
            with wildcards; runs of the same seed are left out.
        batch_schedule: batch sizes of schedule: "64, x2 every 20 epochs" for example.
        tokens_per_sample: mean length of a sample, where the schedule counts tokens.
        cap: policy that limits the growth of seesaw: noise-scale:multiple=1 for example.
        late_from: share of the peak learning rate from which late-switch lets late_policy decide.
        late_policy: policy of late-switch after that: simigrad:target=0.2 for example.
        decide_every: steps between two decisions.
        smoothing: window that noise is averaged over: "16 steps", "4K samples", or "auto" for one
            that adapts; None for none.
        dead_band: relative change that is too small to follow: 0.1 for 10 %.
        max_change: largest factor by which one decision changes the batch; "auto" for the policy's
            own, None for no limit.
        warmup: time before the first decision: "500 steps", "8K samples" or "1 epoch".
        batch_size: batch size of the first step; with fixed, of all steps.
        min_batch: smallest batch size, in samples of a step.
        max_batch: largest batch size, in samples of a step.
        base_batch: batch size that lr is given for.
        micro_batch: largest micro-batch, in samples of one backward.
        fixed_micro_batch: whether every backward has micro_batch samples, except at the end of an
            epoch.
        min_micro_batches: fewest micro-batches of a step; None for 4, or 8 with a vr- optimizer.
        remainder: what becomes of the last samples of an epoch: joined to its last steps, a step of
            their own, or dropped.
        virtual_ranks: ranks to group samples for; a run is the same on any number that divides it.
        every: interval between measured steps; 0 measures none; None for the default of
            AdaptiveBatch, each step at first, then ever fewer, down to one in 16.
        groups: groups of samples that each backward measures; None to compare micro-batches.
        half_batch_cosine: whether the log has SimiGrad's own cosine of two half-batch gradients; it
            keeps one more copy of the gradient.
        per_layer: whether the log has noise scale and similarity of each layer.
        optimizer: one of sgd, momentum, adam, lars, lamb; with the prefix vr-, scaled by GSNR.
        momentum: momentum coefficient of momentum and lars.
        weight_decay: coefficient of weight decay.
        decay_all: whether weight decay applies to biases and normalization layers too.
        clip: largest norm of the mean gradient; 0 for no clipping.
        gamma: lower clip of GSNR.
        r_max: upper clip of GSNR.
        beta3: momentum of r, 0 for none; None for 0.9 with vr-adam and vr-lamb, none with others.
        lr: learning rate of the base batch.
        lr_schedule: schedule of the learning rate: "warm-up 5 epochs; cosine" for example.
        lr_scaling: how the learning rate follows the batch size.
        lr_control_from: VR run whose mean r multiplies lr, as a control.
        transport: whether the betas and the weight decay of adam keep their half-lives in samples.
        device: device to train on; each rank takes its own GPU.
        precision: precision of the forward pass, by autocast.
        threads: CPU threads of torch.
        workers: processes that load data; 0 for none.
        evaluate_every: time between evaluations, in steps, samples or epochs.
        checkpoint_every: time between checkpoints, in steps, samples or epochs.
        task: settings of this recipe alone: the model's size, the length of a sequence.
    Raises:
        SettingError: a value of another type, or out of range.
    """

    recipe: str = field(metadata={"section": "Run"})
    arm: str = ""
    seed: Annotated[int, In("[0, 4294967296)", "NumPy's generator takes no other")] = 0
    data: str = ""
    samples: Whole = 0
    held_out: Whole = 0
    init_from: str = ""
    epochs: Count
    policy: str = field(default="simigrad", metadata={"section": "Policy"})
    target: Cosine = 0.2
    grow: Growth = SimiGrad.grow
    shrink: Shrinkage = SimiGrad.shrink
    multiple: Positive = NoiseScale.multiple
    overhead: Positive | None = None
    replay_from: str = ""
    batch_schedule: str = ""
    tokens_per_sample: Positive | None = None
    cap: str = ""
    late_from: RateShare = 0.3
    late_policy: str = "simigrad"
    decide_every: Count = field(default=1, metadata={"section": "Decisions"})
    smoothing: Smoothing = None
    dead_band: DeadBand = 0.0
    max_change: Growth | Literal["auto"] | None = None
    warmup: WarmupLength | None = None
    batch_size: Count = field(metadata={"section": "Batch and micro-batch"})
    min_batch: Count
    max_batch: Count
    base_batch: Count
    micro_batch: Count
    fixed_micro_batch: bool = False
    min_micro_batches: Count | None = None
    remainder: Remainder = "share"
    virtual_ranks: Count = 1
    every: Whole | None = field(default=1, metadata={"section": "Measuring"})
    groups: Groups | None = None
    half_batch_cosine: bool = False
    per_layer: bool = False
    optimizer: str = field(default="momentum", metadata={"section": "Optimizer"})
    momentum: Share = 0.9
    weight_decay: Coefficient = 0.0
    decay_all: bool = True
    clip: Coefficient = 0.0
    gamma: Gamma = field(default=0.1, metadata={"section": "GSNR of a vr- optimizer"})
    r_max: RMax = 1.0
    beta3: Share | None = None
    lr: Coefficient = field(metadata={"section": "Learning rate"})
    lr_schedule: str = "constant"
    lr_scaling: Literal["sqrt", "linear", "adascale", "none"] = "sqrt"
    lr_control_from: str = ""
    transport: bool = False
    device: Literal["cpu", "cuda"] = field(default="cpu", metadata={"section": "Device"})
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: Count = 1
    workers: Whole = 0
    evaluate_every: Period = field(
        default="1 epoch", metadata={"section": "Evaluation and checkpoints"}
    )
    checkpoint_every: Period = "100 steps"
    task: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        name, colon, _ = self.policy.partition(":")
        if colon and name in POLICIES:
            raise SettingError(
                f"policy={self.policy!r} has arguments, which are settings here: write "
                f"policy={name}, and {' or '.join(policy_settings(name).values())} apart"
            )
        policy_settings(self.policy)
        if self.replay_from and self.batch_schedule:
            raise SettingError(
                f"replay_from={self.replay_from!r} takes the place of batch_schedule="
                f"{self.batch_schedule!r}; leave one of them out"
            )
        LRSchedule(self.lr_schedule)

    def with_changes(self, changes: Mapping[str, Any]) -> "Settings":
        """A copy with some settings changed, among them settings of `task`.

        Raises:
            SettingError: a name is unknown, or a value has another type.
        """
        general = {name: value for name, value in changes.items() if name in SETTING_TYPES}
        task = {name: value for name, value in changes.items() if name not in general}
        for name, value in task.items():
            if name not in self.task:
                raise self._unknown(name)
            task[name] = check_setting(name, value, _type_of(self.task[name]))
        return replace(self, **{"task": {**self.task, **task}, **general})

    def parse_change(self, text: str) -> dict[str, Value]:
        """A change that is written as KEY=VALUE; the value has the type of the present one.

        Raises:
            SettingError: the key is unknown, or the value has another type.
        """
        key, _, value = (part.strip() for part in text.partition("="))
        if key not in (SETTING_TYPES.keys() - {"task"}) | set(self.task):
            raise self._unknown(key)
        if not value:
            raise SettingError(f"{text!r} must be written KEY=VALUE")
        if key in self.task:
            return {key: parse_setting(key, value, _type_of(self.task[key]))}
        return {key: self.parse_value(key, value)}

    @staticmethod
    def parse_value(name: str, text: str) -> Value:
        """Parses the value of a setting that all recipes have.

        Paths of runs and of a file with a policy are relative to the working directory.
        """
        is_path = name in (*PREREQUISITES, "replay_from")
        if is_path or (name == "policy" and text.partition(":")[0].endswith(".py")):
            text = str(Path(text).resolve())
        value: Value = parse_setting(name, text, SETTING_TYPES[name])
        return value

    @property
    def required_runs(self) -> dict[str, str]:
        """The runs that must be finished before, by the settings that name them."""
        return {name: run for name in PREREQUISITES if (run := getattr(self, name))}

    def count(self, name: str) -> int:
        """A setting of `task` that must be an integer of at least 1."""
        check_setting(name, self.task[name], Count)
        return int(self.task[name])

    def _unknown(self, name: str) -> SettingError:
        names = sorted((SETTING_TYPES.keys() - {"task"}) | set(self.task))
        return SettingError(
            f"recipe {self.recipe!r} has no setting {name!r}; it has {', '.join(names)}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The settings for a config file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Settings":
        """The settings of a config file.

        Raises:
            SettingError: a name is unknown to this release, or missing.
        """
        if unknown := sorted(values.keys() - SETTING_TYPES.keys()):
            raise SettingError(
                f"unknown settings {unknown}; continue a run with the release that began it. Known "
                f"are {sorted(SETTING_TYPES)}"
            )
        required = {f.name for f in fields(cls) if f.default is f.default_factory is MISSING}
        if missing := sorted(required - set(values)):
            raise SettingError(f"settings {missing} are missing")
        return cls(**values)


def _sections() -> Iterator[tuple[str, str]]:
    section = ""
    for one in fields(Settings):
        section = one.metadata.get("section", section)
        yield one.name, section


CONTROLLER_SETTINGS = ("decide_every", "smoothing", "dead_band", "max_change", "warmup")
_OF_ARGUMENTS = {  # settings of arguments with other names
    "text": "batch_schedule",
    "at": "late_from",
    "policy": "late_policy",
}
SETTING_TYPES: Mapping[str, Any] = {field.name: field.type for field in fields(Settings)}
SECTIONS: Mapping[str, str] = dict(_sections())
HELP: Mapping[str, str] = {  # from the docstring
    name: text[0].upper() + " ".join(text[1:].split())
    for name, text in re.findall(r"(?m)^ {8}(\w+): (.+(?:\n {12}.+)*)", Settings.__doc__ or "")
}


def policy_settings(policy: str) -> dict[str, str]:
    """The setting of each argument of the policy of that name; none of the user's own."""
    if is_own(policy):
        return {}
    return {name: _OF_ARGUMENTS.get(name, name) for name in arguments_of(policy)}


def policy_name(policy: str) -> str:
    """The name of a policy, or of the class of one of the user's own."""
    return policy.split(":")[1] if is_own(policy) else policy


def _type_of(value: Value) -> Any:
    return Number if isinstance(value, float) else type(value)


def require_choice(kind: str, name: str, choices: Iterable[str]) -> None:
    """Raises SettingError if `name` is not one of the choices."""
    if name not in choices:
        raise SettingError(f"{kind} {name!r} is unknown; choose one of: {', '.join(choices)}")


def unused_in(settings: Settings) -> set[str]:
    """Settings without effect on the training, because of its policy and optimizer."""
    policy, optimizer = settings.policy, settings.optimizer
    unused = {name for each in POLICIES for name in policy_settings(each).values()}
    unused -= {"batch_size", *policy_settings(policy).values()}
    if policy == "schedule":  # decides without measurements
        unused |= {"smoothing", "dead_band", "batch_size"}
    else:
        unused.add("replay_from")
    if policy == "fixed":
        unused |= {*CONTROLLER_SETTINGS}
    if not optimizer.startswith("vr-"):
        unused |= {"gamma", "r_max", "beta3"}
    base = optimizer.removeprefix("vr-")
    if base not in ("momentum", "lars"):
        unused.add("momentum")
    if base in ("lars", "lamb"):
        unused.add("decay_all")
    return unused
