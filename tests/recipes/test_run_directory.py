"""Runs on disk: atomic, truthful after a kill, and never overwritten."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bigbatch.errors import RunError, StateError
from bigbatch.log.history import history_of
from bigbatch_recipes.earlier_runs import init_from
from bigbatch_recipes.new_directory import create_directory_atomically, release, reserve
from bigbatch_recipes.recipe_registry import RECIPES
from bigbatch_recipes.run_config import read_study, study_json
from bigbatch_recipes.run_directory import RunDirectory, file_digest, require_digests
from bigbatch_recipes.study import start_study
from made_records import made_record


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run", {"seed": 1})


def add_step(run, step):
    run.log.record(replace(made_record(8), step=step, samples=8 * step))


def steps_of(run):
    return [row["step"] for row in history_of(run.path).rows]


def test_settings_and_versions_are_in_the_settings_file(run):
    reopened = RunDirectory.open(run.path)
    assert {"seed": 1} == reopened.settings
    text = (run.path / "settings.json").read_text()
    assert torch.__version__ in text
    assert '"bigbatch":' in text


def test_a_study_gives_all_settings_back(tmp_path):
    trainings = {
        "one": {"recipe": "digits", "arm": "a", "lr": 1.0, "every": 1, "task": {"depth": 2}},
        "two": {"recipe": "digits", "arm": "b", "lr": 1.0, "every": True, "task": {"depth": 2}},
    }
    (tmp_path / "study.json").write_bytes(study_json(trainings))
    assert repr((trainings, None)) == repr((*read_study(tmp_path),))


def test_a_directory_in_use_is_refused_and_left_alone(run):
    before = sorted(run.path.iterdir())
    with pytest.raises(RunError, match="already in use; nothing was overwritten"):
        RunDirectory.create(run.path, {})
    assert before == sorted(run.path.iterdir())


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(RunError, match=r"no run directory .*nowhere"):
        RunDirectory.open(tmp_path / "nowhere")


def test_loading_a_checkpoint_cuts_off_the_metrics_past_it(run):
    add_step(run, 1)
    run.save_checkpoint({"weight": torch.ones(2)})
    add_step(run, 2)
    with run.log.metrics.open("a") as file:
        file.write('{"step": 3')
    assert torch.equal(torch.ones(2), run.load_checkpoint()["weight"])
    assert [1] == steps_of(run)


def test_without_a_checkpoint_the_run_starts_again(run):
    add_step(run, 1)
    assert run.load_checkpoint() is None
    assert [] == steps_of(run)


def test_a_damaged_checkpoint_is_named(run):
    (run.path / "checkpoint.pt").write_bytes(b"no checkpoint")
    with pytest.raises(RunError, match=r"not end with a digest.*delete checkpoint.pt to start"):
        run.load_checkpoint()


def fill_the_disk(run, file):
    """Every write to this file of the run fails with "no space left on device"."""
    (run.path / file).unlink(missing_ok=True)
    (run.path / file).symlink_to("/dev/full")


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@needs_full
def test_no_checkpoint_goes_beyond_the_rows_on_disk(run):
    """Else a resumption would leave out the steps between them."""
    run.log.open()
    run.save_checkpoint({"step": 0})
    fill_the_disk(run, "metrics.jsonl")
    with pytest.warns(UserWarning, match="metrics are not being written"):
        add_step(run, 1)
    with pytest.warns(UserWarning, match="checkpoint could not be written"):
        run.save_checkpoint({"step": 1})
    run.log.metrics.unlink()
    run.save_checkpoint({"step": 1})
    assert [1] == steps_of(run)
    assert {"step": 1} == run.load_checkpoint()


def lose(run, what):
    if what == "metrics":
        run.log.open()
        fill_the_disk(run, "metrics.jsonl")
        add_step(run, 1)
    elif what == "checkpoint":
        fill_the_disk(run, ".checkpoint.pt.new")
        run.save_checkpoint({})
    else:
        (run.path / "events").touch()
        add_step(run, 1)


@needs_full
@pytest.mark.parametrize("lost", ["metrics", "checkpoint", "events"])
def test_what_is_lost_at_the_end_is_an_error_and_what_was_saved_after_all_is_none(run, lost):
    run.require_all_written()
    with pytest.warns(UserWarning, match="written"):
        lose(run, lost)
    with pytest.raises(RunError, match=f"trained to its end, but not all of its {lost} could be"):
        run.require_all_written()
    run.log.metrics.unlink(missing_ok=True)
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
        (run.path / "events").touch()
    status, _, said = bigbatch("train", "--resume", run.path, "--quiet")
    assert 2 == status
    assert f"{run.path} is trained to its end, but not all of its {lost} could be written" in said
    assert history_of(run.path).rows[-1]["metrics"]
    assert (run.path / "report.html").exists()
    if lost == "checkpoint":  # there is room again
        assert 0 == bigbatch("train", "--resume", run.path, "--quiet")[0]


DELETING = """
import os, bigbatch as bb
class Deleting:
    def decide(self, statistics, state):
        if state.steps == {step}:
            {damage}
        return bb.Decision(64, "fixed")
"""


@pytest.mark.parametrize("step", [6, 20])
@pytest.mark.parametrize("damage", ["os.remove(file)", "os.truncate(file, 999)"])
def test_a_training_whose_rows_another_program_deletes_has_status_2(
    bigbatch, tmp_path, damage, step
):
    run, policy = tmp_path / "run", tmp_path / "deleting.py"
    damage = damage.replace("file", repr(str(run / "metrics.jsonl")))
    policy.write_text(DELETING.format(step=step, damage=damage))
    command = ("--epochs", 1, "--every", 1, "--batch-size", 64, "--run-dir", run, "--quiet")
    status, _, said = bigbatch("train", "digits", "--policy", f"{policy}:Deleting", *command)
    steps = [row["step"] for row in history_of(run).rows]
    assert 2 == status
    assert f"{run}/metrics.jsonl has rows of {len(steps)} of the 21 steps: another program" in said
    assert 21 == steps[-1] > len(steps)
    status, shown, _ = bigbatch("train", "--resume", run, "--quiet")
    assert 0 == status
    assert f"(rows of {len(steps)} of 21 steps)" in " ".join(shown.split())


def test_a_second_process_is_kept_out_and_a_killed_one_lets_go(run):
    hold = (
        "import sys; from pathlib import Path\n"
        "from bigbatch_recipes.run_directory import RunDirectory\n"
        "run = RunDirectory.open(Path(sys.argv[1])); run.load_checkpoint()\n"
        "print('held', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "held\n" == holder.stdout.readline()
    with pytest.raises(RunError, match="in use by another process"):
        run.load_checkpoint()
    holder.kill()
    holder.communicate()
    run.load_checkpoint()


def test_reserves_count_on(tmp_path):
    assert tmp_path / "digits-1" == reserve(tmp_path, "digits")
    assert tmp_path / "digits-2" == reserve(tmp_path, "digits")
    release(tmp_path / "digits-1")
    assert tmp_path / "digits-1" == reserve(tmp_path, "digits")


def test_an_empty_directory_is_a_free_place(tmp_path):
    RunDirectory.create(reserve(tmp_path, "digits"), {})
    assert {} == RunDirectory.open(tmp_path / "digits-1").settings
    release(tmp_path / "digits-1")
    assert (tmp_path / "digits-1" / "settings.json").exists()


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


@needs_full
def test_a_checkpoint_that_does_not_fit_leaves_the_old_one_and_training_continues(run):
    run.save_checkpoint({"step": 1})
    (run.path / ".checkpoint.pt.new").symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="checkpoint could not be written"):
        run.save_checkpoint({"step": 2, "weight": torch.ones(10_000)})
    assert {"step": 1} == run.load_checkpoint()


def begin_run(path):
    RunDirectory.create(path, {})


def begin_study(path):
    start_study(RECIPES["digits"], path, RECIPES["digits"].settings(), 1)


@pytest.mark.parametrize("begin", [begin_run, begin_study])
@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
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


@pytest.fixture
def saved(run):
    add_step(run, 1)
    run.save_checkpoint({"model": {"weight": torch.ones(10_000)}})
    return run


def flip_one_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 64
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_neither_gone_on_with_nor_begun_from(saved):
    model = torch.nn.Linear(10_000, 1, bias=False)
    before = model.weight.clone()
    flip_one_bit(saved.path / "checkpoint.pt")
    for read in (saved.load_checkpoint, saved.load_weights, lambda: init_from(saved.path, model)):
        with pytest.raises(RunError, match=r"checkpoint.pt is damaged: .* restore it from a copy"):
            read()
    assert torch.equal(before, model.weight)
    assert [1] == steps_of(saved)


def test_a_folder_is_as_it_was_where_each_of_its_files_is(tmp_path):
    file = tmp_path / "inside" / "rank0.pt"
    file.parent.mkdir()
    file.write_bytes(bytes(range(256)) * 5000)
    saved_with_it = {"inside/rank0.pt": file_digest(file)}
    (tmp_path / "new").touch()
    require_digests(tmp_path, saved_with_it)
    flip_one_bit(file)
    with pytest.raises(StateError, match=r"rank0.pt is damaged"):
        require_digests(tmp_path, saved_with_it)
    file.unlink()
    with pytest.raises(StateError, match=r"rank0.pt is gone"):
        require_digests(tmp_path, saved_with_it)


@pytest.mark.parametrize("what", ["damaged", "gone"])
def test_a_text_that_a_run_needs_is_not_read_where_it_is_another(saved, what):
    """Another vocabulary would make other numbers of the same text."""
    saved.save_texts({"vocab.txt": "the\nof\n"})
    saved.save_checkpoint({"model": {}})
    assert {} == saved.load_weights()
    if what == "gone":
        (saved.path / "vocab.txt").unlink()
    else:
        (saved.path / "vocab.txt").write_text("the\nor\n")
    for read in (saved.load_checkpoint, saved.load_weights):
        with pytest.raises(RunError, match=f"vocab.txt is {what}.* restore it from a copy"):
            read()


def test_a_checkpoint_without_weights_is_nothing_to_begin_from(saved):
    saved.save_checkpoint({"optimizer": {}})
    with pytest.raises(RunError, match="has no weights"):
        saved.load_weights()


COMMAND = "from bigbatch.cli import main; main()"
ON_A_SMALL_DISK = (
    f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)); {COMMAND}"
)
SHORT_TRAINING = [
    "digits",
    "--policy",
    "fixed",
    "--batch-size",
    "64",
    "--epochs",
    "3",
    "--checkpoint-every",
    "20 steps",
    "--quiet",
]


def started(code, *arguments, **options):
    command = [sys.executable, "-c", code, "train", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.release
def test_a_disk_that_fills_up_stops_neither_training_nor_a_resumption(tmp_path):
    """No file may be longer than 6,000 bytes: nothing else fails of itself on a full disk."""
    run = tmp_path / "run"
    training = started(ON_A_SMALL_DISK, *SHORT_TRAINING, "--run-dir", run)
    _, said = training.communicate(timeout=120)
    for lost in ("metrics are not", "TensorBoard events are not", "the checkpoint could not"):
        assert 1 == said.count(f"bigbatch: note: {lost} be")
    assert 2 == training.returncode
    assert "report.html cannot be written: File too large" in said  # the training is over
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert list(range(1, len(rows) + 1)) == [row["step"] for row in rows]  # no half line
    again = started(COMMAND, "--resume", run, "--quiet")
    _, said = again.communicate(timeout=120)
    assert 0 == again.returncode, said


@pytest.mark.release
def test_a_run_that_is_terminated_continues_from_its_checkpoint(tmp_path):
    """SIGTERM, as before a preemption, is a kill: what stands on disk is whole at any moment."""
    whole, ended = tmp_path / "whole", tmp_path / "ended"
    length = [*SHORT_TRAINING[:4], "20", *SHORT_TRAINING[5:]]
    first = started(COMMAND, *length, "--run-dir", whole)
    training = started(COMMAND, *length, "--run-dir", ended)
    while training.poll() is None and not (ended / "checkpoint.pt").exists():
        time.sleep(0.01)
    training.terminate()
    training.communicate(timeout=120)
    assert -15 == training.returncode
    again = started(COMMAND, "--resume", ended, "--quiet")
    assert 0 == again.wait(timeout=120)
    assert 0 == first.wait(timeout=120)
    rows = [
        [{**json.loads(line), "elapsed_seconds": 0} for line in (run / "metrics.jsonl").open()]
        for run in (whole, ended)
    ]
    assert rows[0] == rows[1]
