"""Logs, configs and studies with other values than were written: read, or refused in a sentence."""

import copy
import io
import json
import math
import re

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from rich.console import Console

from bigbatch.errors import RunError
from bigbatch.log.history import history_of, measured_rows, seeds_of, table_of
from bigbatch.log.replay import replay, table_of_replay
from bigbatch.policies.policy import Fixed
from bigbatch_recipes import RECIPES
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.run_config import read_sweep, read_trainings
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.study import settings_from
from bigbatch_recipes.sweep import points_of, start_sweep, sweep_of
from bigbatch_recipes.sweep_console import RunFollower
from bigbatch_recipes.sweep_files import as_csv, as_json
from bigbatch_recipes.sweep_results import read_sweep_results
from log_rows import row
from property_tests import property_test

FACTORS = {"w": [0.5, 0.1, None, 1.0], "b": [1.0, 0.0, 0.2, 1.0]}
MEASURED = {"gsnr": FACTORS, "layers": {"w": [80.0, None]}, "half_batch_cosine": 0.1}
MEASURED |= {"similarity_interval": [-0.1, 0.4], "noise_scale_interval": [20.0, None]}
ROWS = [row(step, accuracy=0.5 if step == 4 else None, **MEASURED) for step in range(1, 5)]
DIGITS = RECIPES["digits"]
SETTINGS = DIGITS.settings().with_changes({"epochs": 1})

ODD = st.sampled_from(
    ["", "8", "nan", None, True, False, -1, 0, 1.5, 10**30, 10**400, 1e308, math.nan, math.inf]
)
JSON = st.recursive(
    ODD | st.integers() | st.floats() | st.text(max_size=5),
    lambda some: (
        st.lists(some, max_size=3) | st.dictionaries(st.text(max_size=3), some, max_size=3)
    ),
    max_leaves=4,
)
# the folder is made once for all examples, and each writes its file again
FUZZED = {"suppress_health_check": [HealthCheck.function_scoped_fixture]}


def places_in(value, path=()):
    """The way to every value within a value."""
    yield path
    if isinstance(value, (dict, list)):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places_in(value[key], (*path, key))


def replaced(value, path, new):
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


def damaged(value):
    """The value with another one at a place within it, or without what is there."""
    places = st.sampled_from(list(places_in(value))[1:])
    return st.builds(lambda path, new: (replaced(value, path, new), path), places, JSON)


def run_with(path, rows=ROWS, settings=None):
    run = RunDirectory.create(path, settings or SETTINGS.as_dict())
    for one in rows:
        run.append(one)
    return run


def write_log(run, rows):
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in rows))


def or_said(read):
    """What is read, and what is said instead."""
    try:
        return read(), None
    except RunError as error:
        return None, str(error)


def read_all(run):
    """Everything that is shown of a run."""
    history = history_of(RunDirectory.open(run.path))
    LiveView(Console(file=io.StringIO())).table(table_of([history]), seeds_of([history]))
    assert isinstance(RunFollower(run).progress(), str)
    if measured_rows(history.rows):
        table_of_replay(replay(history, {"fixed": Fixed(64)}))
    return history


def a_log_with_another_value(tmp_path_factory, rows, path):
    run = run_with(tmp_path_factory.mktemp("fuzz") / "run", ())
    write_log(run, rows)
    history, said = or_said(lambda: read_all(run))
    assert RunFollower(run).outcome()
    if history is None:
        assert str(run.metrics) in said
        assert f"line {path[0] + 1}" in said or f"line {path[0] + 2}" in said
    else:
        assert rows == history.rows


@given(damaged(ROWS))
@property_test(150, **FUZZED)
def test_a_log_with_another_value_is_read_as_it_stands_or_refused(tmp_path_factory, damage):
    a_log_with_another_value(tmp_path_factory, *damage)


@pytest.mark.release
@given(damaged(ROWS))
@property_test(2_000, **FUZZED)
def test_many_logs_with_another_value_are_read_or_refused(tmp_path_factory, damage):
    a_log_with_another_value(tmp_path_factory, *damage)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": "0.5"}, "line 2: loss is '0.5', and must be a number that is finite, or None"),
        ({"lr": 0.1}, "line 2: lr is 0.1, and must be a list, each a number that"),
        ({"metrics": [1]}, r"line 2: metrics is \[1\], and must be names, each with a number"),
        ({"metrics": {}}, r"line 2: metrics is \{\}"),
        (
            {"elapsed_seconds": None},
            r"line 2: elapsed_seconds is None, and must be a number in \[0, 1e12\]",
        ),
        (
            {"elapsed_seconds": 1e308},
            r"line 2: elapsed_seconds is 1e\+308, and must be a number in",
        ),
        ({"skipped": 0}, "line 2: skipped is 0, and must be True or False"),
        ({"step": 1}, "line 2: step 1 of epoch 0 follows step 1"),
        ({"epoch": -1}, r"line 2: epoch is -1, and must be a whole number in \[0, 9e18\]"),
        ({"samples": 10**30}, "line 2: samples is 1000.*000, and must be a whole number"),
        ({"samples": 65}, "line 2: samples is 65, and must be 32 before the step and its"),
        ({"micro_batches": 33}, "line 2: micro_batches is 33, and must be at most the batch_size"),
        ({"gsnr": {"w": [1.0]}}, r"line 2: gsnr is .*, and must be names, each with \(a number"),
        (
            {"layers": {"w": [1.0]}},
            r"line 2: layers is .*, and must be names, each with \(a number",
        ),
        ({"half_batch_cosine": "1"}, "line 2: half_batch_cosine is '1', and must be a number"),
        ({"noise_scale_interval": [1.0]}, r"line 2: noise_scale_interval is \[1.0\], and must be"),
        ({"loss": math.nan}, "line 2 is damaged"),
        ({"loss": math.inf}, "line 2 is damaged"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_line(tmp_path, changes, said):
    run = run_with(tmp_path / "run")
    write_log(run, [ROWS[0], {**ROWS[1], **changes}, *ROWS[2:]])
    with pytest.raises(RunError, match=f"metrics.jsonl, {said}"):
        history_of(run)


@pytest.mark.parametrize(
    "line", [b"null", b"[" * 100_000, b"\xff\xfe", b"1" * 5_000, b'{"loss": 1']
)
def test_a_line_that_is_no_object_is_named_wherever_it_stands(tmp_path, line):
    run = run_with(tmp_path / "run")
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(whole + line + b"\n")  # its end is there: no kill cut it short
    with pytest.raises(RunError, match="line 5 is damaged"):
        history_of(run)


CONFIG = {"kind": "run", "schema": 3, "settings": SETTINGS.as_dict(), "versions": {"torch": "2"}}


def a_config_with_another_value(tmp_path_factory, config):
    run = run_with(tmp_path_factory.mktemp("fuzz") / "run")
    file = run.path / "config.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    settings, said = or_said(lambda: settings_from(file, read_all(run).settings))
    if settings is None:
        assert str(file) in said
    else:
        assert config["settings"] == settings.as_dict()


@given(damaged(CONFIG))
@property_test(150, **FUZZED)
def test_a_config_with_another_value_is_read_as_it_stands_or_refused(tmp_path_factory, damage):
    a_config_with_another_value(tmp_path_factory, damage[0])


@pytest.mark.release
@given(damaged(CONFIG))
@property_test(2_000, **FUZZED)
def test_many_configs_with_another_value_are_read_or_refused(tmp_path_factory, damage):
    a_config_with_another_value(tmp_path_factory, damage[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": 5}, "policy is 5, and must be text"),
        ({"policy": "magic"}, "policy 'magic' is unknown"),
        ({"target": [0.2]}, r"target is \[0.2\], and must be a number that is finite"),
        ({"epochs": math.nan}, r"epochs is nan, and must be a whole number in \[1, 9e18\]"),
        ({"seed": "0"}, "seed is '0', and must be a whole number"),
        (
            {"lr": {}},
            r"lr is \{\}, and must be a number that is finite, text, True or False, or None",
        ),
        ({"task": {"width": [1]}}, "task is .*, and must be names, each with a number"),
        ({7: 8}, "settings is .*, and must be names with a value each"),
    ],
)
def test_a_config_of_another_type_is_named_with_its_setting(tmp_path, changes, said):
    run = run_with(tmp_path / "run")
    settings = {**CONFIG["settings"], **changes}
    (run.path / "config.yaml").write_text(yaml.safe_dump({**CONFIG, "settings": settings}))
    with pytest.raises(RunError, match=f"config.yaml: {said}"):
        history_of(RunDirectory.open(run.path))


def test_a_config_that_contains_itself_is_refused(tmp_path):
    run = run_with(tmp_path / "run")
    (run.path / "config.yaml").write_text(
        "kind: run\nschema: 3\nsettings: &s\n  seed: 1\n  task: *s\n"
    )
    with pytest.raises(RunError, match=r"config.yaml: task is"):
        RunDirectory.open(run.path)


def test_settings_that_the_recipe_lacks_or_has_of_another_type_name_their_file(bigbatch, tmp_path):
    for changes, said in (
        ({"epochs": 2.5}, "epochs is 2.5"),
        ({"workers": "two"}, "workers='two' must be a whole number"),
        ({"recipe": "none"}, "'none'"),
        ({"strange": 1}, "unknown settings"),
        ({"task": {**SETTINGS.task, "strange": 1}}, "strange"),
    ):
        place = tmp_path / next(iter(changes))
        run_with(place, (), {**SETTINGS.as_dict(), **changes})
        status, _, error = bigbatch("train", "--resume", place, "--quiet")
        assert (2, 1) == (status, error.count("\n"))
        assert f"{place / 'config.yaml'}: " in error
        assert said in error


def test_a_training_that_continues_over_a_damaged_row_ends_with_one_line(bigbatch, tmp_path):
    place = tmp_path / "run"
    short = ("--seed=0", "--epochs=1", "--set=samples=64", "--quiet")
    assert 0 == bigbatch("train", "digits", *short, "--run-dir", place)[0]
    log, config = place / "metrics.jsonl", place / "config.yaml"
    number = re.search(r'"loss": ([^,]+),', log.read_text())[1]
    text = f'"{number[2:]}"'  # as long, since the checkpoint knows how much is whole
    log.write_text(log.read_text().replace(number, text, 1))
    config.write_text(config.read_text().replace("epochs: 1\n", "epochs: 2\n"))
    status, _, error = bigbatch("train", "--resume", place, "--quiet")
    assert 2 == status
    assert f"bigbatch: {log}, line 1: loss is " in error
    assert "Traceback" not in error


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    place = tmp_path_factory.mktemp("sweeps") / "sweep"
    grids = sweep_of(DIGITS, SETTINGS, ["lr=0.1,0.2"], ["lr"])
    start_sweep(DIGITS, place, points_of(DIGITS, grids, SETTINGS), ("lr",), 1)
    for name, settings in read_trainings(place).items():
        run_with(place / name, settings=settings)
    return place, yaml.safe_load((place / "study.yaml").read_text())


@given(st.data())
@property_test(100, **FUZZED)
def test_a_sweep_with_another_value_is_read_or_refused(sweep, data):
    place, about = sweep
    other, _ = data.draw(damaged(about))
    (place / "study.yaml").write_text(yaml.safe_dump(other, sort_keys=False))
    read, said = or_said(lambda: read_sweep_whole(place))
    assert read or str(place) in said


def read_sweep_whole(place):
    """Everything that is shown of a sweep, or begun in it."""
    results = read_sweep_results(place)
    if results is not None:
        texts = results.table(), results.title, as_csv(results), json.dumps(as_json(results))
        assert all(texts)
    for name, settings in read_trainings(place).items():
        settings_from(place / name, settings)
    return results or read_trainings(place)


@pytest.mark.parametrize("name", ["..", "", "a/b", 7])
def test_a_training_lies_in_its_study(sweep, name):
    place, about = sweep
    listed = {name: next(iter(about["settings"]["trainings"].values()))}
    other = {**about, "settings": {"trainings": listed}}
    (place / "study.yaml").write_text(yaml.safe_dump(other))
    with pytest.raises(RunError, match="lists no trainings"):
        read_trainings(place)
    assert read_sweep(place) is None
