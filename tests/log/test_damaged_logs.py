"""Logs with other values than were written: read as they stand, or refused in a sentence."""

import json
import math

import pytest
from hypothesis import given

from bigbatch.errors import RunError
from bigbatch.log.history import history_of, measured_rows, seeds_of, table_of
from bigbatch.log.replay import replay, table_of_replay
from bigbatch.policies.policy import Fixed
from damaged_values import FUZZED, damaged, or_said
from log_rows import row, write_log
from property_tests import property_test

FACTORS = {"w": [0.5, 0.1, None, 1.0], "b": [1.0, 0.0, 0.2, 1.0]}
MEASURED = {"gsnr": FACTORS, "layers": {"w": [80.0, None]}, "half_batch_cosine": 0.1}
MEASURED |= {"similarity_interval": [-0.1, 0.4], "noise_scale_interval": [20.0, None]}
ROWS = [row(step, accuracy=0.5 if step == 4 else None, **MEASURED) for step in range(1, 5)]
SETTINGS = {"policy": "SimiGrad(target=0.2)", "target": 0.2, "epochs": 1, "seed": 0, "lr": 0.1}
SETTINGS |= {"arm": "one", "higher_is_better": True, "base_batch": 32, "lr_scaling": "sqrt"}


def read_all(path):
    """Everything that is shown of a run."""
    history = history_of(path)
    assert table_of([history]).rows
    assert seeds_of([history])
    if measured_rows(history.rows):
        table_of_replay(replay(history, {"fixed": Fixed(64)}))
    return history


def a_log_with_another_value(tmp_path_factory, rows, path):
    run = write_log(tmp_path_factory.mktemp("fuzz") / "run", rows, SETTINGS)
    history, said = or_said(lambda: read_all(run))
    if history is None:
        assert str(run / "metrics.jsonl") in said
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
    rows = [ROWS[0], {**ROWS[1], **changes}, *ROWS[2:]]
    run = write_log(tmp_path / "run", rows, SETTINGS)
    with pytest.raises(RunError, match=f"metrics.jsonl, {said}"):
        history_of(run)


@pytest.mark.parametrize(
    "line", [b"null", b"[" * 100_000, b"\xff\xfe", b"1" * 5_000, b'{"loss": 1']
)
def test_a_line_that_is_no_object_is_named_wherever_it_stands(tmp_path, line):
    run = write_log(tmp_path / "run", ROWS, SETTINGS)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")  # its end is there: no kill cut it short
    with pytest.raises(RunError, match="line 5 is damaged"):
        history_of(run)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"step": 3, "metrics": {"loss": 1.0}}, "has scores of step 3 after step 4"),
        ({"step": 4, "metrics": None}, "has scores of step 4 after step 4"),
        ({"step": 4, "metrics": {}}, r"metrics is \{\}, and must be"),
        ({"step": 4, "metrics": {"loss": "low"}}, "metrics is {'loss': 'low'}, and must be"),
        ({"step": "4", "metrics": {"loss": 1.0}}, "step is '4', and must be a whole number"),
    ],
)
def test_scores_that_follow_no_step_of_theirs_are_named_with_their_line(tmp_path, line, said):
    run = write_log(tmp_path / "run", [*ROWS, line], SETTINGS)
    with pytest.raises(RunError, match=f"line 5:? {said}"):
        history_of(run)


DOCUMENT = {"schema": 3, "settings": SETTINGS, "versions": {"torch": "2"}}


def settings_with_another_value(tmp_path_factory, document):
    run = write_log(tmp_path_factory.mktemp("fuzz") / "run", ROWS)
    (run / "settings.json").write_text(json.dumps(document))
    history, said = or_said(lambda: read_all(run))
    if history is None:
        assert str(run / "settings.json") in said
    else:
        assert document["settings"] == history.settings


@given(damaged(DOCUMENT))
@property_test(150, **FUZZED)
def test_settings_with_another_value_are_read_as_they_stand_or_refused(tmp_path_factory, damage):
    settings_with_another_value(tmp_path_factory, damage[0])


@pytest.mark.release
@given(damaged(DOCUMENT))
@property_test(2_000, **FUZZED)
def test_many_settings_with_another_value_are_read_or_refused(tmp_path_factory, damage):
    settings_with_another_value(tmp_path_factory, damage[0])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy": 5}, "policy is 5, and must be text"),
        ({"target": [0.2]}, r"target is \[0.2\], and must be a number that is finite"),
        ({"epochs": 2.5}, r"epochs is 2.5, and must be a whole number in \[1, 9e18\]"),
        ({"seed": "0"}, "seed is '0', and must be a whole number"),
        ({"higher_is_better": 1}, "higher_is_better is 1, and must be True or False"),
        ({"lr": [0.1]}, r"lr is \[0.1\], and must be a number that is finite, text"),
        ({"task": {"width": [1]}}, "task is .* names, each with a number"),
    ],
)
def test_a_setting_of_another_type_is_named(tmp_path, changes, said):
    run = write_log(tmp_path / "run", ROWS, {**SETTINGS, **changes})
    with pytest.raises(RunError, match=f"settings.json: {said}"):
        history_of(run)


@pytest.mark.parametrize("text", ["", "[", "7", '{"schema": 3}', "[" * 100_000, "\x00\xff"])
def test_a_settings_file_of_something_else_is_refused(tmp_path, text):
    run = write_log(tmp_path / "run", ROWS)
    (run / "settings.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RunError, match=r"settings.json cannot be read as the settings of a log"):
        history_of(run)


def test_a_log_of_another_schema_names_it(tmp_path):
    run = write_log(tmp_path / "run", ROWS)
    (run / "settings.json").write_text(json.dumps({**DOCUMENT, "schema": 4}))
    with pytest.raises(RunError, match="is of schema 4, and 3 is needed"):
        history_of(run)
