"""`bigbatch advise --try` on several kinds of programs: what it runs, compares and refuses."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from bigbatch.advisor.loss_curve import Gain
from bigbatch.advisor.trial import Program, TrialLimits, parse_limit, try_advice
from bigbatch.advisor.trial_result import TrialResult, sentences
from bigbatch.errors import SettingError
from bigbatch.log.history import find_runs, history_of
from made_observations import advice_of, machine, steady
from torchrun import run, torchrun

PROGRAM = """
import os, time, torch
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset, DistributedSampler
import bigbatch as bb

torch.manual_seed(0)
x = torch.randn(6000, 8)
y = x.sum(1, keepdim=True) + 0.3 * torch.randn(6000, 1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
factor = os.environ.get("BIGBATCH_BATCH_FACTOR", "")
with open("log.txt", "a") as log:
    log.write(factor)

def step(x, y):
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    time.sleep(0.002)  # whatever the batch size
    optimizer.step()


def save():
    if factor:
        torch.save(model.state_dict(), "last.pt")

loss_of = torch.nn.functional.mse_loss
"""
LOADER = "for batch in DataLoader(TensorDataset(x, y), 4, shuffle=True): step(*batch)\nsave()\n"
BY_HAND = "for i in range(0, 6000, size): step(x[i:i + size], y[i:i + size])\n"


def try_program(folder, body, *options, command=None, start=PROGRAM):
    """(exit status, output, JSON page) of the command on this program."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(start + body)
    (folder / "last.pt").write_text("the user's")
    arguments = ("--try", "--try-in", folder / "tried", "--seeds", 1, "-o", folder / "page.json")
    call = command or (lambda *words: run(sys.executable, *words))
    before = Path.cwd()
    os.chdir(folder)  # where a user starts it
    try:
        done = call("-m", "bigbatch", "advise", "--steps", 400, *arguments, *options, "train.py")
    finally:
        os.chdir(before)
    page = json.loads((folder / "page.json").read_text())
    assert "the user's" == (folder / "last.pt").read_text()
    assert "" == (folder / "log.txt").read_text()
    return done.returncode, done.stdout + done.stderr, page


def assert_compared(status, output, page, seeds=1):
    """A trial that went well, of a program with a batch of 4 and a rate of 0.001."""
    assert 0 == status, output
    trial = page["trial"]
    assert "" == trial["failure"]
    assert 4 == trial["present"] < trial["tried"]
    assert seeds == len(trial["runs"])
    assert all(one["time"] > 0 and one["samples"] > 0 for one in trial["runs"])
    assert f"{trial['tried']} instead of 4: predicted" in output
    runs = {path.name: history_of(path) for path in find_runs(Path(trial["folder"]))}
    for batch, rate in ((4, 0.001), (trial["tried"], 0.001 * page["lr_factor"])):
        rows = runs[f"batch-{batch}-seed0"].rows
        assert batch == rows[0]["batch_size"]
        assert rate == pytest.approx(rows[0]["lr"][0], rel=1e-6)
        assert rows[0]["loss"] > 2 * rows[-1]["loss"] > 0


def test_a_program_is_tried_and_its_files_stay(tmp_path):
    assert_compared(*try_program(tmp_path, LOADER))


@pytest.mark.thorough
def test_batches_that_were_read_before_the_training_are_a_loaders(tmp_path):
    batches = "list(DataLoader(TensorDataset(x, y), 4, shuffle=True))"
    assert_compared(*try_program(tmp_path, f"for batch in {batches}: step(*batch)\nsave()\n"))


@pytest.mark.thorough
def test_a_batch_by_hand_needs_a_line_which_the_error_shows(tmp_path):
    status, output, page = try_program(tmp_path / "one", f"size = 4\n{BY_HAND}")
    assert 1 == status
    assert "has read no DataLoader. Write bb.advised_batch_size(4)" in page["trial"]["failure"]
    assert "BIGBATCH_BATCH_FACTOR" in output
    assert "Trying" not in output
    body = f"size = bb.advised_batch_size(4)\n{BY_HAND}"
    assert_compared(*try_program(tmp_path / "two", body))


FAILURES = {
    "ValueError: no trial": f"if factor: raise ValueError('no trial')\n{LOADER}",
    "another/last.pt": "torch.save({}, Path(os.environ['ANOTHER']) / 'last.pt')\n" + LOADER,
    "an epoch may have too few": "y += 3 * torch.randn(6000, 1)\nfor _ in range(250):\n"
    "    for batch in DataLoader(TensorDataset(x[:12], y[:12]), 4, shuffle=True):\n"
    "        step(*batch); time.sleep(0.01)\n        with torch.no_grad(): model.weight.zero_()\n",
    "bb.advised_lr(RATE)": "class Own(torch.optim.SGD):\n"
    "    def __init__(self, *args):\n"
    "        super().__init__(*args, lr=0.001); del self.param_groups[0]['lr']\n"
    "    def step(self):\n"
    "        for p in self.param_groups[0]['params']: p.data -= 0.001 * p.grad\n"
    "optimizer = Own(model.parameters())\n" + LOADER,
    "is set during its step": "class Own(torch.optim.SGD):\n"
    "    def step(self, closure=None):\n"
    "        self.param_groups[0]['lr'] *= 0.999\n"
    "        for p in self.param_groups[0]['params']: p.data -= 0.001 * p.grad\n"
    "optimizer = Own(model.parameters(), lr=0.001)\n" + LOADER,
}


@pytest.mark.thorough
@pytest.mark.parametrize("reason", FAILURES)
def test_what_cannot_be_compared_says_why(tmp_path, reason, monkeypatch):
    (other := tmp_path / "another").mkdir()
    monkeypatch.setenv("ANOTHER", str(other))
    monkeypatch.setenv("TMPDIR", "/dev/shm")
    status, output, page = try_program(tmp_path / "users", FAILURES[reason])
    assert 1 == status
    assert reason in page["trial"]["failure"]
    assert reason in output


@pytest.mark.thorough
def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    status, _, page = try_program(tmp_path, LOADER, "--try-in", tmp_path / "file" / "tried")
    assert 1 == status
    assert "--try-in names another folder" in page["trial"]["failure"]


@pytest.mark.thorough
def test_a_trial_that_is_stopped_names_its_folder_and_leaves_no_process(tmp_path):
    stop = "if factor: os.kill(os.getppid(), 15); time.sleep(60)\n"
    status, output, _ = try_program(tmp_path, stop + LOADER)
    assert 130 == status
    assert f"Its folder can be deleted: {tmp_path / 'tried'}" in output
    assert str(tmp_path / "tried" / "batch-4-seed0") not in run("ps", "axww").stdout


@pytest.mark.thorough
def test_seeds_that_change_nothing_are_named(tmp_path):
    body = PROGRAM.replace("torch.randn(", "draw(").replace(
        "model =",
        "model = torch.nn.Linear(8, 1)\ntorch.nn.init.zeros_(model.weight)\n"
        "torch.nn.init.zeros_(model.bias)\nunused =",
    )
    draw = "import torch\ng = torch.Generator().manual_seed(0)\n"
    draw += "draw = lambda *shape: torch.randn(*shape, generator=g)\n"
    loader = LOADER.replace("shuffle=True", "shuffle=False")
    status, output, page = try_program(tmp_path, loader, "--seeds", 2, start=draw + body)
    assert_compared(status, output, page, seeds=2)
    assert "Every seed gives the same training" in output


@pytest.mark.thorough
def test_ranks_of_torchrun_are_tried_together(tmp_path):
    body = (
        "torch.distributed.init_process_group('gloo')\n"
        "model = torch.nn.parallel.DistributedDataParallel(model)\n"
        "data = TensorDataset(x, y)\n"
        "for batch in DataLoader(data, 2, sampler=DistributedSampler(data)): step(*batch)\n"
    )
    result = try_program(tmp_path, body, command=lambda *words: torchrun(2, *words))
    assert_compared(*result)


class MadeRuns:
    """Stands for the processes: steps of so many rows in each run, whose loss falls."""

    def __init__(self, *rows):
        self.rows, self.trials = iter(rows), []

    def run(self, trial, variables, output, seconds):
        self.trials.append(trial)
        rows = next(self.rows)
        steps = np.arange(1, trial.steps + 1)
        lines = zip(rows + 0 * steps, rows * steps, steps, 0.1 + 0 * steps, 2 / steps, strict=True)
        Path(trial.losses).write_text("".join(f"{list(map(float, one))}\n" for one in lines))
        return 0


def try_made(folder, advice, runs, seeds=1):
    program = Program("train.py", (), is_module=False, folder=folder, seconds=1.0)
    limits = TrialLimits(60.0, None, seeds, folder / "tried")
    return try_advice(advice, program, limits, runs, print)


def test_steps_of_the_present_batch_may_differ_a_little_from_seed_to_seed(tmp_path):
    result = try_made(tmp_path, advice_of(steady(500), machine()), MadeRuns(64, 192, 192, 63), 2)
    assert ("", 192, 2) == (result.failure, result.tried, len(result.gains))


def test_a_smaller_batch_is_tried_for_as_many_steps_as_a_comparison_needs(tmp_path):
    advice = advice_of(steady(1), machine(1e-6), steps=30)
    runs = MadeRuns(64, 2)
    result = try_made(tmp_path, advice, runs)
    assert 2 == result.tried
    assert [160, 160 * 32] == [trial.steps for trial in runs.trials]


def test_what_cannot_be_another_batch_of_the_same_loss_is_not_tried(tmp_path):
    advice = advice_of(steady(500), machine(), accumulation=4, micro_batch=16)
    advice.observations.coupling = "cdist"
    assert "16 samples of each backward are part" in try_made(tmp_path, advice, MadeRuns())
    full = advice_of(steady(500), machine(largest=64))
    assert "the batch to try is the present one, 64" == try_made(tmp_path, full, MadeRuns())


def test_the_prediction_is_about_the_backwards_that_a_step_has_in_the_trial(tmp_path):
    time = machine(fixed=0.01, per_sample=1e-4)
    advice = advice_of(steady(500), time, accumulation=4, micro_batch=16)
    result = try_made(tmp_path, advice, MadeRuns(64, 192))
    seconds = [4 * 0.01 + 1e-4 * batch for batch in (64, 192)]
    progress = [1 + advice.noise_scale / batch for batch in (64, 192)]
    expected = seconds[1] * progress[1] / (seconds[0] * progress[0])
    assert (192, expected) == (result.tried, pytest.approx(result.predicted.time))


def test_the_length_of_a_run():
    assert (30.0, sys.maxsize) == parse_limit("30s")
    assert (float("inf"), 50000) == parse_limit("50000")
    assert (60.0, None) == parse_limit(None)
    for text in ("", "0", "-5", "soon", "1e4"):
        with pytest.raises(SettingError, match=r"no time such as .*, nor a number of samples"):
            parse_limit(text)


def test_the_sentences_of_a_result(tmp_path):
    result = TrialResult(16, 64, Gain(0.61, 1.32), tmp_path)
    result.gains += [Gain(0.55, 1.25), Gain(0.49, 1.33)]
    first, second, *_ = sentences(result)
    assert (
        "64 instead of 16: predicted 39% less time, measured 48% less time (45% to 51% over 2 "
        "seeds)."
    ) == first
    assert (
        "Samples to the same loss: predicted 1.32 times, measured 1.29 (1.25 to 1.33)."
    ) == second
    result.gains[0] = Gain(1.1, 1.25)
    assert "(10% more time to 51% less time over 2 seeds)" in next(sentences(result))
    result.gains[1] = Gain(1.2, 1.25)
    assert "15% more time (10% to 20% over 2 seeds)" in next(sentences(result))
