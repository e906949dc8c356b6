"""Recipes: a paper's table of settings, and functions that build model, loss and data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bigbatch_recipes.datasets.files import DatasetLocation
from bigbatch_recipes.settings import Settings, Value, require_choice

if TYPE_CHECKING:  # it takes seconds, and `bigbatch list` uses none
    from torch import Tensor, nn
    from torch.utils.data import Dataset

Batch = Any
LossOf = Callable[["nn.Module", Batch], "Tensor"]
Rows = Mapping[str, tuple[Value, str]]
Grid = Mapping[str, tuple[Value, ...]]
Changes = Mapping[str, Value]
Arm = Mapping[str, Value | tuple[Value, str]]
Arms = Mapping[str, Arm]

OURS = "ours"  # the source of a value that is in no paper
SEEDS = 3  # of a study at the small scale
_CPU: Changes = {"device": "cpu", "precision": "float32", "workers": 0}  # at the small scale


def sourced(source: str, **values: Value) -> Rows:
    """Rows of settings that have one source."""
    return {name: (value, source) for name, value in values.items()}


def task(module: str, *more: str, **names: str) -> dict[str, Any]:
    """Functions of a module in `tasks` for a recipe, which is imported when one is called.

    These are `model`, `loss`, `data`, `example` and the named ones; `names` has those that the
    module calls otherwise.
    """

    def function(name: str) -> Callable[..., Any]:
        return lambda *args: getattr(import_module(f"{__package__}.tasks.{module}"), name)(*args)

    fields = ("model", "loss", "data", "example", *more)
    return {field: function(names.get(field, field)) for field in fields}


@dataclass(frozen=True)
class Data:
    """Training data and evaluation."""

    train: "Dataset[Any]"  # map-style data set, whose `__getitems__` returns a whole batch
    # evaluates the model; returns scores by name, each in the unit of its name, the main one first.
    # Draws no random numbers. Collective: all ranks call it and get the same
    scores: Callable[["nn.Module"], dict[str, float]]
    # makes `scores` of other samples of the same form, a subset of `train`; None where training
    # samples cannot be scored, as when they are augmented
    scores_on: Callable[["Dataset[Any]"], Callable[["nn.Module"], dict[str, float]]] | None = None
    # texts that the run directory stores by file name, for a run that begins from it
    run_files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """Grids of settings, and the settings to tune."""

    # each a product of values by setting; points whose min_batch exceeds their max_batch are
    # dropped
    grids: tuple[Grid, ...]
    tuned: tuple[str, ...] = ()  # settings of which each point shows only the best


@dataclass(frozen=True)
class Result:
    """A table or a figure of a paper, at its scale."""

    # settings that differ from the recipe's, each with its source
    settings: Rows = field(default_factory=dict)
    arms: tuple[str, ...] = ()  # the arms that it compares; () for all of the recipe's


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One experiment."""

    name: str  # name on the command line
    at_paper_scale: bool = False  # whether settings, arms, seeds and sweep are the paper's
    summary: str  # description in one line
    paper: str  # the paper that has the experiment
    # every setting of the paper with its source, `OURS` where no paper has it; names that are no
    # field of `Settings` are settings of this recipe alone
    paper_scale: Rows
    # settings that differ at the small scale, which takes minutes on two cores; device, precision
    # and workers are those of a CPU unless it names them
    small: Changes
    paper_samples: int  # samples of an epoch of the paper's training, for a dry run
    paper_ranks: int = 1  # ranks of that training
    parameters: tuple[int, int]  # weights of the model at the small and the paper's scale
    minutes: float  # duration of one training at the small scale on two cores
    origin: DatasetLocation  # location of the data
    # changes of the settings for each arm of its study; a value has its source unless that is
    # `OURS`; `init_from` and `lr_control_from` name an earlier arm
    arms: Arms
    # the arms at the paper's scale if they differ; those of `arms`, or more
    paper_arms: Arms = field(default_factory=dict)
    # trainings of each arm in the paper, with the source
    paper_seeds: tuple[int, str] = (SEEDS, OURS)
    # tables and figures of the paper, by name
    results: Mapping[str, Result] = field(default_factory=dict)
    small_sweep: Sweep = Sweep(())  # small_sweep, paper_sweep: of `bigbatch sweep` at each scale
    paper_sweep: Sweep = Sweep(())
    higher_is_better: bool = True  # whether the main score is better when higher
    # builds the network; draws from torch's global generator
    model: Callable[[Settings], "nn.Module"]
    # builds, on the meta device, layers with as many weights; None where `model` needs torch alone
    outline: Callable[[Settings], "nn.Module"] | None = None
    packages: tuple[str, ...] = ()  # of the extra `bert`, which trainings need
    # builds the mean loss over a micro-batch; it may augment in training mode
    loss: Callable[[Settings], LossOf]
    # reads the data of `settings.data`, or data that need no folder
    data: Callable[[Settings], Data]
    example: Callable[[Settings, int], Batch]  # makes a batch of so many samples on the meta device
    # names the parameters that a VR optimizer steps as its base does
    without_vr: Callable[[Settings, "nn.Module"], frozenset[str]] = lambda _, __: frozenset()
    # file in the run directory, by the setting that names the original file; a resumed run reads it
    saved_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def small_scale(self) -> Changes:
        """What differs from the paper's scale at the small one."""
        paper = {name: self.paper_scale[name][0] for name in _CPU if name in self.paper_scale}
        return {name: _CPU[name] for name in paper if paper[name] != _CPU[name]} | {**self.small}

    def at_scale(self, *, paper: bool) -> "Recipe":
        """The recipe at the paper's scale, or at the small one."""
        return replace(self, at_paper_scale=paper)

    def settings(self) -> Settings:
        """The settings of this scale."""
        values = {name: value for name, (value, _) in self.paper_scale.items()}
        task = {name: values.pop(name) for name in list(values) if name not in _FIELDS}
        paper = Settings(recipe=self.name, task=task, **values)  # type: ignore[arg-type]
        return paper if self.at_paper_scale else paper.with_changes(self.small_scale)

    def arm(self, name: str, settings: Settings) -> Settings:
        """The settings, as one arm of the study changes them."""
        require_choice("arm", name, self.arm_changes)
        return settings.with_changes({**self.arm_changes[name], "arm": name})

    def for_result(self, result: str) -> "Recipe":
        """The recipe with the settings and arms of one table or figure, also in its sweep."""
        require_choice("result", result, self.results)
        one, arms = self.results[result], self.paper_arms or self.arms
        if not one.arms:
            return replace(self, paper_scale={**self.paper_scale, **one.settings})
        grids = [
            {**grid, "arm": tuple(arm for arm in grid["arm"] if arm in one.arms)}
            for grid in self.paper_sweep.grids
            if {*grid.get("arm", ())} & {*one.arms}
        ]
        return replace(
            self,
            paper_scale={**self.paper_scale, **one.settings},
            paper_arms={name: arms[name] for name in one.arms},
            paper_sweep=replace(self.paper_sweep, grids=tuple(grids)),
        )

    @property
    def arm_names(self) -> set[str]:
        """Names of the arms of both scales."""
        return {*self.arms, *self.paper_arms}

    def minutes_of(self, settings: Settings) -> float:
        """Estimate of `minutes` for settings of the small scale with another number of epochs."""
        return self.minutes * settings.epochs / self.settings().epochs

    @property
    def sweep(self) -> Sweep:
        """The sweep of this scale."""
        return self.paper_sweep if self.at_paper_scale else self.small_sweep

    @property
    def seeds(self) -> int:
        """Number of seeds of each arm."""
        return self.paper_seeds[0] if self.at_paper_scale else SEEDS

    @property
    def arm_changes(self) -> Mapping[str, Changes]:
        """Changes of the settings for each arm."""
        return {
            arm: {name: one for name, (one, _) in rows.items()}
            for arm, rows in self.arm_tables.items()
        }

    @property
    def arm_tables(self) -> Mapping[str, Rows]:
        """The changes for each arm, each value with its source."""
        arms = (self.at_paper_scale and self.paper_arms) or self.arms
        return {
            arm: {name: one if isinstance(one, tuple) else (one, OURS) for name, one in own.items()}
            for arm, own in arms.items()
        }


_FIELDS = Settings.__dataclass_fields__
