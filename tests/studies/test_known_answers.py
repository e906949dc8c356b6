"""`bigbatch bench known-answers`: its rows, what makes it fail, and that the library passes."""

import math
from itertools import chain

import pytest
import torch
import typer

from real_data import FOLDER, needs
from studies import known_answers, known_decisions, known_gradients, known_steps, shakespeare_gpt
from studies.commands import require_passes
from studies.known_answer import KnownAnswer
from studies.shakespeare_gpt import Phase

torch.set_num_threads(1)  # small tensors: a second thread only waits


def answer(measured, tolerance=0.5, **options):
    return KnownAnswer("number", "arithmetic", 2.0, measured, tolerance, "a reason", **options)


def failures_of(answers):
    return [row.row() for row in answers if not row.passes]


@pytest.mark.parametrize(
    ("row", "passes"),
    [
        (answer(2.5), True),
        (answer(1.5), True),
        (answer(2.6), False),
        (answer(math.nan), False),
        (answer(3.9, 2.0, is_factor=True), True),
        (answer(1.1, 2.0, is_factor=True), True),
        (answer(0.9, 2.0, is_factor=True), False),
        (answer(-2.0, 2.0, is_factor=True), False),
        (answer(math.nan, 2.0, is_factor=True), False),
        (answer(math.nan, skipped="no --data"), True),
    ],
)
def test_an_answer_passes_within_its_tolerance_or_if_it_was_skipped(row, passes):
    assert passes == row.passes


def test_a_row_has_all_that_a_reader_has_to_judge_by():
    row = answer(2.25).row()
    assert ["number", "arithmetic", "2", "2.25", "+- 0.5", "a reason", "pass"] == [*row.values()]
    assert "FAIL" == answer(3.0).row()["result"]
    assert "x 2" == answer(3.0, 2.0, is_factor=True).row()["tolerance"]
    skipped = answer(math.nan, skipped="no --data").row()
    assert ("-", "skipped: no --data") == (skipped["measured"], skipped["result"])


def test_the_command_names_what_failed_and_exits_with_one(capsys):
    with pytest.raises(typer.Exit) as ending:
        require_passes([answer(2.0), answer(9.0), answer(math.nan, skipped="no --data")])
    assert 1 == ending.value.exit_code
    assert "1 failed: number" in capsys.readouterr().err
    require_passes([answer(2.0)])


def test_policies_and_scaling_give_the_numbers_that_are_known():
    rows = list(known_decisions.run())
    assert [] == failures_of(rows)
    assert len(rows) == len({row.what for row in rows})


def test_rows_without_their_data_are_skipped_with_a_reason(tmp_path):
    rows = list(
        chain(
            shakespeare_gpt.run(None, shakespeare_gpt.SHORT, 0),
            shakespeare_gpt.run(tmp_path, shakespeare_gpt.SHORT, 0),
        )
    )
    assert ["no --data"] * 4 == [row.skipped for row in rows[:4]]
    assert [f"there is no {tmp_path / 'tinyshakespeare' / 'input.txt'}"] * 4 == [
        row.skipped for row in rows[4:]
    ]


def test_strides_of_the_gpt_cover_the_same_steps():
    for phases in (shakespeare_gpt.FULL, shakespeare_gpt.SHORT):
        assert 250 == phases[-1].end
        begin = 0
        for phase in phases:
            assert 0 == (phase.end - begin) % phase.stride
            assert 0 == phase.batch_size % 8
            begin = phase.end


@pytest.mark.release
def test_the_gpt_trains_and_is_measured():
    text = "the quick brown fox jumps over the lazy dog. " * 40
    phases = (Phase(4, 2, 8), Phase(6, 1, 8))
    steps = list(shakespeare_gpt.train(text, phases, seed=0))
    assert [0, 2, 4, 5] == [step.number for step in steps]
    assert all(step.statistics.grad_variance > 0 for step in steps)
    characters = len(set(text))
    # tied weights of deviation .02 prefer the character itself, by some tenths
    assert math.log(characters) - 0.3 < steps[0].loss < math.log(characters) + 0.3
    model = shakespeare_gpt.ShakespeareGPT(65)
    assert 10_745_088 == sum(p.numel() for p in model.parameters())


@pytest.mark.thorough
def test_optimizer_steps_have_the_numbers_that_are_known():
    assert [] == failures_of(known_steps.run(seed=0))


@pytest.mark.thorough
def test_the_meter_finds_the_noise_that_is_known():
    rows = list(known_gradients.run(seed=0, data=None))
    assert [] == failures_of(rows)
    assert ["no --data"] * 2 == [row.skipped for row in rows if row.skipped]


@pytest.mark.release
@needs("fashion-mnist")
def test_the_meter_finds_the_noise_of_a_recorded_network():
    rows = known_gradients.run(seed=1, data=FOLDER)
    assert [] == failures_of(rows)


@pytest.mark.release
@needs("tinyshakespeare")
@needs("fashion-mnist")
def test_all_known_answers_are_found():  # 10 minutes, of which the GPT takes nine
    rows = list(known_answers.run(seed=0, data=FOLDER))
    assert [] == failures_of(rows)
    assert not [row.what for row in rows if row.skipped]
    assert len(rows) >= 60


@pytest.mark.release
@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_find_them_too(seed):
    assert [] == failures_of(chain(known_steps.run(seed), known_gradients.run(seed, None)))
