"""Schedules in words: what each clause means, when it begins, and what is refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch import Controller, GradientStatistics, Schedule, TrainingState
from bigbatch.errors import SettingError
from bigbatch.policies.parse import parse_policy

NOISE = GradientStatistics(1.0, 576.0, samples=64, micro_batches=8)
M = 1_000_000


def decide(text, tokens_per_sample=None, **done):
    return Schedule(text, tokens_per_sample).decide(NOISE, TrainingState(7, 7, **done))


def sizes(text, moments, tokens_per_sample=None, of="samples"):
    return [decide(text, tokens_per_sample, **{of: at}).batch_size for at in moments]


def test_a_single_size_is_kept():
    assert [64, 64] == sizes("64", [0, 10**12])


def test_sizes_hold_from_their_moment_on():
    text = "64, 128 from 2M samples, 32 from 8M samples"
    moments = [0, 2 * M - 1, 2 * M, 8 * M - 1, 8 * M, 10**12]
    assert [64, 64, 128, 128, 32, 32] == sizes(text, moments)


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_epochs_and_steps_are_counted_too(unit):
    of = {"epoch": "epoch", "step": "steps"}[unit]
    assert [64, 128, 256] == sizes(f"64, 128 from 1 {unit}, x2 at 3 {unit}s", [0, 1, 3], of=of)


def test_tokens_and_samples_come_in_one_order_of_time():
    assert Schedule("64, 128 from 1M samples, 256 from 20M tokens", tokens_per_sample=10)
    with pytest.raises(SettingError, match="in order of time"):
        Schedule("64, 128 from 2M samples, 256 from 1M tokens", tokens_per_sample=10)


def test_tokens_are_samples_times_their_mean_length():
    text = "64, 128 from 1M tokens, x2 every 2.5M tokens"
    assert [64, 64, 128] == sizes(text, [0, 1953, 1954], 512)  # 1,953.125 samples
    assert [128, 256, 512] == sizes(text, [4882, 4883, 9766], 512)
    assert [64, 128] == sizes("64, x2 at 1 token", [1, 2], tokens_per_sample=0.5)


@pytest.mark.parametrize(
    ("amount", "samples"),
    [("1500", 1500), ("1.5K", 1500), ("2m", 2 * M), ("0.25 B", None), ("3B", 3e9), ("1t", 1e12)],
)
def test_suffixes_are_thousands_millions_billions_trillions(amount, samples):
    if samples is None:
        with pytest.raises(SettingError, match="allowed here"):
            Schedule(f"64, 128 from {amount} samples")
    else:
        text = f"64, 128 from {amount} samples"
        assert [64, 128] == sizes(text, [int(samples) - 1, int(samples)])


def test_doublings_are_adabatchs():
    text = "64, x2 every 20 epochs up to 1024"
    expected = [64, 64, 128, 128, 256, 512, 1024, 1024, 1024]
    assert expected == sizes(text, [0, 19, 20, 39, 40, 60, 80, 100, 5000], of="epoch")


def test_a_ramp_rises_in_equal_stretches():
    text = "64 to 512 over 4M samples in steps of 64"  # 7 steps
    moments = [n * 4 * M // 7 for n in range(8)]
    assert [64, 64, 128, 192, 256, 320, 384, 512] == sizes(text, moments)  # 4M/7 is no whole number
    later = [moment + 1 for moment in moments]
    assert [64, 128, 192, 256, 320, 384, 448, 512] == sizes(text, later)
    assert [512, 512] == sizes(text, [4 * M, 10**12])


def test_a_ramp_may_fall_and_may_go_by_single_samples():
    assert [8, 7, 6, 4, 4] == sizes("8 to 4 over 400 samples", [99, 100, 200, 400, 10**9])
    assert [10, 10, 11, 15, 20] == sizes("10 to 20 over 100 samples", [0, 9, 10, 50, 100])
    assert [10, 22, 34] == sizes("10 to 34 over 24 samples in steps of 12", [0, 12, 24])


@given(
    start=st.integers(1, 5000), end=st.integers(1, 5000), over=st.integers(1, 10**9), data=st.data()
)
def test_a_ramp_is_the_line_rounded_towards_its_start(start, end, over, data):
    at = data.draw(st.integers(0, 2 * over))
    size = decide(f"{start} to {end} over {over} samples", samples=at).batch_size
    line = start * over + (end - start) * min(at, over)  # times `over`
    assert 0 <= (line - size * over) * (1 if end >= start else -1) < over


def test_growth_in_place_of_decay_continues_as_a_decay_at_the_cap():
    text = "128, x5 at 60 epochs, x5 at 120 epochs, x5 at 160 epochs up to 3200, then decay"
    moments = [0, 60, 120, 160]
    done = [decide(text, epoch=at) for at in moments]
    assert [128, 640, 3200, 3200] == [one.batch_size for one in done]
    assert [1, 1, 1, 1 / 5] == [one.lr_factor for one in done]
    without = decide(text.removesuffix(", then decay"), epoch=160)
    assert (3200, 1.0) == (without.batch_size, without.lr_factor)


@given(factor=st.sampled_from([1.5, 2, 5]), epoch=st.integers(0, 60), cap=st.integers(64, 10**6))
def test_batch_over_factor_grows_as_the_uncapped_batch(factor, epoch, cap):
    text = f"64, x{factor} every 3 epochs up to {cap}, then decay"
    done = decide(text, epoch=epoch)
    uncapped = min(64 * factor ** (epoch // 3), 2**53)
    assert done.batch_size <= cap
    assert pytest.approx(uncapped, rel=0.5 / 64) == done.batch_size / done.lr_factor  # rounded


def test_growth_by_a_broken_factor_is_rounded_to_the_nearest_sample():
    text = "64, x1.2 every 1 step"  # 76.8, 92.16, 110.592
    assert [64, 77, 92, 111] == sizes(text, [0, 1, 2, 3], of="steps")


def test_growth_without_a_cap_never_overflows():
    for factor in ("2", "5", "999999999999999"):
        assert 2**53 == decide(f"64, x{factor} every 1 step", steps=10**9).batch_size
    capped = decide("64, x2 every 1 step up to 512, then decay", steps=10**9)
    assert (512, 512 / 2**53) == (capped.batch_size, capped.lr_factor)


def test_a_clause_changes_what_those_before_it_say():
    text = "10 to 20 over 100 samples, x3 at 9 steps, 7 from 5 epochs, x2 every 6 epochs"
    assert 45 == decide(text, samples=50, steps=9).batch_size
    assert 7 == decide(text, samples=50, epoch=5).batch_size
    assert 28 == decide(text, samples=50, epoch=12).batch_size


def test_clauses_of_one_moment_hold_one_after_the_other():
    assert [64, 256] == sizes("64, 128 from 9 steps, x2 at 9 steps", [8, 9], of="steps")
    assert [64, 128] == sizes("64, x3 at 9 steps, 128 from 9 steps", [8, 9], of="steps")


def test_what_happens_every_so_often_has_no_place_in_the_order_of_time():
    assert 512 == decide("64, x2 every 20 epochs, 512 from 5 epochs", epoch=100).batch_size
    assert 512 == decide("64, 128 from 10 epochs, x2 every 5 epochs", epoch=10).batch_size


def test_case_and_blanks_do_not_matter():
    expected = Schedule("64, x2 every 2K samples up to 512, then decay")
    odd = Schedule("  64 ,X2  EVERY 2k Samples  up TO 512,THEN decay ")
    for samples in (0, 2000, 4321, 10**6):
        moment = TrainingState(1, 1, samples=samples)
        one, other = expected.decide(NOISE, moment), odd.decide(NOISE, moment)
        assert (one.batch_size, one.lr_factor) == (other.batch_size, other.lr_factor)


def test_the_reason_is_the_clause_in_force():
    text = "64, 128 from 2M samples, x2 every 3 epochs"
    reasons = [decide(text, **done).reason for done in ({}, {"samples": 2 * M}, {"epoch": 3})]
    expected = ["schedule: 64", "schedule: 128 from 2M samples", "schedule: x2 every 3 epochs"]
    assert expected == reasons


def test_a_training_starts_where_the_schedule_does():
    assert 64 == Schedule("64, 128 from 2M samples").batch_size
    assert 10 == Schedule("10 to 20 over 100 samples").batch_size


def test_a_resumed_schedule_needs_no_state():
    schedule = Schedule("64, x2 every 1K samples up to 700")
    unbroken = Controller(schedule, schedule.batch_size)
    for done in range(1, 40):
        expected = unbroken.next(GradientStatistics(1.0, 9.0, 100, 8)).batch_size
        fresh = Controller(schedule, schedule.batch_size)
        now = TrainingState(0, 100, samples=100 * done, steps=done)
        assert expected == fresh.next(NOISE, now).batch_size


@pytest.mark.parametrize(
    ("text", "clause", "words"),
    [
        ("", "", "allowed here: SIZE, or SIZE to SIZE over AMOUNT"),
        ("64,", "", "allowed here: SIZE from AMOUNT, or xFACTOR at|every AMOUNT"),
        ("sixty-four", "sixty-four", "allowed here"),
        ("64 from 2M samples", "64 from 2M samples", "allowed here: SIZE, or"),
        ("64, 128", "128", "allowed here"),
        ("64, 1K from 2M samples", "1K from 2M samples", "a SIZE is 256"),
        ("64, 128 from 2M bananas", "128 from 2M bananas", "2M samples"),
        ("64, 128 from -3 epochs", "128 from -3 epochs", "allowed here"),
        ("64, 64 to 512 over 4M samples", "64 to 512 over 4M samples", "allowed here"),
        ("64, x2 every 20 epochs until 512", "x2 every 20 epochs until 512", "[up to SIZE]"),
        ("0", "0", "size=0 must be a whole number of at least 1"),
        ("64, 0 from 3 steps", "0 from 3 steps", "size=0"),
        ("64, x2 every 0 epochs", "x2 every 0 epochs", "0 epochs must be a whole number"),
        ("64, x2 at 1.5 epochs", "x2 at 1.5 epochs", "1.5 epochs must be a whole number"),
        ("64, x2 at 1.0001K samples", "x2 at 1.0001K samples", "1000.1 samples must be"),
        ("64, x1 at 3 steps", "x1 at 3 steps", "the factor 1 must be above 1"),
        ("64, x0.5 at 3 steps", "x0.5 at 3 steps", "the factor 0.5 must be above 1"),
        ("64, x2 at 1B tokens, x2 at 9M samples", None, "counts samples and tokens"),
        ("64, 8 from 9 steps, 9 from 8 steps", "9 from 8 steps", "before '8 from 9 steps'"),
        ("8 to 9 over 9 steps, 7 from 8 steps", "7 from 8 steps", "in order of time"),
        ("8 to 99 over 9 steps in steps of 4", None, "91 samples are no whole number of steps"),
        ("64, x2 at 3 steps up to 32", "x2 at 3 steps up to 32", "below the 64 samples"),
        ("64, 99 from 1 step, x2 at 3 steps up to 98", None, "below the 99 samples"),
        ("64, x2 at 3 steps up to 99, 7 from 4 steps", "7 from 4 steps", "nothing but"),
        ("64, then decay", "then decay", "after 'up to SIZE' only"),
        ("64, x2 at 3 steps, then decay", "then decay", "after 'up to SIZE' only"),
        ("64, x2 at 3 steps up to 99, then decay, then decay", "then decay", "nothing but"),
        ("then decay", "then decay", "allowed here"),
        ("9" * 5000, None, "allowed here"),
    ],
)
def test_a_text_that_says_something_else_is_refused_with_the_clause(text, clause, words):
    with pytest.raises(SettingError) as refusal:
        Schedule(text)
    message = str(refusal.value)
    assert repr(text) in message
    assert clause is None or f"clause {clause!r}" in message
    assert words in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((64,), "text=64 must be text"),
        (("64, x2 at 9 tokens", 0), "tokens_per_sample=0"),
        (("64, x2 at 9 tokens", float("nan")), "tokens_per_sample=nan"),
        (("64, x2 at 9 samples", 512), "tokens_per_sample=512 has no use"),
    ],
)
def test_other_arguments_that_cannot_work_are_refused(arguments, words):
    with pytest.raises(SettingError, match=words):
        Schedule(*arguments)


PAGE = (Path(__file__).parents[2] / "docs/policies.md").read_text()


def test_every_example_of_the_page_is_a_schedule():
    examples = re.findall(r'Schedule\("([^"]+)"(?:, tokens_per_sample=(\d+))?\)', PAGE)
    assert len(examples) >= 6
    for text, tokens_per_sample in examples:
        Schedule(text, int(tokens_per_sample) if tokens_per_sample else None)


def test_every_policy_of_the_pages_commands_is_one():
    commands = re.findall(r'--policy (?:"([^"]+)"|(\S+:\S+))', PAGE)
    assert len(commands) >= 4
    for quoted, bare in commands:
        parse_policy(quoted or bare)


def test_the_pages_table_of_targets_is_the_formula():
    rows = re.findall(r"^\| (0\.\d+|1/3) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 7
    for target, multiple in rows:
        phi = 1 / 3 if target == "1/3" else float(target)
        assert pytest.approx(2 * phi / (1 - phi), abs=5e-4) == float(multiple)
