"""The log of any loop: written at once, by one process, and continued after a kill."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import LoopError, RankError, RunError, SettingError, StateError
from bigbatch.log.history import find_runs, history_of, table_of
from bigbatch.log.html_report import write_report
from bigbatch.log.replay import lr_decays
from log_rows import row, write_log
from loop_steps import trained
from made_records import made_record

MEASURED = bb.GradientStatistics(1.0, 64.0, samples=32, micro_batches=4)
NEEDS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


def optimizer(*rates):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in rates or (0.1,)]
    return torch.optim.SGD(groups, lr=0.1)


def steps_in(path):
    return [row["step"] for row in history_of(path).rows]


def log_of(path, steps, **options):
    """A log of a loop that measures, with so many steps."""
    log = bb.RunLog(path, **options)
    for _ in range(steps):
        log.step(MEASURED, optimizer=optimizer(), loss=0.5)
    return log


def network():
    torch.manual_seed(0)
    return torch.nn.Linear(5, 3)


def loop(log, model=None, *, policy=None, samples=96, **options):
    model = model or network()
    images = torch.randn(samples, 5, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(images, images[:, :3].argmax(1))
    return bb.AdaptiveBatch(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(data, 8),
        policy=policy or bb.SimiGrad(0.2),
        every=1,
        log=log,
        **options,
    )


# rows


def test_a_loop_that_measures_writes_what_was_measured(tmp_path):
    log = bb.RunLog(tmp_path / "run", settings={"seed": 1})
    log.step(MEASURED, optimizer=optimizer(0.1, 0.01), loss=torch.tensor(0.5))
    log.step(None, optimizer=optimizer(0.2), epoch=1, skipped=True)
    log.step(None, optimizer=optimizer(0.2), epoch=1, loss=math.nan, batch_size=8)
    first, second, third = history_of(tmp_path / "run").rows
    assert (1, 0, 32, 32, 4) == tuple(
        first[name] for name in ("step", "epoch", "samples", "batch_size", "micro_batches")
    )
    assert (1.0, 64.0, 64.0, 0.5) == tuple(
        first[name] for name in ("grad_sqnorm", "grad_variance", "noise_scale", "loss")
    )
    assert ([0.1, 0.01], False) == (first["lr"], first["skipped"])
    assert (64, 32, None, None, True) == tuple(
        second[name] for name in ("samples", "batch_size", "loss", "similarity", "skipped")
    )
    assert (72, 8, None, 1) == tuple(
        third[name] for name in ("samples", "batch_size", "loss", "epoch")
    )
    assert 0 < first["elapsed_seconds"] < third["elapsed_seconds"]


def test_a_first_step_that_was_not_measured_needs_its_size(tmp_path):
    log = bb.RunLog(tmp_path / "run")
    with pytest.raises(SettingError, match="pass batch_size="):
        log.step(None, optimizer=optimizer())
    log.step(None, optimizer=optimizer(), batch_size=16)
    assert [16] == [row["samples"] for row in history_of(tmp_path / "run").rows]


def test_intervals_layers_and_the_cosine_are_written_where_they_are_measured(tmp_path):
    model = torch.nn.Sequential(network())
    meter = bb.GradientMeter(model, confidence=0.9, per_layer=True, half_batch_cosine=True)
    for _ in range(4):
        cross_entropy(model(torch.randn(8, 5)), torch.randint(0, 3, (8,))).backward()
    bb.RunLog(tmp_path / "run").step(meter.read(samples=[8] * 4), optimizer=optimizer())
    (only,) = history_of(tmp_path / "run").rows
    assert {"0"} == only["layers"].keys()
    assert 2 == len(only["similarity_interval"]) == len(only["noise_scale_interval"])
    assert -1 <= only["half_batch_cosine"] <= 1


def test_an_adaptive_batch_writes_the_record_of_every_step(tmp_path):
    train = loop(tmp_path / "run")
    records = trained(train, 4)
    for record, one in zip(records, history_of(tmp_path / "run").rows, strict=True):
        assert (record.step, record.samples) == (one["step"], one["samples"])
        assert (record.loss, list(record.lr)) == (one["loss"], one["lr"])
        assert record.statistics.grad_sqnorm == one["grad_sqnorm"]
        assert record.decision.batch_size == one["next_batch_size"]
        assert record.decision.reason == one["decision_reason"]


class Unrated(torch.optim.Optimizer):
    """Chooses its own rates, as Adafactor does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": None})

    def step(self, closure=None):
        pass


def test_an_optimizer_without_learning_rates_is_logged_and_reported(tmp_path):
    model = network()
    train = bb.AdaptiveBatch(
        model,
        Unrated(model.parameters()),
        [(torch.randn(8, 5), torch.zeros(8, dtype=torch.long))] * 3,
        policy=bb.Fixed(8),
        micro_batch=4,
        lr_scaling=None,
        log=tmp_path / "run",
    )
    for step in train:
        for x, y in step:
            step.backward(cross_entropy(model(x), y))
        step.update()
    history = history_of(tmp_path / "run")
    assert [[None]] * 3 == [row["lr"] for row in history.rows]
    write_report([history], tmp_path / "report.html", "rates")
    assert lr_decays(history) is None


def test_scores_belong_to_the_step_before_them(tmp_path):
    train = loop(str(tmp_path / "run"))
    trained(train, 2)
    train.log(accuracy=torch.tensor(0.5), **{"test loss, nats": math.inf})
    train.log(accuracy=0.75)
    trained(train, 1)
    first, second, third = (row["metrics"] for row in history_of(tmp_path / "run").rows)
    assert (None, None) == (first, third)
    assert {"accuracy": 0.75, "test loss, nats": None} == second


def test_scores_before_a_step_or_without_a_log_are_refused(tmp_path):
    with pytest.raises(LoopError, match="none was logged yet"):
        bb.RunLog(tmp_path / "run").scores(accuracy=1.0)
    with pytest.raises(LoopError, match=r'pass AdaptiveBatch\(log="runs/mine"\)'):
        loop(None).log(accuracy=1.0)
    assert not (tmp_path / "run").exists()


def test_a_record_may_have_its_scores_in_its_own_line(tmp_path):
    bb.RunLog(tmp_path / "run").record(made_record(8), accuracy=0.5)
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {"accuracy": 0.5} == json.loads(line)["metrics"]


# settings


def test_settings_are_those_of_the_loop_with_the_users_own(tmp_path):
    log = bb.RunLog(tmp_path / "run", settings={"seed": 3, "lr": 0.1}, higher_is_better=False)
    trained(loop(log, policy=bb.SimiGrad(0.3), base_batch=16), 1)
    history = history_of(tmp_path / "run")
    expected = {"seed": 3, "lr": 0.1, "base_batch": 16, "batch_size": 8, "micro_batch": 8}
    expected |= {"lr_scaling": "sqrt", "every": 1, "optimizer": "SGD", "world_size": 1}
    assert expected.items() <= history.settings.items()
    assert history.settings["policy"].startswith("SimiGrad(target=0.3")
    assert (0.3, False) == (history.target, history.higher_is_better)
    document = json.loads((tmp_path / "run" / "settings.json").read_text())
    assert (3, bb.__version__) == (document["schema"], document["versions"]["bigbatch"])


@dataclasses.dataclass
class HoldSize:
    """A policy with a function, whose repr has an address."""

    of: Callable = lambda size: size

    def decide(self, statistics, state):
        return bb.Decision(self.of(state.batch_size), "held")


def test_the_text_of_a_policy_is_that_of_another_process_too(tmp_path):
    for seed in (0, 1):
        log = bb.RunLog(tmp_path / f"mine-seed{seed}", settings={"seed": seed})
        trained(loop(log, policy=HoldSize(lambda size: size)), 1)
    assert 1 == len(table_of([history_of(run) for run in find_runs(tmp_path)]).rows)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lr": [0.1]}, r"settings\['lr'\]=\[0.1\] must be a number"),
        ({"seed": "0"}, r"settings\['seed'\]='0' must be a whole number"),
        ({"epochs": 2.5}, r"settings\['epochs'\]=2.5 must be a whole number"),
        ({"lr": math.nan}, r"settings\['lr'\]=nan must be a number that is finite"),
    ],
)
def test_a_setting_that_tables_cannot_show_is_refused(tmp_path, settings, said):
    with pytest.raises(SettingError, match=said):
        bb.RunLog(tmp_path / "run", settings=settings)


def test_a_file_is_no_folder_of_a_log(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SettingError, match="is a file; name a folder"):
        loop(tmp_path / "file")


def test_runs_that_differ_in_their_seed_alone_are_summarized(tmp_path):
    for seed in (0, 1):
        log = log_of(tmp_path / f"mine-seed{seed}", 2, settings={"seed": seed})
        log.scores(accuracy=90 + seed)
    runs = find_runs(tmp_path)
    assert [tmp_path / "mine-seed0", tmp_path / "mine-seed1"] == runs
    (cells,) = table_of([history_of(run) for run in runs]).rows
    assert ("mine", "90.50 ± 0.71", "2") == cells[:3]


def test_runs_are_found_in_a_folder_and_no_deeper(tmp_path):
    write_log(tmp_path / "some" / "b", [row(1)])
    write_log(tmp_path / "some" / "a", [row(1)])
    write_log(tmp_path / "some" / "deep" / "c", [row(1)])
    assert ["a", "b"] == [run.name for run in find_runs(tmp_path / "some")]
    assert [tmp_path / "some" / "a"] == find_runs(str(tmp_path / "some" / "a"))
    with pytest.raises(RunError, match=r"has no metrics\.jsonl"):
        find_runs(tmp_path)
    with pytest.raises(RunError, match=r"there is no run directory .*none"):
        find_runs(tmp_path / "none")


def test_a_table_has_the_last_value_of_each_score_whenever_it_was_measured(tmp_path):
    log = log_of(tmp_path / "run", 1)
    log.scores(accuracy=0.5, speed=10.0)
    log.step(MEASURED, optimizer=optimizer())
    log.scores(accuracy=0.75)
    table = table_of([history_of(tmp_path / "run")])
    assert ("accuracy", "speed") == table.columns[1:3]
    assert ("0.7500", "10.00") == table.rows[0][1:3]


# the folder


def test_nothing_is_created_before_the_first_step(tmp_path):
    train = loop(tmp_path / "run")
    train.state_dict()
    with bb.RunLog(tmp_path / "run"):
        pass
    assert [] == list(tmp_path.iterdir())


def test_a_folder_that_has_rows_is_refused_before_the_first_step(tmp_path):
    log_of(tmp_path / "run", 2).close()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    model = network()
    weights = model.weight.clone()
    train, log = loop(tmp_path / "run", model), bb.RunLog(tmp_path / "run")
    for step in (
        *[lambda: trained(train, 1)] * 2,  # the second time too
        *[lambda: log.step(MEASURED, optimizer=optimizer())] * 2,
    ):
        with pytest.raises(RunError, match="another folder, remove this one, or load the checkpoi"):
            step()
    assert torch.equal(weights, model.weight)
    assert before == (tmp_path / "run" / "metrics.jsonl").read_bytes()


def test_other_files_of_the_folder_are_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"mine")
    log_of(tmp_path / "run", 1)
    assert b"mine" == (tmp_path / "run" / "checkpoint.pt").read_bytes()


HOLD = """
import sys, torch, bigbatch as bb
log = bb.RunLog(sys.argv[1])
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(int(sys.argv[2])):
    log.step(None, optimizer=optimizer, batch_size=8, loss=1.0)
    print("written", flush=True)
sys.stdin.read()
"""


def holding(path, steps):
    """A process that has written so many steps, and lives."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(steps)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for _ in range(steps):
        assert "written\n" == process.stdout.readline()
    return process


def test_a_second_process_is_kept_out_and_a_killed_one_lets_go(tmp_path):
    process = holding(tmp_path / "run", 3)
    assert [1, 2, 3] == steps_in(tmp_path / "run")  # each was on disk when its call returned
    log = bb.RunLog(tmp_path / "run")
    log.load_state_dict({"step": 2, "samples": 16})
    with pytest.raises(RunError, match="in use by another process"):
        log.step(None, optimizer=optimizer(), batch_size=8)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [1, 2, 3] == steps_in(tmp_path / "run")
    log.step(None, optimizer=optimizer(), batch_size=8)
    assert [1, 2, 3] == steps_in(tmp_path / "run")


def test_a_child_process_does_not_hold_the_folder_of_its_parent(tmp_path):
    """As workers of a DataLoader that outlive a training that was killed."""
    log = log_of(tmp_path / "run", 1)
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    try:
        log.close()
        process = holding(tmp_path / "other", 0)
        process.communicate()
        resumed = bb.RunLog(tmp_path / "run")
        resumed.load_state_dict({"step": 1, "samples": 32})
        resumed.open()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


# resumption


def test_a_resumed_training_has_the_rows_of_one_that_was_never_stopped(tmp_path):
    def without_times(path):
        return [{**row, "elapsed_seconds": 0} for row in history_of(path).rows]

    whole = loop(tmp_path / "whole")
    trained(whole, 4)
    whole.log(accuracy=0.5)
    trained(whole, 4)
    train = loop(tmp_path / "stopped")
    trained(train, 4)
    train.log(accuracy=0.5)
    state = train.state_dict()
    weights, moments = train.model.state_dict(), train.optimizer.state_dict()
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    trained(train, 3)
    train.log(accuracy=0.9)
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # cut off by a kill
    del train
    again = loop(tmp_path / "stopped")
    again.model.load_state_dict(weights)
    again.optimizer.load_state_dict(moments)
    again.load_state_dict(state)
    assert 7 == len(history_of(tmp_path / "stopped").rows)  # until it trains
    trained(again, 4)
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "stopped")


def test_a_loop_that_measures_resumes_by_the_state_of_its_log(tmp_path):
    log = log_of(tmp_path / "run", 3)
    state = json.loads(json.dumps(log.state_dict()))
    log.step(MEASURED, optimizer=optimizer())
    log.scores(accuracy=1.0)
    log.close()
    again = bb.RunLog(tmp_path / "run")
    again.load_state_dict(state)
    again.step(None, optimizer=optimizer())
    rows = history_of(tmp_path / "run").rows
    assert [(1, 32), (2, 64), (3, 96), (4, 128)] == [(one["step"], one["samples"]) for one in rows]
    assert rows[3]["elapsed_seconds"] > rows[2]["elapsed_seconds"]
    assert rows[3]["metrics"] is None


def test_a_closed_log_continues_with_its_next_step(tmp_path):
    with log_of(tmp_path / "run", 2) as log:
        pass
    log.step(MEASURED, optimizer=optimizer())
    assert [1, 2, 3] == steps_in(tmp_path / "run")


def test_a_state_from_before_the_first_step_begins_the_log_again(tmp_path):
    state = loop(tmp_path / "run").state_dict()
    trained(loop(tmp_path / "run"), 3)
    train = loop(tmp_path / "run")
    train.load_state_dict(state)
    trained(train, 2)
    assert [1, 2] == steps_in(tmp_path / "run")


def test_the_log_of_another_training_is_refused(tmp_path):
    log_of(tmp_path / "run", 3).close()
    log = bb.RunLog(tmp_path / "run")
    log.load_state_dict({"step": 2, "samples": 99})
    for _ in range(2):
        with pytest.raises(RunError, match=r"64 samples at step 2.* state 99: .* another trai"):
            log.step(MEASURED, optimizer=optimizer())
    assert [1, 2, 3] == steps_in(tmp_path / "run")


def test_one_log_has_one_training(tmp_path):
    log = bb.RunLog(tmp_path / "run")
    trained(loop(log), 2)
    with pytest.raises(RunError, match=r"step 1 comes after step 2 .* make another RunLog"):
        trained(loop(log), 1)
    assert [1, 2] == steps_in(tmp_path / "run")


def test_two_writers_of_one_process_are_distinguished(tmp_path):
    first, second = loop(tmp_path / "run"), loop(tmp_path / "run")
    one, other = iter(first), iter(second)
    for step, train in ((next(one), first), (next(other), second)):
        for x, y in step:
            step.backward(cross_entropy(train.model(x), y))
        if train is first:
            step.update()
    with pytest.raises(RunError, match="rows of another writer too; give each its own log"):
        step.update()
    assert [1] == steps_in(tmp_path / "run")


@pytest.mark.parametrize(
    ("damage", "rest"),
    [
        (Path.unlink, []),
        (lambda file: os.truncate(file, 0), []),
        (lambda file: (file.unlink(), file.touch()), []),
        (lambda file: os.truncate(file, file.stat().st_size // 2), [1, 2, 3]),  # within row 4
    ],
)
def test_rows_that_another_program_deletes_are_said_and_counted_and_the_others_stay(
    tmp_path, damage, rest
):
    log = log_of(tmp_path / "run", 7)
    damage(log.metrics)
    with pytest.warns(
        UserWarning, match=r"of the [\d,]+ bytes .* deleted .* up to step 7 are lost"
    ):
        log.step(MEASURED, optimizer=optimizer(), loss=0.5)
    for _ in range(3):
        log.step(MEASURED, optimizer=optimizer(), loss=0.5)
    log.close()
    history = history_of(tmp_path / "run")
    assert [*rest, 8, 9, 10, 11] == [row["step"] for row in history.rows]
    assert f"run (rows of {len(rest) + 4} of 11 steps)" == table_of([history]).rows[0][0]


@pytest.mark.parametrize("kept", [0, 3])
def test_scores_of_a_step_that_another_program_deleted_are_left_out(tmp_path, kept):
    log = log_of(tmp_path / "run", 7)
    lines = log.metrics.read_bytes().splitlines(keepends=True)
    os.truncate(log.metrics, sum(map(len, lines[:kept])))
    with pytest.warns(UserWarning, match="up to step 7 are lost"):
        log.scores(accuracy=0.5)
    log.scores(other=0.5)
    log.close()
    again = bb.RunLog(tmp_path / "run")
    again.load_state_dict(log.state_dict())
    with pytest.warns(UserWarning, match=f"ends at step {kept} .* after step 7"):
        again.step(MEASURED, optimizer=optimizer())
    again.scores(accuracy=0.75)
    assert [*range(1, kept + 1), 8] == steps_in(tmp_path / "run")
    assert {"accuracy": 0.75} == history_of(tmp_path / "run").rows[-1]["metrics"]


def test_scores_are_written_again_after_a_return_to_a_step_before_the_lost_rows(tmp_path):
    log = log_of(tmp_path / "run", 2)
    early = log.state_dict()
    for _ in range(3):
        log.step(MEASURED, optimizer=optimizer())
    log.metrics.write_bytes(b"")
    with pytest.warns(UserWarning, match="up to step 5 are lost"):
        log.scores(samples=1.0)  # as a column of the steps is named
    log.load_state_dict(early)
    with pytest.warns(UserWarning, match="ends at step 0 .* after step 2"):
        log.scores(samples=1.0)
    log.step(MEASURED, optimizer=optimizer())
    log.scores(samples=2.0)
    (row,) = history_of(tmp_path / "run").rows
    assert (3, {"samples": 2.0}) == (row["step"], row["metrics"])


def test_a_folder_that_is_removed_is_made_again(tmp_path):
    log = log_of(tmp_path / "run", 2)
    shutil.rmtree(tmp_path / "run")
    with pytest.warns(UserWarning, match="up to step 2 are lost"):
        log.step(MEASURED, optimizer=optimizer())
    log.step(MEASURED, optimizer=optimizer())
    assert 2 == len(log.metrics.read_bytes().splitlines())


@pytest.mark.parametrize(
    "value", ["text", None, [1.0], torch.ones(2), 10**400, {"of": "classes"}], ids=str
)
def test_a_score_that_is_no_number_is_refused_by_its_name(tmp_path, value):
    log = log_of(tmp_path / "run", 1)
    with pytest.raises(SettingError, match=r"accuracy=.* is not a number; log one number"):
        log.scores(accuracy=value)
    log.scores(accuracy=torch.tensor([0.5]))
    assert {"accuracy": 0.5} == history_of(tmp_path / "run").rows[-1]["metrics"]


@pytest.mark.parametrize("name", ["x" * 300, "nul\0"])
def test_a_name_that_no_folder_can_have_is_refused(tmp_path, name):
    with pytest.raises(SettingError, match="is no folder"):
        bb.RunLog(tmp_path / name)


def test_a_refused_state_leaves_the_rows_of_its_folder_and_the_training_ends(tmp_path):
    saved = loop(tmp_path / "run")
    steps = len(trained(saved, 2))
    state = saved.state_dict()
    steps += len(trained(saved, 3))
    saved.run_log.close()
    other = loop(tmp_path / "run", samples=40)
    with pytest.raises(StateError, match="has 40 samples, the saved one had 96"):
        other.load_state_dict(state)
    for act in (other.state_dict, lambda: next(iter(other))):
        with pytest.raises(StateError, match="was refused, and is loaded in part; build"):
            act()
    assert [*range(1, steps + 1)] == steps_in(tmp_path / "run")


def test_rows_that_are_missing_before_a_resumption_are_said(tmp_path):
    log_of(tmp_path / "run", 2).close()
    log = bb.RunLog(tmp_path / "run")
    log.load_state_dict({"step": 4, "samples": 128})
    with pytest.warns(UserWarning, match="ends at step 2 .* after step 4; the rows between are mi"):
        log.step(MEASURED, optimizer=optimizer())
    assert [1, 2, 5] == steps_in(tmp_path / "run")


def test_a_damaged_row_is_not_continued(tmp_path):
    log_of(tmp_path / "run", 2).close()
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_bytes(b"nonsense\n" + metrics.read_bytes())
    log = bb.RunLog(tmp_path / "run")
    log.load_state_dict({"step": 2, "samples": 64})
    with pytest.raises(RunError, match="line 1 is damaged"):
        log.step(MEASURED, optimizer=optimizer())


# errors of the disk


def fill_the_disk(file):
    """Every write to the file fails with "no space left on device"."""
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/full")


@NEEDS_FULL
def test_rows_that_a_full_disk_refused_are_written_in_order_as_soon_as_there_is_room(tmp_path):
    log = log_of(tmp_path / "run", 1)
    before = log.metrics.read_bytes()
    fill_the_disk(log.metrics)
    with pytest.warns(UserWarning, match="metrics are not being written .*training continues"):
        log.step(MEASURED, optimizer=optimizer())
    with warnings.catch_warnings(action="error"):  # said once
        log.scores(accuracy=0.5)
        assert not log.flush()
    log.metrics.unlink()
    log.metrics.write_bytes(before)
    log.step(MEASURED, optimizer=optimizer())
    assert [1, 2, 3] == steps_in(tmp_path / "run")
    assert {"accuracy": 0.5} == history_of(tmp_path / "run").rows[1]["metrics"]
    assert not log.write_errors


def test_a_folder_that_cannot_be_written_is_said_before_the_first_step(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written: Not a directory"):
        trained(loop(tmp_path / "file" / "run"), 1)


# TensorBoard


def events_of(path, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged = EventAccumulator(str(path / "events")).Reload().Scalars(name)
    return [(event.step, round(event.value, 3)) for event in logged]


def test_tensorboard_gets_the_same_steps_and_each_once(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(time, "time", lambda: 1)  # files sort by it
    log = log_of(tmp_path / "run", 3, tensorboard=True)
    log.scores(accuracy=0.5)
    log.close()
    monkeypatch.setattr(time, "time", lambda: 2)
    log.load_state_dict({"step": 2, "samples": 64})
    log.step(MEASURED, optimizer=optimizer(0.2))
    log.close()
    assert [(1, 0.1), (2, 0.1), (3, 0.2)] == events_of(tmp_path / "run", "lr")
    assert [(1, 64.0), (2, 64.0), (3, 64.0)] == events_of(tmp_path / "run", "noise_scale")


def test_events_that_cannot_be_written_are_said_once_and_training_continues(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events").write_text("no folder")
    with pytest.warns(UserWarning, match="TensorBoard events are not being written"):
        log = log_of(tmp_path / "run", 1, tensorboard=True)
    with warnings.catch_warnings(action="error"):
        log.step(MEASURED, optimizer=optimizer())
    assert [1, 2] == steps_in(tmp_path / "run")
    assert ["events"] == list(log.write_errors)


@NEEDS_FULL
def test_events_on_a_full_disk_are_one_warning_and_no_traceback_of_a_thread(tmp_path, capfd):
    pytest.importorskip("tensorboard")
    log = log_of(tmp_path / "run", 1, tensorboard=True)
    (file,) = (tmp_path / "run" / "events").iterdir()
    file.unlink()
    file.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="TensorBoard events are not being written .*No space"):
        log.step(MEASURED, optimizer=optimizer())
    log.close()
    assert ("", "") == capfd.readouterr()


# ranks


def on_ranks(rank, ranks, path, steps, state=None):
    """Trains on the rank's share; returns what the loop says, and its state."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(network())
    data = TensorDataset(torch.randn(96, 5)[rank::ranks], torch.randint(0, 3, (96,))[rank::ranks])
    log = bb.RunLog(path / f"rank{rank}" if path.name == "each" else path, tensorboard=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = bb.AdaptiveBatch(
        model, optimizer, DataLoader(data, 8), policy=bb.SimiGrad(0.2), every=1, log=log
    )
    if state is not None:
        train.load_state_dict(state[rank])
    try:
        trained(train, steps)
    except RunError as error:
        return str(error), None
    train.log(accuracy=float(rank))
    log.close()
    return "", train.state_dict()


def test_rank_0_alone_writes_and_the_log_continues(ranks, tmp_path):
    path = tmp_path / "run"
    states = [state for _, state in ranks(2)(on_ranks, path, 2)]
    assert [1, 2] == steps_in(path)
    assert {"accuracy": 0.0} == history_of(path).rows[1]["metrics"]
    assert 2 == history_of(path).settings["world_size"]
    refusals = [text for text, _ in ranks(2)(on_ranks, path, 2)]  # on both, so that none waits
    assert "load the checkpoint" in refusals[0]
    assert "rank 0 cannot write the log" in refusals[1]
    ranks(2)(on_ranks, path, 2, states)
    assert [1, 2, 3, 4] == steps_in(path)


def measured_on_ranks(rank, ranks, path):
    log_of(path, 2).scores(accuracy=rank)


def test_a_loop_that_measures_writes_on_rank_0_alone(ranks, tmp_path):
    ranks(2)(measured_on_ranks, tmp_path / "run")
    assert [1, 2] == steps_in(tmp_path / "run")
    assert {"accuracy": 0.0} == history_of(tmp_path / "run").rows[1]["metrics"]


def on_one_rank(rank, ranks, path):
    """The log is given on rank 0 alone; what is said."""
    model = torch.nn.parallel.DistributedDataParallel(network())
    with pytest.raises(RankError, match="the log is None there and given on rank 0"):
        loop(path if rank == 0 else None, model)


def test_a_log_is_given_on_all_ranks(ranks, tmp_path):
    ranks(2)(on_one_rank, tmp_path / "run")


def test_other_ranks_create_nothing(ranks, tmp_path):
    ranks(2)(on_ranks, tmp_path / "each", 1)
    assert ["rank0"] == [path.name for path in (tmp_path / "each").iterdir()]
