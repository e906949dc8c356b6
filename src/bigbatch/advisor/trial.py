"""Tries an advice: trains at the present and at the advised batch size, and compares the losses."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bigbatch.advisor.advise import parse_seconds
from bigbatch.advisor.advised_settings import ASKED, BATCH_FACTOR, LR_FACTOR
from bigbatch.advisor.batch_advice import BatchAdvice
from bigbatch.advisor.loss_curve import FULL, Gain, LossCurve, gain, rates_follow
from bigbatch.advisor.observations import Found
from bigbatch.advisor.own_folder import OwnFolder
from bigbatch.advisor.trial_process import Trial
from bigbatch.advisor.trial_ranks import TrialRanks
from bigbatch.advisor.trial_result import TrialResult
from bigbatch.errors import SettingError
from bigbatch.log.run_log import RunLog
from bigbatch.log.step_record import StepRecord
from bigbatch.policies.policy import Decision

_STEADY = 1.3  # factor between the steps of two runs of one batch size that is still usual
_MOST_SECONDS = 60.0  # of a run unless the user says otherwise
_PATIENCE = 120.0  # seconds for the end of a process, beyond ten times its training and its start
_SAME = 0.15  # difference of the logarithms of batch sizes, that are taken for the same


@dataclass(frozen=True)
class TrialLimits:
    """How long an advice is tried."""

    seconds: float  # of training in each process
    # likewise, samples; None for as many as were observed, or a full comparison
    samples: int | None
    seeds: int  # runs at each batch size
    folder: Path  # for the runs


@dataclass(frozen=True)
class Program:
    """What was observed, and is run again."""

    target: str
    arguments: tuple[str, ...]
    is_module: bool
    folder: Path  # in which it runs
    seconds: float  # that it took, with its start


def new_folder(name: str) -> Path:
    """The folder of this name, or with a number after it if there is one already."""
    folder, number = Path(name).absolute(), 2
    while folder.exists():
        folder, number = Path(f"{name}-{number}").absolute(), number + 1
    return folder


def parse_limit(text: str | None) -> tuple[float, int | None]:
    """Seconds and samples of "30s", of "20000" or of None, the default."""
    if text is None:
        return _MOST_SECONDS, None
    if re.fullmatch(r"[1-9][0-9]*", text):
        return math.inf, int(text)
    try:
        return parse_seconds(text), sys.maxsize
    except SettingError as error:
        raise SettingError(f"{error}, nor a number of samples such as 50000") from None


def try_advice(
    advice: BatchAdvice,
    program: Program,
    limits: TrialLimits,
    ranks: TrialRanks,
    say: Callable[[str], None],
) -> TrialResult | str:
    """Runs the program at the present and at the advised batch size, one process after another.

    Returns:
        The result, or why there is nothing to try.
    """
    found, fastest = advice.found, advice.fastest_row
    if fastest is None:
        return "there is no batch size to try"
    if advice.observations.coupling:
        return f"the {found.micro_batch} samples of each backward are part of the loss"
    micro = _micro_batch(advice, advice.bound or fastest.batch_size)  # also if little is gained
    if micro == found.micro_batch:
        return f"the batch to try is the present one, {found.batch_size}"
    tried = found.batch_size * micro // found.micro_batch
    result = TrialResult(
        found.batch_size,
        tried,
        Gain(advice.relative_time(tried, found.accumulation), advice.relative_samples(tried)),
        limits.folder,
    )
    if not (found.has_loader or BATCH_FACTOR in ASKED or BATCH_FACTOR in os.environ):
        result.failure = f"the program has read no DataLoader. {_by_hand(found)}"
        return result
    observed = advice.observations.steps * found.batch_size
    samples = limits.samples or max(observed, FULL * max(tried, found.batch_size))
    runs = _Runs(advice, program, limits, ranks, samples)
    say(
        f"Trying {tried} and {found.batch_size}, {limits.seeds} runs each, in {limits.folder}; "
        "your own files stay as they are."
    )
    for seed in range(limits.seeds):
        order = [(found.batch_size, found.micro_batch), (tried, micro)]
        pair = []
        for batch, size in order[:: -1 if seed % 2 else 1]:  # a slower machine favours neither
            try:
                curve = runs.run(batch, size, seed)
            except SettingError as error:
                result.failure = f"batch {batch}, seed {seed}: {error}"
                return result
            say(
                f"  batch {batch}, seed {seed}: {len(curve.losses)} steps, "
                f"{curve.samples[-1]:,.0f} samples in {curve.seconds[-1]:.1f} s"
            )
            pair.append(curve)
        result.curves += sorted(pair, key=lambda one: one.batch_size == tried)
        compared = gain(*result.curves[-2:])
        if isinstance(compared, str):
            result.failure = f"seed {seed}: {compared}"
            return result
        result.gains.append(compared)
    result.doubts += _doubts(advice, result)
    return result


def _doubts(advice: BatchAdvice, result: TrialResult) -> Iterator[str]:
    """What makes the result uncertain, in sentences."""
    factors = [advice.lr_factor(result.tried, name) for name in advice.found.optimizers]
    first, second, *_ = result.curves
    if not any(rates_follow(first, second, factor) for factor in factors):
        yield (
            "The learning rates of the runs differ otherwise than advised, since a schedule or "
            f"warm-up counts steps; divide its steps by {BATCH_FACTOR} of the environment"
        )
    if len({curve.losses[0] for curve in result.curves[::2]}) < len(result.gains):
        yield (
            "Every seed gives the same training, so the runs differ in time alone: let the program "
            "seed itself by torch.manual_seed, random.seed or numpy.random.seed"
        )
    for batch in (result.present, result.tried):
        curves = [curve for curve in result.curves if curve.batch_size == batch]
        times = [1e3 * float(one.seconds[-1]) / len(one.losses) for one in curves]
        low, high = min(times), max(times)
        if high > _STEADY * low:
            yield (
                f"A step of {batch} took {low:.3g} to {high:.3g} ms: something else uses the "
                "machine, so times are uncertain; samples are not"
            )


def _micro_batch(advice: BatchAdvice, target: int) -> int:
    """Samples of a backward for a batch size, with as many backwards as the program has."""
    found, time = advice.found, advice.observations.time
    micro = max(1, round(target / (found.ranks * found.accumulation)))
    largest = time.largest if time is not None else None
    return min(micro, largest or micro)


@dataclass
class _Runs:
    """Runs the program, each time in a process and a folder of its own."""

    advice: BatchAdvice
    program: Program
    limits: TrialLimits
    ranks: TrialRanks
    samples: int  # of each run
    rows: float = 0.0  # of a step of the present batch size, which comes first

    def run(self, batch: int, micro: int, seed: int) -> LossCurve:
        """The losses of a run, which its folder keeps as a log.

        Raises:
            SettingError: the run failed, or was not of this batch size.
        """
        found, limits, program = self.advice.found, self.limits, self.program
        folder = limits.folder / f"batch-{batch}-seed{seed}"
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise SettingError(
                f"{folder} cannot be made: {error.strerror}; --try-in names another folder"
            ) from None
        own = {found.micro_batch, found.micro_batch * found.accumulation}
        trial = Trial(
            target=program.target,
            arguments=program.arguments,
            is_module=program.is_module,
            users=str(program.folder),
            folder=str(folder / "work"),
            losses=str(folder / "losses.jsonl"),
            sizes={
                str(n): n * micro // found.micro_batch
                for n in {*own, *(n * found.ranks for n in own)}
            },
            dim=found.dim,
            backwards=found.accumulation,
            seed=seed,
            seconds=limits.seconds,
            steps=-(-self.samples // batch),
            lr_factors={name: self.advice.lr_factor(batch, name) for name in found.optimizers},
        )
        self._start(trial, folder, micro / found.micro_batch)
        steps = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
        (folder / "losses.jsonl").unlink()
        shutil.rmtree(folder / "work", ignore_errors=True)  # another rank may just write to it
        if not steps:
            raise SettingError(f"it ended after a few steps; {_output(folder)}")
        return self._curve(batch, seed, steps, folder)

    def _start(self, trial: Trial, folder: Path, batch_factor: float) -> None:
        """Runs the process."""
        variables = {
            BATCH_FACTOR: repr(batch_factor),
            LR_FACTOR: repr(next(iter(trial.lr_factors.values()))),
            "WANDB_MODE": "offline",
        }
        expected = trial.steps * self.advice.observations.step_seconds * max(1, batch_factor)
        patience = _PATIENCE + self.program.seconds + 10 * min(self.limits.seconds, expected)
        OwnFolder(Path(trial.folder), Path(trial.users)).make()
        try:
            status = self.ranks.run(trial, variables, folder / "output.txt", patience)
        except subprocess.TimeoutExpired:
            raise SettingError(f"it did not end; {_output(folder)}") from None
        if status:
            raise SettingError(f"it failed; {_output(folder)}")

    def _curve(
        self, batch: int, seed: int, steps: list[tuple[int, int, float, float, float]], folder: Path
    ) -> LossCurve:
        """The curve of a run, written as a log."""
        found = self.advice.found
        rows, seen, seconds, rates, losses = np.array(steps).T
        usual = float(np.percentile(rows, 60, method="nearest"))  # a few have the end of an epoch
        if not usual:
            raise SettingError("the samples of its steps cannot be counted; is its loss compiled?")
        self.rows = self.rows or usual
        self._require_size(batch, usual)
        samples = seen * found.batch_size / self.rows
        curve = LossCurve(batch, seed, seconds, samples, losses, rates)
        _write_log(folder, curve)
        return curve

    def _require_size(self, batch: int, rows: float) -> None:
        """Raises SettingError if the program has not trained at this batch size."""
        found = self.advice.found
        seen = rows / self.rows * found.batch_size
        wanted = abs(math.log(batch / found.batch_size))
        if abs(math.log(seen / batch)) > min(wanted / 2 or _SAME, _SAME):
            raise SettingError(
                f"its steps were of {seen:.0f} samples, not {batch}: an epoch may have too few for "
                f"such batches, or they come from no DataLoader. {_by_hand(found)}"
            )


def _by_hand(found: Found) -> str:
    """What a program writes that makes its batches itself."""
    return (
        f"Write bb.advised_batch_size({found.micro_batch}) where it has {found.micro_batch}, or "
        f"multiply by {BATCH_FACTOR} of the environment, and start advise with 1 as its value"
    )


def _write_log(folder: Path, curve: LossCurve) -> None:
    """Writes the run as the log of a training."""
    settings = {"arm": f"batch {curve.batch_size}", "seed": curve.seed}
    with RunLog(folder, settings=settings, higher_is_better=False) as log:
        columns = (curve.samples, curve.seconds, curve.losses, curve.rates)
        before = 0
        for step, (samples, seconds, loss, rate) in enumerate(zip(*columns, strict=True), 1):
            log.record(
                StepRecord(
                    step=step,
                    epoch=0,
                    samples=round(samples),
                    batch_size=round(samples) - before,
                    target_batch_size=curve.batch_size,
                    micro_batches=1,
                    loss=float(loss),
                    lr=(float(rate),),
                    statistics=None,
                    skipped=False,
                    decision=Decision(curve.batch_size, "trial"),
                    elapsed_seconds=float(seconds),
                    every=None,
                )
            )
            before = round(samples)


def _output(folder: Path) -> str:
    """The last line that a run has printed."""
    lines = (folder / "output.txt").read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return f"{last} ({folder / 'output.txt'})"
