"""The command: one line for what is wrong, exit status 2, nothing overwritten, no traceback."""

import json
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from bigbatch.cli import main
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.recipe_registry import RECIPES
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.settings import HELP, SECTIONS, SETTING_TYPES

COMMAND = [sys.executable, "-c", "from bigbatch.cli import main; main()"]
QUICK = ("--epochs", "1", "--quiet")
SHORT = ("--epochs", "1", "--set", "samples=256")

WRONG = [
    (["train", "nonsense"], "recipe 'nonsense' is unknown; choose one of: digits"),
    (["train", "--bogus"], "unrecognized arguments: --bogus"),
    (["train", "--policy", "magic"], "policy 'magic' is unknown; choose one of: fixed, simigrad"),
    (["train", "--optimizer", "magic"], "optimizer 'magic' is unknown; choose one of: sgd,"),
    (["train", "--target", "1.5"], "target=1.5 must be a number in (-1, 1)"),
    (["train", "--target", "-1"], "target=-1.0 must be a number in (-1, 1)"),
    (["train", "--target", "high"], "target='high' must be a number in (-1, 1)"),
    (["train", "--min-batch", "512", "--max-batch", "256"], "min_batch=512 exceeds max_batch=256"),
    (["train", "--max-batch", "2"], "max_batch=2"),
    (["train", "--batch-size", "0"], "batch_size=0 must be a whole number of at least 1"),
    (["train", "--virtual-ranks", "0"], "virtual_ranks=0 must be a whole number of at least 1"),
    (["train", "--epochs", "0"], "epochs=0 must be a whole number of at least 1"),
    (["train", "--gamma", "0", "--optimizer", "vr-sgd"], "gamma=0.0 must be a number in (0, 1]"),
    (
        ["train", "--gamma", "0.5"],
        "gamma has no effect with policy=simigrad and optimizer=momentum",
    ),
    (["train", "--policy", "fixed", "--target", "0"], "target has no effect with policy=fixed"),
    (
        ["train", "--policy", "schedule", "--batch-schedule", "64", "--dead-band", "0.1"],
        "dead_band has no effect with policy=schedule",
    ),
    (
        ["train", "--policy", "schedule", "--batch-schedule", "64", "--batch-size", "32"],
        "batch_size has no effect with policy=schedule",
    ),
    (["train", "--policy", "schedule"], "policy=schedule needs batch_schedule"),
    (["train", "--policy", "simigrad:0.4"], "policy='simigrad:0.4' has arguments"),
    (["train", "--smoothing", "4000"], 'such as "16 steps" or "4K samples" or "4M tokens"'),
    (["train", "--smoothing", "4000"], '"auto"'),
    (["train", "--warmup", "1.5 epochs"], "warmup='1.5 epochs' must be text such as"),
    (["train", "--checkpoint-every", "0 steps"], "checkpoint_every='0 steps' must be text such"),
    (["train", "--seed", "4294967296"], "seed=4294967296 must be a whole number"),
    (["train", "--seed", "1", "--set", "gamma=0.5"], "gamma has no effect with policy=simigrad"),
    (["train", "--optimizer", "adam", "--set", "momentum=0.5"], "momentum has no effect with"),
    (["train", "--arm", "fixed-32", "--set", "target=0.5"], "target has no effect with policy="),
    (["train", "--arm", "fixed-32", "--target", ".3"], "target has no effect with policy=fixed"),
    (["train", "--optimizer", "sgd", "--beta3", "0.5"], "beta3 has no effect with"),
    (["train", "--set", "policy=fixed", "--target", ".3"], "target has no effect with"),
    (
        ["train", "--optimizer", "sgd", "--r-max", "2"],
        "r_max has no effect with policy=simigrad and optimizer=sgd",
    ),
    (["train", "--set", "arm=simigrad"], "--set cannot change 'arm': give --arm"),
    (["train", "--set", "recipe=squad"], "--set cannot change 'recipe': it is the command's first"),
    (["train", "--set", "seed=3"], "--set cannot change 'seed': give --seed, or --seeds"),
    (["sweep", "--set", "data=x"], "--set cannot change 'data': give --data"),
    (["train", "--set", "optimizer=magic"], "optimizer 'magic' is unknown"),
    (["train", "--set", "target=1.5"], "target=1.5 must be a number in (-1, 1)"),
    (["train", "--set", "init_from=nowhere"], "there is no run directory /"),
    (
        ["sweep", "--set", "lr_control_from=nowhere", "--grid", "lr=1"],
        "there is no run directory /",
    ),
    (["train", "--lr", "nan"], "lr=nan must be a number"),
    (["train", "--lr", "-1"], "lr=-1.0 must be a number in [0, 3.4e38]"),
    (["train", "--seed", "-1"], "seed=-1 must be a whole number in [0,"),
    (["train", "--runs-dir", "/dev/null"], "/dev/null"),
    (["train", "--target", "0.1", "--run-dir", "/dev/null/run"], "/dev/null"),
    (["train", "--data", "nowhere"], "there is no data folder nowhere"),
    (["train", "--data", "."], "recipe 'digits' brings its own data"),
    (["train", "--resume", "nowhere"], "there is no run directory nowhere"),
    (["train", "--resume", "."], "cannot be read as the settings of a log"),
    (["train", "--resume", "x", "--target", "0.1"], "--resume does not go together with --target"),
    (
        ["train", "--target", "0.1", "--seeds", "2"],
        "--target, of a single training, does not go together",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: " ".join(value))
def test_a_mistake_is_one_line_and_writes_nothing(
    bigbatch, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    status, out, err = bigbatch(*arguments)
    assert 2 == status
    assert "" == out
    assert message in err
    assert err.startswith("bigbatch: ")
    assert 1 == err.count("\n")
    assert [] == list(tmp_path.iterdir())


def test_an_output_directory_in_use_is_left_alone(bigbatch, tmp_path):
    (tmp_path / "mine").write_text("precious")
    for extra in ([], ["--target", "0.5"]):
        status, _, err = bigbatch("train", "--run-dir", tmp_path / "mine", *extra)
        assert (2, 1) == (status, err.count("\n"))
        assert "already in use; nothing was overwritten" in err
        assert "--resume" not in err
        assert "precious" == (tmp_path / "mine").read_text()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("settings.json", '{"schema": 3, "settings": {"recipe": 5}}', "are missing"),
        ("settings.json", '{"schema": 3, "settings": {"wings": 2}}', "unknown settings ['wings']"),
        ("study.json", '{"schema": 3, "trainings": {}, "sweep": null}', "lists no trainings"),
        ("study.json", '{"schema": 3, "trainings": [1], "sweep": null}', "lists no trainings"),
        ("study.json", '{"schema": 2, "trainings": {}, "sweep": null}', "is of schema 2, and 3 is"),
        ("study.json", '{"schema": 3, "settings": {}}', "cannot be read as a study of bigbatch"),
    ],
)
def test_a_damaged_config_is_one_line(bigbatch, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    status, _, err = bigbatch("train", "--resume", tmp_path)
    assert (2, 1) == (status, err.count("\n"))
    assert message in err


def test_an_argument_that_is_no_text_is_one_line(bigbatch):
    status, _, err = bigbatch("train", "digits", "\udcff")
    assert (2, 1) == (status, err.count("\n"))
    assert "\\udcff" in err


def test_help_teaches_by_example(bigbatch):
    status, out, _ = bigbatch("train", "--help")
    assert 0 == status
    assert "bigbatch train --resume runs/digits-1" in out


@pytest.mark.parametrize("name", ["list", "train", "sweep"])
def test_the_list_says_of_each_command_what_its_own_help_says(bigbatch, name):
    status, out, _ = bigbatch(name, "--help")
    assert 0 == status
    assert f"bigbatch {name} " in out
    (line,) = [line for line in bigbatch("--help")[1].splitlines() if line.startswith(f"  {name} ")]
    assert line.removeprefix(f"  {name}").strip() in " ".join(out.split())


@pytest.mark.parametrize("name", ["list", "train", "sweep"])
def test_no_line_of_help_but_of_many_choices_is_wider_than_a_terminal(bigbatch, name):
    _, out, _ = bigbatch(name, "--help")
    assert [] == [line for line in out.splitlines() if len(line) > 80 and "|" not in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One finished training of one epoch."""
    out = tmp_path_factory.mktemp("runs") / "one"
    settings = ["train", "--optimizer", "vr-momentum", *QUICK, "--run-dir", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bigbatch", *settings])
        with pytest.raises(SystemExit) as ending:
            main()
    assert 0 == ending.value.code
    return out


def test_a_training_leaves_a_whole_run_directory(trained):
    names = {path.name for path in trained.iterdir()}
    assert {"settings.json", "metrics.jsonl", "checkpoint.pt", "events", "report.html"} <= names
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert list(range(1, len(rows) + 1)) == [row["step"] for row in rows]
    assert sum(row["batch_size"] for row in rows) == rows[-1]["samples"] == 1347
    assert rows[-1]["metrics"] is not None
    for row in rows:
        assert 3 == row["schema"]
        assert 16 <= row["batch_size"] <= 512
        assert row["decision_reason"]


def test_tensorboard_reads_the_events(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trained / "events")).Reload()
    logged = [scalar.value for scalar in events.Scalars("batch_size")]
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [row["batch_size"] for row in rows] == logged


def test_a_finished_run_is_resumed_to_the_same_table(bigbatch, trained):
    before = (trained / "metrics.jsonl").read_bytes()
    status, out, _ = bigbatch("train", "--resume", trained, "--quiet")
    assert 0 == status
    assert "accuracy" in out
    assert before == (trained / "metrics.jsonl").read_bytes()


def test_every_setting_of_the_command_is_that_of_the_run(bigbatch, tmp_path):
    settings = {
        "target": 0.5,
        "min_batch": 24,
        "max_batch": 256,
        "batch_size": 48,
        "smoothing": "500 samples",
        "dead_band": 0.2,
        "warmup": "200 samples",
        "max_change": "auto",
        "every": 3,
        "min_micro_batches": 12,
        "fixed_micro_batch": True,
        "micro_batch": 4,
        "virtual_ranks": 6,
        "optimizer": "vr-sgd",
        "lr": 0.03,
        "lr_scaling": "linear",
        "gamma": 0.3,
        "r_max": 1.5,
        "beta3": 0.5,
        "epochs": 1,
        "seed": 3,
        "checkpoint_every": "7 steps",
    }
    given = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    given += ["--set=samples=256"]
    assert 0 == bigbatch("train", *given, "--run-dir", tmp_path / "run", "--quiet")[0]
    assert settings.items() <= RunDirectory.open(tmp_path / "run").settings.items()


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_every_setting_is_an_option_with_a_sentence(bigbatch, command):
    _, out, _ = bigbatch(command, "--help")
    for name in SETTING_TYPES.keys() - {"recipe", "arm", "seed", "data", "task"}:
        assert f"  --{name.replace('_', '-')} " in out
        assert "".join(HELP[name].split()) in "".join(out.split())


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_the_option_of_a_setting_stands_under_the_heading_of_its_section(bigbatch, command):
    _, out, _ = bigbatch(command, "--help")
    heading, found = "", {}
    for line in out.splitlines():
        if re.fullmatch(r"\S.*:", line):
            assert line[:-1] not in found.values()
            heading = line[:-1]
        elif match := re.match(r"  --([a-z0-9-]+)", line):
            found[match[1].replace("-", "_")] = heading
    for name in SECTIONS.keys() - {"recipe", "arm", "seed", "data", "task"}:
        assert SECTIONS[name] == found[name]
    assert "options" == found["dry_run"]


def test_what_is_set_changes_an_arm_that_is_trained_alone(bigbatch, tmp_path):
    own = ("--arm=noise-scale", "--set=dead_band=0.3", "--set=samples=64", "--epochs=1")
    status, _, err = bigbatch("train", *own, "--run-dir", tmp_path / "run", "--quiet")
    assert (0, "") == (status, err)
    settings = RunDirectory.open(tmp_path / "run").settings
    assert (0.3, "4K samples") == (settings["dead_band"], settings["smoothing"])


@pytest.mark.thorough
def test_what_the_arms_of_a_study_have_of_their_own_is_said(bigbatch, tmp_path, monkeypatch):
    arms = {
        "one": {"policy": "fixed", "batch_size": 64},
        "two": {"policy": "fixed", "batch_size": 64, "lr": 0.1},
    }
    monkeypatch.setitem(RECIPES, "digits", replace(DIGITS, arms=arms))
    own = ("--set=lr=0.5", "--set=samples=64", "--epochs=1", "--seeds=1")
    status, _, err = bigbatch("train", *own, "--run-dir", tmp_path / "study", "--quiet")
    assert 0 == status
    assert "bigbatch: note: two: lr stays the arm's own; --arm trains one alone with it\n" == err


def test_an_arm_alone_that_needs_another_says_how_to_name_its_run(bigbatch, tmp_path, monkeypatch):
    arms = {"one": {}, "two": {"init_from": "one"}}
    monkeypatch.setitem(RECIPES, "digits", replace(DIGITS, arms=arms))
    monkeypatch.chdir(tmp_path)
    status, _, err = bigbatch("train", "--arm", "two")
    assert (2, 1) == (status, err.count("\n"))
    assert "init_from of arm two is arm one; name a run of it by --init-from" in err
    assert [] == list(tmp_path.iterdir())


def test_a_file_that_a_library_cannot_read_is_named_as_it_says(bigbatch, tmp_path, monkeypatch):
    def data(settings):
        raise OSError("cannot identify image file 'cat.jpg'")

    monkeypatch.setitem(RECIPES, "digits", replace(DIGITS, data=data))
    status, _, err = bigbatch("train", "--seed=0", "--run-dir", tmp_path / "run")
    assert (2, "bigbatch: OSError: cannot identify image file 'cat.jpg'\n") == (status, err)


def test_plain_lines_are_printed_where_there_is_no_terminal(bigbatch, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    options = ("--target", "0.5", *SHORT)
    status, out, _ = bigbatch("train", *options, "--run-dir", tmp_path / "run")
    assert 0 == status
    for word in ("batch", "similarity", "target 0.5", "noise scale", "lr", "loss", "samples/s"):
        assert word in out
    assert "  100 %  " in out
    assert "\r" not in out
    quiet = bigbatch("train", *options, "--quiet", "--run-dir", tmp_path / "quiet")[1]
    assert "samples/s" not in quiet


STEERING = "\x1b[31mred\x9b\u202eevil\nline\udcff"


def test_names_are_long_of_the_home_and_steer_no_terminal(bigbatch, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    options = ("--policy", "fixed", "--batch-size", 64, *SHORT)
    for name in ("n" * 250, "~/run", STEERING):
        status, out, err = bigbatch("train", *options, "--run-dir", name)
        assert (0, "") == (status, err)
        assert r"\x1b[31mred\x9b\u202eevil" in out or name != STEERING
        assert all(letter.isprintable() for letter in out.replace("\n", ""))
    assert {"n" * 250, "home", STEERING} == {path.name for path in tmp_path.iterdir()}
    assert "\x1b" not in (tmp_path / STEERING / "report.html").read_text()
    assert 0 == bigbatch("report", "~/run", "-o", "o" * 250 + ".svg")[0]
    for name, message in (("n" * 256, "File name too long; give a shorter one"), ("\x1b", r"\x1b")):
        status, _, err = bigbatch("train", "--resume", name)
        assert (2, 1, True) == (status, err.count("\n"), message in err)
        assert "\x1b" not in err


KILLING = """
import multiprocessing, signal, os, bigbatch as bb
class Killing:
    def decide(self, statistics, state):
        if state.steps == 3:
            for worker in multiprocessing.active_children():
                os.kill(worker.pid, signal.SIGKILL)
        return bb.Decision(64, "fixed")
"""


def test_a_worker_that_is_killed_is_one_line_that_says_how_to_continue(tmp_path):
    (tmp_path / "killing.py").write_text(KILLING)
    policy = ("--policy", f"{tmp_path}/killing.py:Killing", "--batch-size", "64", "--every", "1")
    options = (*policy, "--workers", "1", "--checkpoint-every", "1 steps", *QUICK)
    command = [*COMMAND, "train", "digits", *options, "--run-dir", tmp_path / "run"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (2, 1) == (ended.returncode, ended.stderr.count("bigbatch: a worker"))
    assert "Traceback" not in ended.stderr
    assert f"`bigbatch train --resume {tmp_path / 'run'}` continues" in ended.stderr


def interrupted(begun, *options):
    """Status and standard error of a training that gets Ctrl-C once it has begun."""
    process = subprocess.Popen(
        [*COMMAND, "train", *options],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it after &
    )
    while process.poll() is None and not begun():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


@pytest.mark.thorough
def test_ctrl_c_says_how_to_continue_and_is_no_success(tmp_path):
    run = tmp_path / "run"
    begun = (run / "metrics.jsonl").exists
    status, err = interrupted(begun, "--target", "0.5", "--run-dir", str(run))
    assert (130, 1) == (status, err.count("\n"))
    assert f"bigbatch train --resume {run}" in err


@pytest.mark.thorough
def test_ctrl_c_in_what_cannot_continue_says_only_that(tmp_path):
    options = ["linear-regression", "--run-dir", str(tmp_path / "run")]
    status, err = interrupted(lambda: list(tmp_path.iterdir()), *options)
    assert 130 == status
    assert err.endswith("bigbatch: interrupted\n")
    assert "--resume" not in err
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("optimizer", [pytest.param("lars", marks=pytest.mark.thorough), "vr-lamb"])
def test_every_optimizer_trains_and_a_scaled_one_logs_r_by_layer(bigbatch, tmp_path, optimizer):
    place = tmp_path / "run"
    options = ["--optimizer", optimizer, *SHORT, "--run-dir", place, "--quiet"]
    assert 0 == bigbatch("train", "digits", *options)[0]
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    logged = [row.get("gsnr") for row in rows]
    if optimizer == "lars":
        assert [None] * len(rows) == logged
    else:
        assert all(0.1 <= mean <= 1 for row in logged for mean, *_ in row.values())
        assert {"0.weight", "9.bias"} <= set(logged[0])
