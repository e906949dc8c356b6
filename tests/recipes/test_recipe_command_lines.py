"""The commands of recipes before, around and after their work: help, Ctrl-C, brackets, refusals."""

import re
import signal
import subprocess
import sys
from itertools import combinations

import pytest

from bigbatch_recipes.run_config import study_json
from log_rows import row, write_log
from torchrun import said, torchrun

# interrupts itself where a module is looked up for the first time
AT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from bigbatch.cli import main
main()
"""

AT_REPORT = """
import os, signal, sys
def interrupt(event, arguments):
    if event == "open" and str(arguments[0]).endswith("report.html.new"):
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
from bigbatch.cli import main
main()
"""


def command(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # shells ignore it after &
    )


WITHOUT_TORCH = [
    (["list"], 0),
    *((["list", name], 0) for name in ("squad", "cifar10-resnet56", "linear-regression")),
    (["list", "nope"], 2),
    (["train", "--help"], 0),
    *(([command, "--nope"], 2) for command in ("list", "train", "sweep")),
    *(([command, "nope"], 2) for command in ("train", "sweep")),
    *(([command, "fashion-mnist", "--data", "nowhere"], 2) for command in ("train", "sweep")),
    *(([command, "digits", "--set", "nope=1"], 2) for command in ("train", "sweep")),
    *(([command, "--resume", "nowhere"], 2) for command in ("train", "sweep")),
    (["train", "imagenet-resnet50"], 2),
    (["train", "--arm", "nope"], 2),
    (["train", "--target", "2"], 2),
    (["train", "--policy", "fixed", "--target", ".2"], 2),
    (["train", "--dry-run-ranks", "2"], 2),
    (["sweep", "digits", "--grid", "nope=1,2"], 2),
    (["sweep", "digits", "--grid", "lr=fast"], 2),
    *(([command, "digits", "--run-dir", "/"], 2) for command in ("train", "sweep")),
]
LOADED = """
import sys
from bigbatch.cli import main
for text in sys.argv[1:]:
    sys.argv = ["bigbatch", *text.split()]
    try:
        main()
    except SystemExit as ending:
        print("ended", ending.code, *sys.modules)
"""


def test_lists_and_refusals_import_no_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = command(LOADED, *(" ".join(arguments) for arguments, _ in WITHOUT_TORCH))
    lines = [line.split() for line in ended.stdout.splitlines() if line.startswith("ended ")]
    slow = {"torch", "matplotlib", "pandas", "sklearn", "joblib", "scipy"}
    found = [(int(status), slow & {*modules}) for _, status, *modules in lines]
    assert [(status, set()) for _, status in WITHOUT_TORCH] == found
    assert [] == list(tmp_path.iterdir())


DRY_RUNS = [
    *(["train", "--dry-run", *more] for more in (["--seeds", "2"], ["--runs-dir", "runs"])),
    *(["train", "--dry-run", *more] for more in (["--run-dir", "new"], ["--quiet"])),
    ["train", "--dry-run", "--set", "epochs=1", "--arm", "simigrad"],
    ["train", "linear-regression", "--dry-run", "--seeds", "2"],
    ["train", "imagenet-resnet50", "--dry-run", "--data", "images"],
    ["train", "--dry-run", "--resume", "study"],
    ["train", "--dry-run", "--resume", "study/one"],
    ["sweep", "digits", "--dry-run", "--runs-dir", "runs", "--jobs", "1", "--quiet"],
    ["sweep", "digits", "--dry-run", "--run-dir", "new", "--seeds", "1"],
    ["sweep", "imagenet-resnet50", "--dry-run", "--data", "images"],
]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder of images and a study of two trainings, of which one is begun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "train" / "cat" / "1.jpg").touch()
    settings = {"recipe": "digits", "epochs": 1}
    trainings = {name: {**settings, "arm": name} for name in ("one", "two")}
    write_log(tmp_path / "study" / "one", [row(1)], trainings["one"])
    (tmp_path / "study" / "study.json").write_bytes(study_json(trainings))
    return tmp_path


@pytest.mark.parametrize("arguments", DRY_RUNS, ids=" ".join)
def test_a_dry_run_goes_with_any_other_option_and_writes_nothing(bigbatch, places, arguments):
    before = sorted(places.rglob("*"))
    status, out, err = bigbatch(*arguments)
    assert (0, "") == (status, err)
    assert out
    assert [] == [line for line in out.splitlines() if len(line) > 80]
    assert before == sorted(places.rglob("*"))


@pytest.mark.parametrize(
    "module",
    [
        "torch",
        pytest.param("bigbatch_recipes.study", marks=pytest.mark.release),
        pytest.param("bigbatch_recipes.cli.train_command", marks=pytest.mark.thorough),
        pytest.param("sklearn", marks=pytest.mark.release),
    ],
)
def test_an_interrupt_before_anything_has_begun_is_one_line(tmp_path, module):
    ended = command(AT.format(module=module), "train", "--target=.5", "--runs-dir", tmp_path / "a")
    assert (130, "bigbatch: interrupted\n", "") == (ended.returncode, ended.stderr, ended.stdout)
    assert [] == list(tmp_path.iterdir())


@pytest.mark.thorough
def test_an_interrupt_while_the_report_is_written_says_how_to_continue(tmp_path):
    options = (
        "--target=.5",
        "--epochs=1",
        "--set=samples=64",
        "--quiet",
        "--run-dir",
        tmp_path / "run",
    )
    ended = command(AT_REPORT, "train", "--quiet", *options)
    expected = f"bigbatch: interrupted; `bigbatch train --resume {tmp_path / 'run'}` continues\n"
    assert (130, expected) == (ended.returncode, ended.stderr)


@pytest.mark.release
def test_an_interrupt_of_ranks_is_one_line_of_ours(tmp_path):
    """At once, as a terminal sends it to all of them; torchrun then sends each another."""
    code = AT.format(module="sklearn")
    (tmp_path / "train.py").write_text(code)
    options = ("train", "--target=.5", "--quiet", "--run-dir", tmp_path / "run")
    ended = torchrun(2, tmp_path / "train.py", *options)
    assert ["bigbatch: interrupted"] == said(ended)
    assert "KeyboardInterrupt" not in ended.stderr


@pytest.mark.parametrize("name", ["train", "sweep", "list"])
def test_brackets_in_help_are_text(bigbatch, name):
    default = "data" if name == "list" else "digits"
    _, out, _ = bigbatch(name, "--help")
    assert f"[{default}]" in " ".join(out.split())
    assert not re.search(r"\[/?(bold)?\]", out)


BRACKETS = "[red]a:b:fire:[/red]"


@pytest.mark.thorough
def test_brackets_and_colons_of_a_path_are_text(bigbatch, tmp_path):
    place = tmp_path / BRACKETS.replace("/", "-")
    options = ("--seed=0", "--epochs=1", "--set=samples=64", "--run-dir", place)
    status, out, _ = bigbatch("train", *options)
    assert 0 == status
    assert f"report: {place / 'report.html'}" in out
    assert "".join(place.name.split()) in "".join(out.split())  # of the table, wrapped
    for wrong in (("report", place / "no"), ("train", BRACKETS)):
        status, _, err = bigbatch(*wrong)
        assert 2 == status
        assert str(wrong[-1]) in err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "said_of_it"),
    [
        (("--batch-size=4096",), "batch_size=4096 .* max_batch=64 hold, .* with 64"),
        (("--policy=fixed", "--batch-size=4096"), "batch_size=4096 .* max_batch=64 hold, .* 64"),
        (("--max-batch=24",), "batch_size=32 .* max_batch=24 hold, .* with 24"),
        (("--min-batch=48",), "batch_size=32 .* min_batch=48 .* with 48"),
    ],
    ids=str,
)
def test_a_start_out_of_bounds_is_said_once(bigbatch, tmp_path, options, said_of_it):
    samples = ("--set=samples=64", "--epochs=1", "--quiet")
    status, _, err = bigbatch("train", *options, *samples, "--run-dir", tmp_path / "run")
    assert (0, 1) == (status, err.count("\n"))
    assert re.match(f"bigbatch: note: {said_of_it}", err)


def test_a_dry_run_says_once_what_each_of_its_parts_finds(bigbatch):
    status, _, err = bigbatch("train", "--batch-size", "100000", "--dry-run")
    assert (0, 1) == (status, err.count("batch_size=100000 is out of bounds"))


TRAIN = {
    "--policy": "fixed",
    "--target": "0.3",
    "--batch-size": "64",
    "--smoothing": "100 samples",
    "--dead-band": "0.1",
    "--warmup": "100 samples",
    "--optimizer": "adam",
    "--gamma": "0.5",
    "--r-max": "2",
    "--arm": "fixed-32",
    "--seed": "1",
    "--seeds": "2",
    "--epochs": "1",
    "--runs-dir": "x",
    "--run-dir": "x",
    "--resume": "x",
    "--dry-run-ranks": "2",
    "--set target": "0.3",
    "--set policy": "simigrad",
    "--set gamma": "0.5",
    "--set momentum": "0.5",
}
SWEEP = {
    "--grid": "target=0.1,0.2",
    "--tune": "lr",
    "--seeds": "2",
    "--set target": "0.3",
    "--set lr": "0.1",
    "--runs-dir": "x",
    "--run-dir": "x",
    "--resume": "x",
}
PAIRS = [("train", *pair, TRAIN) for pair in combinations(TRAIN, 2)]
PAIRS += [("sweep", *pair, SWEEP) for pair in combinations(SWEEP, 2)]


def words(option, value):
    """As they are typed."""
    name, _, key = option.partition(" ")
    return (name, f"{key}={value}") if key else (name, value)


@pytest.mark.parametrize("command", [pytest.param("train", marks=pytest.mark.thorough), "sweep"])
def test_a_refusal_of_two_options_names_only_what_was_typed(
    bigbatch, tmp_path, monkeypatch, command
):
    """What is to be done about it, after the semicolon, may name others."""
    monkeypatch.chdir(tmp_path)
    refused = 0
    for _, one, other, values in (pair for pair in PAIRS if pair[0] == command):
        typed = (*words(one, values[one]), *words(other, values[other]), "--data", "nowhere")
        status, _, err = bigbatch(command, *typed)
        assert 2 == status
        named = re.findall(r"--(?:set )?[a-z][a-z-]*", err.partition(";")[0])
        assert set(named) <= {one, other, "--data", "--set"}, (one, other, err)
        refused += "there is no data folder" not in err
    assert refused > 5


@pytest.mark.parametrize(
    ("options", "said_of_it"),
    [
        ((), "54 trainings .* about 5.4 minutes with --jobs 2: a training takes about 12 seconds"),
        (("--jobs=1",), "about 11 minutes with --jobs 1: a training takes about 12 seconds"),
        (("--grid=epochs=5,45", "--seeds=2"), "4 trainings .* about 24 seconds with --jobs 2"),
        (("--paper-scale", "--grid=lr=1,2"), "paper's scale takes was not measured"),
    ],
    ids=str,
)
def test_a_dry_run_of_a_sweep_says_how_long_it_takes(bigbatch, monkeypatch, options, said_of_it):
    monkeypatch.setattr("joblib.cpu_count", lambda: 2)
    status, out, err = bigbatch("sweep", "digits", "--dry-run", *options)
    assert (0, "") == (status, err)
    assert re.search(said_of_it, " ".join(out.split()))


def test_a_dry_run_of_a_study_says_how_long_it_takes(bigbatch):
    _, out, _ = bigbatch("train", "digits", "--dry-run", "--epochs", "50")
    said = " ".join(out.split())
    assert "A training takes about 24 seconds, measured on two cores; the study of 6 arms" in said
    assert "6 arms and 3 seeds about 7.2 minutes." in said
