"""Runs on disk: atomic, truthful after a kill, and never overwritten."""

import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from bigbatch.errors import RunError
from bigbatch.log.atomic_files import (
    create_directory_atomically,
    release,
    reserve,
    write_atomically,
)
from bigbatch.log.tensorboard import TensorBoardLog
from bigbatch_recipes import RECIPES
from bigbatch_recipes.run_config import config_yaml, read_trainings, trainings_as_dict
from bigbatch_recipes.run_directory import RunDirectory, find_runs
from bigbatch_recipes.study import start_study


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run", {"seed": 1})


def test_settings_and_versions_are_in_the_config(run):
    reopened = RunDirectory.open(run.path)
    assert {"seed": 1} == reopened.settings
    text = (run.path / "config.yaml").read_text()
    assert torch.__version__ in text
    assert "bigbatch:" in text


def test_a_study_has_what_is_common_once_and_gives_all_settings_back(tmp_path):
    trainings = {
        "one": {"recipe": "digits", "arm": "a", "lr": 1.0, "every": 1, "task": {"depth": 2}},
        "two": {"recipe": "digits", "arm": "b", "lr": 1.0, "every": True, "task": {"depth": 2}},
    }
    content = trainings_as_dict(trainings)
    assert {"recipe": "digits", "lr": 1.0, "task": {"depth": 2}} == content["common"]
    for written in (content, {"trainings": trainings}):  # the second is of older code
        (tmp_path / "study.yaml").write_bytes(config_yaml("study", written))
        assert repr(trainings["two"]) == repr(
            {name: read_trainings(tmp_path)["two"][name] for name in trainings["two"]}
        )


def test_a_directory_in_use_is_refused_and_left_alone(run):
    before = sorted(run.path.iterdir())
    with pytest.raises(RunError, match="already in use; nothing was overwritten"):
        RunDirectory.create(run.path, {})
    assert before == sorted(run.path.iterdir())


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(RunError, match=r"no run directory .*nowhere"):
        RunDirectory.open(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["", "kind: [", "just text", "kind: run", "\x00\xff"])
def test_a_foreign_directory_is_refused(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match="cannot be read as a run"):
        RunDirectory.open(tmp_path)


def test_a_newer_schema_is_refused(run):
    config = run.path / "config.yaml"
    config.write_text(config.read_text().replace("schema: 3", "schema: 4"))
    with pytest.raises(RunError, match="schema 3"):
        RunDirectory.open(run.path)


def test_rows_come_back_as_they_were_written(run):
    run.append({"step": 1, "loss": 0.1 + 0.2})
    run.append({"step": 2, "loss": None})
    assert [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "loss": None}] == run.rows()


def test_a_line_torn_by_a_kill_is_left_out(run):
    run.append({"step": 1})
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [{"step": 1}] == run.rows()


def test_a_damaged_line_in_the_middle_is_named(run):
    run.metrics.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(RunError, match="line 2 is damaged"):
        run.rows()


def test_loading_a_checkpoint_cuts_off_the_metrics_past_it(run):
    run.append({"step": 1})
    run.save_checkpoint({"weight": torch.ones(2)})
    run.append({"step": 2})
    with run.metrics.open("a") as file:
        file.write('{"step": 3')
    assert torch.equal(torch.ones(2), run.load_checkpoint()["weight"])
    assert [{"step": 1}] == run.rows()


def test_without_a_checkpoint_the_run_starts_again(run):
    run.append({"step": 1})
    assert run.load_checkpoint() is None
    assert [] == run.rows()


def test_a_damaged_checkpoint_is_named(run):
    (run.path / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.raises(RunError, match=r"not end with a digest.*delete checkpoint.pt to start"):
        run.load_checkpoint()


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    target = tmp_path / "file"
    write_atomically(target, b"old")
    with pytest.raises(TypeError):
        write_atomically(target, "no bytes")
    assert b"old" == target.read_bytes()


def fill_the_disk(run, file):
    """Every write to this file of the run fails with "no space left on device"."""
    (run.path / file).symlink_to("/dev/full")


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@needs_full
def test_a_full_disk_does_not_stop_training(run):
    fill_the_disk(run, "metrics.jsonl")
    with pytest.warns(UserWarning, match="metrics are not being written"):
        run.append({"step": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        run.append({"step": 2})


@needs_full
def test_rows_that_a_full_disk_refused_are_written_in_order_as_soon_as_there_is_room(run):
    fill_the_disk(run, "metrics.jsonl")
    with pytest.warns(UserWarning, match="metrics are not being written"):
        run.append({"step": 1})
    run.append({"step": 2})
    run.metrics.unlink()
    run.append({"step": 3})
    assert [{"step": 1}, {"step": 2}, {"step": 3}] == run.rows()
    run.require_all_written()


@needs_full
def test_no_checkpoint_goes_beyond_the_rows_on_disk(run):
    """Else a resumption would leave out the steps between them."""
    run.save_checkpoint({"step": 0})
    run.metrics.unlink()
    fill_the_disk(run, "metrics.jsonl")
    with pytest.warns(UserWarning, match="metrics are not being written"):
        run.append({"step": 1})
    with pytest.warns(UserWarning, match="checkpoint could not be written"):
        run.save_checkpoint({"step": 1})
    run.metrics.unlink()
    assert {"step": 0} == run.load_checkpoint()
    assert run.save_checkpoint({"step": 1})
    assert [{"step": 1}] == run.rows()


def lose(run, what):
    if what == "metrics":
        fill_the_disk(run, "metrics.jsonl")
        run.append({"step": 1})
    elif what == "checkpoint":
        fill_the_disk(run, ".checkpoint.pt.new")
        run.save_checkpoint({})
    else:
        run.events.touch()
        TensorBoardLog(run, 1)


@needs_full
@pytest.mark.parametrize("lost", ["metrics", "checkpoint", "events"])
def test_what_is_lost_at_the_end_is_an_error_and_what_was_saved_after_all_is_none(run, lost):
    run.require_all_written()
    with pytest.warns(UserWarning, match="written"):
        lose(run, lost)
    with pytest.raises(RunError, match=f"trained to its end, but not all of its {lost} could be"):
        run.require_all_written()
    run.metrics.unlink(missing_ok=True)
    run.save_checkpoint({})
    if lost != "events":
        run.require_all_written()


@pytest.mark.parametrize("lost", ["events", pytest.param("checkpoint", marks=pytest.mark.thorough)])
def test_a_training_that_loses_a_file_at_its_end_has_status_2(bigbatch, tmp_path, lost):
    settings = (
        RECIPES["digits"]
        .settings()
        .with_changes({"policy": "fixed", "batch_size": 64, "epochs": 1, "samples": 128})
    )
    run = RunDirectory.create(tmp_path / "run", settings.as_dict())
    if lost == "checkpoint":
        fill_the_disk(run, ".checkpoint.pt.new")
    else:
        run.events.touch()
    status, _, said = bigbatch("train", "--resume", run.path, "--quiet")
    assert 2 == status
    assert f"{run.path} is trained to its end, but not all of its {lost} could be written" in said
    assert run.rows()[-1]["metrics"]
    assert (run.path / "report.html").exists()
    if lost == "checkpoint":  # there is room again
        assert 0 == bigbatch("train", "--resume", run.path, "--quiet")[0]


def test_a_second_process_is_kept_out_and_a_killed_one_lets_go(run):
    hold = (
        "import sys; from pathlib import Path\n"
        "from bigbatch_recipes.run_directory import RunDirectory\n"
        "with RunDirectory.open(Path(sys.argv[1])).lock():\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "held\n" == holder.stdout.readline()
    with pytest.raises(RunError, match="in use by another process"), run.lock():
        pass
    holder.kill()
    holder.communicate()
    with run.lock():
        pass


def test_reserves_count_on(tmp_path):
    assert tmp_path / "digits-1" == reserve(tmp_path, "digits")
    assert tmp_path / "digits-2" == reserve(tmp_path, "digits")
    release(tmp_path / "digits-1")
    assert tmp_path / "digits-1" == reserve(tmp_path, "digits")


def test_an_empty_directory_is_a_free_place(tmp_path):
    RunDirectory.create(reserve(tmp_path, "digits"), {})
    assert {} == RunDirectory.open(tmp_path / "digits-1").settings
    release(tmp_path / "digits-1")
    assert (tmp_path / "digits-1" / "config.yaml").exists()


def made_while_another_is(path):
    with create_directory_atomically(path) as late:
        (late / "late").touch()
        with create_directory_atomically(path) as early:
            (early / "early").touch()


def test_of_two_that_make_the_same_directory_one_is_refused_and_the_other_whole(tmp_path):
    with pytest.raises(RunError, match="already in use"):
        made_while_another_is(tmp_path / "run")
    assert ["run"] == [path.name for path in tmp_path.iterdir()]
    assert ["early"] == [path.name for path in (tmp_path / "run").iterdir()]


def test_a_folder_that_is_neither_run_nor_study_is_refused(tmp_path):
    with pytest.raises(RunError, match="cannot be read as a run"):
        find_runs(tmp_path)


def test_rows_hold_no_number_that_json_lacks(run):
    with pytest.raises(ValueError, match="JSON compliant"):
        run.append({"loss": float("nan")})


@pytest.mark.parametrize("lost", [1, None], ids=["a byte", "all"])
def test_a_log_shorter_than_its_checkpoint_is_refused(run, lost):
    run.append({"step": 1})
    run.save_checkpoint({})
    run.metrics.write_bytes(run.metrics.read_bytes()[: -lost if lost else 0])
    with pytest.raises(RunError, match="shorter than its checkpoint"):
        run.load_checkpoint()


@needs_full
def test_a_checkpoint_that_does_not_fit_leaves_the_old_one_and_training_continues(run):
    run.save_checkpoint({"step": 1})
    (run.path / ".checkpoint.pt.new").symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="checkpoint could not be written"):
        run.save_checkpoint({"step": 2, "weight": torch.ones(10_000)})
    assert {"step": 1} == run.load_checkpoint()


def test_events_of_a_run_that_began_again_show_each_step_once(run, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = dict.fromkeys(("loss", "similarity", "noise_scale", "metrics"))
    for attempt, steps in ((1, 5), (2, 3)):
        monkeypatch.setattr(time, "time", lambda second=attempt: second)  # files sort by it
        with TensorBoardLog(run, 1) as events:
            for step in range(1, steps + 1):
                events.append({**values, "step": step, "batch_size": attempt, "lr": [0.1]})
    logged = EventAccumulator(str(run.events)).Reload().Scalars("batch_size")
    assert [(1, 2.0), (2, 2.0), (3, 2.0)] == [(event.step, event.value) for event in logged]


def begin_run(path):
    RunDirectory.create(path, {})


def begin_study(path):
    start_study(RECIPES["digits"], path, RECIPES["digits"].settings(), 1)


@pytest.mark.parametrize("begin", [begin_run, begin_study])
@pytest.mark.parametrize("call", ["fcntl.flock", "os.fsync", "os.replace"])
def test_a_kill_while_a_directory_is_made_leaves_its_place_free(tmp_path, monkeypatch, begin, call):
    def kill(*_):
        raise SystemExit

    place = tmp_path / "place"
    with monkeypatch.context() as patch:
        patch.setattr(call, kill)
        with pytest.raises(SystemExit):
            begin(place)
    assert [] == list(tmp_path.iterdir())
    begin(place)
    assert [place] == list(tmp_path.iterdir())


def test_a_study_in_which_nothing_has_begun_is_said(tmp_path):
    start_study(RECIPES["digits"], tmp_path / "study", RECIPES["digits"].settings(), 1)
    with pytest.raises(RunError, match="no run of this study has begun"):
        find_runs(tmp_path / "study")
