"""What a recipe is: a paper's table of settings, and how to build what they are about."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from bigbatch.experiments.datasets.location import DatasetLocation
from bigbatch.experiments.settings import Settings, Value, require_choice

Batch = Any
LossOf = Callable[[nn.Module, Batch], Tensor]
Rows = Mapping[str, tuple[Value, str]]
Grid = Mapping[str, tuple[Value, ...]]
Changes = Mapping[str, Value]
Arm = Mapping[str, Value | tuple[Value, str]]
Arms = Mapping[str, Arm]

OURS = "ours"  # the source of a number that no paper gives
SEEDS = 3  # of a study at the small scale
_CPU: Changes = {"device": "cpu", "precision": "float32", "workers": 0}  # at the small scale


@dataclass(frozen=True)
class Data:
    """What a model is trained and judged on.

    Args:
        train: map-style data set, whose `__getitems__` gives a whole batch.
        scores: of the model in its present state, by name, in the unit the name says; the first
            is the one that counts. Draws no random numbers. Collective: on several ranks all call
            it, and all get the same.
        run_files: texts that the run directory stores by file name, for a run that begins from it.
    """

    train: Dataset[Any]
    scores: Callable[[nn.Module], dict[str, float]]
    run_files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sweep:
    """Grids of settings, and what is drawn from them.

    Args:
        grids: each a product of values by setting; a point whose min_batch exceeds its max_batch
            is left out.
        tuned: settings of which each point shows the best alone.
    """

    grids: tuple[Grid, ...]
    tuned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    """A table or a figure of a paper, at its scale.

    Args:
        settings: in which it differs from the recipe, each with its source.
        arms: that it compares; none for all of the recipe's.
    """

    settings: Rows = field(default_factory=dict)
    arms: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One experiment.

    Args:
        name: on the command line.
        summary: one line.
        paper: whose experiment it is.
        paper_scale: every setting of the paper with its source, `OURS` where no paper has it;
            what is no field of `Settings` is the recipe's own.
        small: settings that differ at the small scale, which takes minutes on two cores; device,
            precision and workers are those of a CPU unless it names them.
        paper_samples: of an epoch of the paper's training, for a dry run.
        paper_ranks: of that training.
        minutes: that one training takes at the small scale on two cores.
        origin: the data.
        arms: what its study compares, as changes of the settings, a value with its source where
            that is not `OURS`; a `init_from` or `lr_control_from` among them names an earlier arm.
        paper_arms: the same at the paper's scale, where it differs; those of `arms`, or more.
        paper_seeds: trainings of each arm in the paper, with the source.
        results: tables and figures of the paper that can be asked for, by name.
        sweep, paper_sweep: what `bigbatch sweep` trains at each scale.
        higher_is_better: of the score that counts.
        model: the network; draws from torch's generator as it stands.
        loss: mean loss over the samples of a micro-batch; it may augment where the model trains.
        data: what is read from `settings.data`, or always there.
        example: batch of so many samples on the meta device.
        without_vr: names of parameters that a VR optimizer steps as its base does.
        saved_as: by a setting that names a file, what the run keeps a copy of it as, which it reads
            when it continues.
    """

    name: str
    summary: str
    paper: str
    paper_scale: Rows
    small: Changes
    paper_samples: int
    paper_ranks: int = 1
    minutes: float
    origin: DatasetLocation
    arms: Arms
    paper_arms: Arms = field(default_factory=dict)
    paper_seeds: tuple[int, str] = (SEEDS, OURS)
    results: Mapping[str, Result] = field(default_factory=dict)
    sweep: Sweep = Sweep(())
    paper_sweep: Sweep = Sweep(())
    higher_is_better: bool = True
    model: Callable[[Settings], nn.Module]
    loss: Callable[[Settings], LossOf]
    data: Callable[[Settings], Data]
    example: Callable[[Settings, int], Batch]
    without_vr: Callable[[Settings, nn.Module], frozenset[str]] = lambda _, __: frozenset()
    saved_as: Mapping[str, str] = field(default_factory=dict)

    @property
    def small_scale(self) -> Changes:
        """What differs from the paper's scale at the small one."""
        paper = {name: self.paper_scale[name][0] for name in _CPU if name in self.paper_scale}
        return {name: _CPU[name] for name in paper if paper[name] != _CPU[name]} | {**self.small}

    def settings(self, *, paper_scale: bool = False) -> Settings:
        """The settings of the paper's scale, or of the small one."""
        values = {name: value for name, (value, _) in self.paper_scale.items()}
        own = {name: values.pop(name) for name in list(values) if name not in _FIELDS}
        paper = Settings(recipe=self.name, task=own, **values)  # type: ignore[arg-type]
        return paper if paper_scale else paper.with_changes(self.small_scale)

    def arm(self, name: str, settings: Settings, *, paper_scale: bool = False) -> Settings:
        """The settings of one arm of the study, at the scale that `settings` are of.

        Raises:
            SettingError: there is no such arm.
        """
        arms = self.arms_at(paper_scale=paper_scale)
        require_choice("arm", name, arms)
        return settings.with_changes({**arms[name], "arm": name})

    def for_result(self, result: str) -> "Recipe":
        """The recipe with the settings and arms of one table or figure; its sweep is over these.

        Raises:
            SettingError: there is no such result.
        """
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
        """Those of both scales."""
        return {*self.arms, *self.paper_arms}

    def seeds_at(self, *, paper_scale: bool) -> int:
        """Trainings of each arm at a scale."""
        return self.paper_seeds[0] if paper_scale else SEEDS

    def arms_at(self, *, paper_scale: bool) -> Mapping[str, Changes]:
        """What the study compares at a scale."""
        tables = self.arm_tables(paper_scale=paper_scale)
        return {arm: {name: one for name, (one, _) in rows.items()} for arm, rows in tables.items()}

    def arm_tables(self, *, paper_scale: bool) -> Mapping[str, Rows]:
        """The same, each value with its source."""
        arms = (paper_scale and self.paper_arms) or self.arms
        return {
            arm: {name: one if isinstance(one, tuple) else (one, OURS) for name, one in own.items()}
            for arm, own in arms.items()
        }


_FIELDS = Settings.__dataclass_fields__
