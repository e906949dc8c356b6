"""Calls of the scripts of tests/advisor/scripts, and what `bigbatch advise` has to find in each."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from advised_script import Advised, advise
from oracles import hand_loop

MICRO_BATCHES, GROUPS, CONSECUTIVE = "micro-batches", "groups", "consecutive steps"
CUT = "cut micro-batches"  # of 16 samples, two in each backward of these scripts
STEPS = 60  # of a script


@dataclass(frozen=True)
class Case:
    """One call of a script.

    Args:
        script: its name.
        arguments: in one string.
        way: of measuring.
        batch_size: samples of all ranks and backwards.
        accumulation: backwards of a rank.
        ranks: processes.
        optimizer: words in the name of the optimizer.
        tolerance: relative, of the numbers.
    """

    script: str
    arguments: str
    way: str
    batch_size: int
    accumulation: int = 1
    ranks: int = 1
    optimizer: str = "SGD"
    tolerance: float = 1e-3  # float32, summed in another order

    @property
    def given(self) -> list[str]:
        return [*self.arguments.split(), f"--steps={STEPS}"]

    @property
    def compared(self) -> int:
        """Gradients of a step that are compared."""
        return self.ranks * self.accumulation * self.groups

    @property
    def groups(self) -> int:
        """Those of a backward that are compared."""
        return {GROUPS: hand_loop.GROUPS, CUT: 2}.get(self.way, 1)

    @property
    def found(self) -> dict:
        """What the command has to find, as its page names it."""
        return {
            "ranks": self.ranks,
            "accumulation": self.accumulation,
            "batch_size": self.batch_size,
            "micro_batch": self.batch_size // self.ranks // self.accumulation,
            "way": self.way,
        }

    def repeat(self) -> hand_loop.HandLoop:
        return hand_loop.repeat(self.script, self.given, self.groups, self.ranks)

    def __str__(self) -> str:
        return f"{self.script} {self.arguments}".strip()


def parameters_of(
    cases: list[Case], first: tuple[Case, ...] = (), second: tuple[Case, ...] = ()
) -> list:
    """One parameter a case: `make test` runs those of `first`, CI also those of `second`."""

    def marks(case: Case) -> list:
        if case in first:
            return []
        return [pytest.mark.thorough if case in second else pytest.mark.release]

    return [pytest.param(case, id=str(case), marks=marks(case)) for case in cases]


def advise_case(folder: Path, case: Case) -> tuple[Advised, list[float]]:
    """Observes 30 of a script's 60 steps, after which it continues; its losses."""
    losses = folder / "losses.json"
    options = ("--go-on", "--steps", STEPS // 2)
    given = [*case.given, "--losses", losses]
    advised = advise(folder, case.script, *given, options=options, ranks=case.ranks)
    return advised, json.loads(losses.read_text())


def assert_as_by_hand(case: Case, advised: Advised, losses: list[float]) -> None:
    """What was found is the case's; measured steps and losses are those of the hand loop.

    The losses are the same to the last bit, also of the steps after the observation. The signal is
    a difference, |G|^2 - noise / N, so its tolerance is relative to |G|^2.
    """
    assert "" == advised.page["refusal"]
    assert 0 == advised.process.returncode, advised.process.stderr
    assert case.found == {name: advised.page["found"][name] for name in case.found}
    assert all(name in advised.page["found"]["optimizer"] for name in case.optimizer.split())
    loop = case.repeat()
    assert loop.losses == losses
    assert advised.page["measurements"]
    for actual in advised.page["measurements"]:
        step = actual["step"]
        if case.way == CONSECUTIVE:  # the pair of this step and the one before
            expected = loop.measurements_of_pairs()[step - 1]
        else:
            expected = loop.measurements()[step]
            assert case.batch_size == expected.samples == actual["samples"]
            assert case.compared == expected.micro_batches == actual["micro_batches"]
        sqnorm = expected.grad_sqnorm + expected.grad_variance / expected.samples
        near = pytest.approx(expected.grad_variance, rel=case.tolerance)
        assert near == actual["grad_variance"], f"step {step}"
        near = pytest.approx(expected.grad_sqnorm, abs=case.tolerance * sqnorm)
        assert near == actual["grad_sqnorm"], f"step {step}"
