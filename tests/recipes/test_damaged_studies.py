"""Studies and runs with other values than were written: read, or refused in a sentence."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.errors import RunError
from bigbatch_recipes.recipe_registry import RECIPES
from bigbatch_recipes.run_config import read_study, read_sweep
from bigbatch_recipes.study import settings_from, start_sweep
from bigbatch_recipes.sweep import points_of, sweep_of
from bigbatch_recipes.sweep_page import as_csv
from bigbatch_recipes.sweep_results import read_sweep_results
from damaged_values import FUZZED, damaged, or_said
from log_rows import row, write_log
from property_tests import property_test

ROWS = [row(step, accuracy=0.5 if step == 4 else None) for step in range(1, 5)]
DIGITS = RECIPES["digits"]
SETTINGS = DIGITS.settings().with_changes({"epochs": 1})


def test_settings_that_the_recipe_lacks_or_has_of_another_type_name_their_file(bigbatch, tmp_path):
    for changes, said in (
        ({"epochs": 2.5}, "epochs is 2.5"),
        ({"workers": "two"}, "workers='two' must be a whole number"),
        ({"recipe": "none"}, "'none'"),
        ({"strange": 1}, "unknown settings"),
        ({"task": {**SETTINGS.task, "strange": 1}}, "strange"),
    ):
        place = tmp_path / next(iter(changes))
        write_log(place, [], {**SETTINGS.as_dict(), **changes})
        status, _, error = bigbatch("train", "--resume", place, "--quiet")
        assert (2, 1) == (status, error.count("\n"))
        assert f"{place / 'settings.json'}: " in error
        assert said in error


def test_a_training_that_continues_over_a_damaged_row_ends_with_one_line(bigbatch, tmp_path):
    place = tmp_path / "run"
    short = ("--seed=0", "--epochs=1", "--set=samples=64", "--quiet")
    assert 0 == bigbatch("train", "digits", *short, "--run-dir", place)[0]
    log, config = place / "metrics.jsonl", place / "settings.json"
    number = re.search(r'"loss": ([^,]+),', log.read_text())[1]
    text = f'"{number[2:]}"'  # as long, since the checkpoint knows how much is whole
    log.write_text(log.read_text().replace(number, text, 1))
    config.write_text(config.read_text().replace('"epochs": 1,', '"epochs": 2,'))
    status, _, error = bigbatch("train", "--resume", place, "--quiet")
    assert 2 == status
    assert f"bigbatch: {log}, line 1: loss is " in error
    assert "Traceback" not in error


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    place = tmp_path_factory.mktemp("sweeps") / "sweep"
    grids = sweep_of(DIGITS, SETTINGS, ["lr=0.1,0.2"], ["lr"])
    start_sweep(DIGITS, place, points_of(DIGITS, grids, SETTINGS), ("lr",), 1)
    for name, settings in read_study(place).trainings.items():
        write_log(place / name, ROWS, settings)
    return place, json.loads((place / "study.json").read_bytes())


@given(st.data())
@property_test(100, **FUZZED)
def test_a_sweep_with_another_value_is_read_or_refused(sweep, data):
    place, about = sweep
    other, _ = data.draw(damaged(about))
    (place / "study.json").write_text(json.dumps(other))
    read, said = or_said(lambda: read_sweep_whole(place))
    assert read or str(place) in said


def read_sweep_whole(place):
    """Everything that is shown of a sweep, or begun in it."""
    results = read_sweep_results(place)
    texts = results.table(), results.title, as_csv(results)
    assert all(texts)
    for name, settings in read_study(place).trainings.items():
        settings_from(place / name, settings)
    return results


@pytest.mark.parametrize("name", ["..", "", "a/b"])
def test_a_training_lies_in_its_study(sweep, name):
    place, about = sweep
    other = {**about, "trainings": {name: next(iter(about["trainings"].values()))}, "sweep": None}
    (place / "study.json").write_text(json.dumps(other))
    for read in (read_study, read_sweep):
        with pytest.raises(RunError, match="lists no trainings"):
            read(place)
