"""Replay: other policies on a finished run's log, against closed forms and the command."""

import pytest

from bigbatch import (
    Controller,
    Fixed,
    Goodput,
    GradientStatistics,
    LateSwitch,
    NoiseScale,
    Schedule,
    Seesaw,
    SimiGrad,
)
from bigbatch.errors import RunError, SettingError
from bigbatch.log.history import history_of
from bigbatch.log.replay import Trace, replay, time_steps
from bigbatch.log.replay import fit_time as fit_to_times
from bigbatch.policies.parse import parse_policy
from log_rows import add_rows, write_log


def fit_time(rows):
    return fit_to_times(rows, time_steps(rows))


def log(batches, noise=lambda samples: (1.0, 1000.0), seconds=lambda B: 0.01 + 0.001 * B, epoch=0):
    """The rows of a run with these batches; noise is a function of samples seen before a step."""
    rows, samples, time = [], 0, 0.0
    for step, batch in enumerate(batches, start=1):
        signal, noise_of_step = noise(samples)
        samples, time = samples + batch, time + seconds(batch)
        rows.append(
            {
                "schema": 3,
                "step": step,
                "epoch": epoch and (samples - 1) // epoch,
                "samples": samples,
                "batch_size": batch,
                "micro_batches": 4,
                "loss": 1.0,
                "lr": [0.1],
                "grad_sqnorm": signal,
                "grad_variance": noise_of_step,
                "skipped": False,
                "metrics": None,
                "elapsed_seconds": time,
            }
        )
    return rows


@pytest.fixture
def logged(tmp_path):
    """Writes rows as a run and reads its history."""

    def write(rows, name="run", settings=None):
        settings = {"policy": "fixed", "epochs": 1} | (settings or {})
        run = write_log(tmp_path / name, [], settings)
        for row in rows:
            add_rows(run, [row])
        return history_of(run)

    return write


def only(history, policy, **options):
    return replay(history, {"it": policy}, **options).replayed[0]


# signal and noise as functions of samples


def test_a_log_is_constant_over_each_of_its_steps():
    rows = log([100, 50, 250], lambda samples: (1.0 + samples, 2.0 * samples))
    trace = Trace(rows)
    assert 400 == trace.samples
    inside = trace.mean(110, 140, batch_size=30)
    assert pytest.approx((101.0, 200.0)) == (inside.grad_sqnorm, inside.grad_variance)
    assert (30, 4) == (inside.samples, inside.micro_batches)
    across = trace.mean(0, 400, batch_size=400)
    assert pytest.approx((100 * 1 + 50 * 101 + 250 * 151) / 400) == across.grad_sqnorm
    assert pytest.approx((50 * 200 + 250 * 300) / 400) == across.grad_variance


def test_a_step_without_a_measurement_has_that_of_the_next_and_the_end_that_of_the_last():
    rows = log([100] * 4, lambda samples: (1.0 + samples, 7.0))
    rows[0]["grad_sqnorm"] = rows[3]["grad_variance"] = None
    trace = Trace(rows)
    assert [101, 101, 201, 201] == [
        trace.mean(at, at + 50, 50).grad_sqnorm for at in (0, 120, 220, 340)
    ]


def test_a_whole_number_that_no_integer_of_numpy_holds_is_a_number(logged):
    rows = log([100] * 4, lambda samples: (10**30, 10**31))
    assert [100] * 4 == only(logged(rows), Fixed(100)).batch_sizes


def test_a_run_in_which_nothing_was_measured_cannot_be_replayed(logged):
    rows = log([100] * 4)
    for row in rows:
        row["grad_sqnorm"] = row["grad_variance"] = None
    with pytest.raises(RunError, match="no step was measured"):
        replay(logged(rows), {"it": Fixed(8)})
    with pytest.raises(RunError, match="no step was measured"):
        replay(logged([], "empty"), {"it": Fixed(8)})


# the walk


def test_a_policy_walks_over_all_samples_with_its_own_batches(logged):
    walk = only(logged(log([100] * 10)), Fixed(300))
    assert [300, 300, 300, 100] == walk.batch_sizes
    assert [300, 600, 900, 1000] == walk.ends


def test_a_policy_sees_the_logs_noise_with_its_own_batch(logged):
    def noise(samples):
        return 1.0, 1000.0 if samples < 20_000 else 4000.0

    history = logged(log([100] * 400, noise))
    walk = only(history, SimiGrad(0.3), smoothing="50 samples")
    controller, done, expected = Controller(SimiGrad(0.3), 100, smoothing="50 samples"), 0, []
    while done < 40_000:
        expected.append(min(controller.decision.batch_size, 40_000 - done))
        early = max(0, min(20_000 - done, expected[-1])) / expected[-1]
        step = GradientStatistics(1.0, 1000 * early + 4000 * (1 - early), expected[-1], 4)
        done += expected[-1]
        controller.next(step)
    assert expected == walk.batch_sizes
    rest = 2 * 0.3 / 0.7
    by = dict(zip(walk.ends, walk.batch_sizes, strict=True))
    middle = [batch for end, batch in by.items() if 10_000 < end < 20_000]
    assert pytest.approx(1000 * rest, rel=0.12) == sum(middle) / len(middle)


def test_a_walk_starts_where_the_policy_does_else_where_the_run_did(logged):
    history = logged(log([100] * 10))
    assert 32 == only(history, Schedule("32, x2 every 200 samples")).batch_sizes[0]
    assert 100 == only(history, SimiGrad(0.3)).batch_sizes[0]
    assert 120 == only(history, SimiGrad(0.3, min_batch=120)).batch_sizes[0]


def test_schedules_count_the_logs_epochs_and_their_own_steps(logged):
    history = logged(log([100] * 12, epoch=400))  # rows 4, 8, 12 end an epoch
    by_epoch = only(history, Schedule("100, 50 from 1 epoch, 200 from 2 epochs")).batch_sizes
    # the first step of an epoch decides in it
    assert [100] * 5 + [50] * 7 + [200, 150] == by_epoch
    assert [100, 100, 100] + [300] * 3 == only(
        history, Schedule("100, 300 from 3 steps")
    ).batch_sizes


def test_no_batch_exceeds_an_epoch(logged):
    assert 400 == max(only(logged(log([100] * 12, epoch=400)), Fixed(10**6)).batch_sizes)


def test_a_controllers_options_are_every_policys(logged):
    history = logged(log([100] * 100))
    result = replay(
        history, {"a": SimiGrad(0.3), "b": NoiseScale(2.0)}, warmup="500 samples", max_change=1.5
    )
    for walk in result.replayed:
        assert [100] * 5 == walk.batch_sizes[:5]
        assert walk.batch_sizes[5] > 100
        assert max(walk.batch_sizes[5:7]) <= 150 * 1.5
    with pytest.raises(SettingError, match="decide_every=0"):
        only(history, Fixed(8), decide_every=0)


# costs


def test_the_time_of_a_step_is_fitted_to_the_log():
    time = fit_time(log([10, 200, 30, 400, 50] * 6))
    assert pytest.approx((0.01, 0.001)) == (time.fixed, time.per_sample)
    assert pytest.approx(2 * 0.01 + 0.001 * 300) == time.seconds([100, 200])


@pytest.mark.parametrize(("other", "sizes_vary"), [(140, False), (160, True)])
def test_both_parts_of_the_time_need_batch_sizes_that_differ_by_half(other, sizes_vary):
    time = fit_time(log([100, other] * 6))
    assert sizes_vary == (time.largest > time.smallest) == (time.fixed > 0)


def test_one_batch_size_is_all_time_per_sample():
    time = fit_time(log([100] * 9))
    assert (0.0, pytest.approx(0.11 / 100)) == (time.fixed, time.per_sample)


def test_steps_whose_rows_are_missing_are_no_part_of_the_time_of_the_next():
    rows = log([10, 200, 30, 400, 50] * 12)
    del rows[7:19]
    assert pytest.approx((0.01, 0.001)) == (fit_time(rows).fixed, fit_time(rows).per_sample)
    rows = log([100] * 9)
    del rows[:7]
    assert pytest.approx((0.11 / 100, 100)) == (fit_time(rows).per_sample, fit_time(rows).largest)


def test_measured_steps_are_timed_only_if_there_are_no_others():
    rows = log([10, 200] * 20)
    assert pytest.approx((0.01, 0.001)) == (fit_time(rows).fixed, fit_time(rows).per_sample)
    waited = 0.0
    for n, row in enumerate(rows):
        if n % 3:
            row["grad_sqnorm"] = row["grad_variance"] = None
        else:
            waited += 7.0
        row["elapsed_seconds"] += waited
    assert pytest.approx((0.01, 0.001)) == (fit_time(rows).fixed, fit_time(rows).per_sample)


def test_tests_and_clocks_that_go_back_do_not_count_as_training():
    rows = log([10, 200, 30, 400, 50, 60] * 6)
    for n in (1, 8, 15):
        rows[n]["metrics"] = {"test accuracy, %": 50.0}
        for row in rows[n + 1 :]:
            row["elapsed_seconds"] += 100.0  # the test is in the next step's difference
    for row in rows[20:]:
        row["elapsed_seconds"] -= 50.0
    time = fit_time(rows)
    assert pytest.approx((0.01, 0.001)) == (time.fixed, time.per_sample)


def test_a_log_of_one_step_has_its_time_too():
    assert pytest.approx(0.11 / 100) == fit_time(log([100])).per_sample


@pytest.mark.parametrize("batch", [10, 100, 1000])
def test_progress_is_mccandlishs(logged, batch):
    history = logged(log([100] * 100))  # B_simple is 1,000 throughout
    result = replay(history, {"it": Fixed(batch)})
    steps = 10_000 / batch
    assert pytest.approx(steps / (1 + 1000 / batch)) == result.replayed[0].progress(result.trace)
    # samples to equal progress grow as 1 + B / B_simple, steps as 1 + B_simple / B
    share = result.logged.progress(result.trace) / result.replayed[0].progress(result.trace)
    assert pytest.approx((1 + batch / 1000) / (1 + 100 / 1000)) == share
    assert pytest.approx(100 * (1 + 1000 / batch) / (1 + 1000 / 100)) == share * steps


def test_a_steps_progress_is_by_the_noise_of_where_it_lies(logged):
    history = logged(log([100] * 100, lambda samples: (1.0, 1000.0 if samples < 5000 else 4000.0)))
    result = replay(history, {"it": Fixed(200), "across": Fixed(600)})
    it, across = result.replayed
    assert pytest.approx(50 / 11 + 50 / 41) == result.logged.progress(result.trace)
    assert pytest.approx(25 / 6 + 25 / 21) == it.progress(result.trace)
    # the ninth step's middle is sample 5,100; the last step has 400
    assert pytest.approx(8 * 3 / 8 + 8 * 3 / 23 + 1 / 11) == across.progress(result.trace)


def test_without_any_signal_there_is_no_progress_and_none_to_equal(bigbatch, logged):
    history = logged(log([100] * 10, lambda _: (-1.0, 1000.0)))
    result = replay(history, {"it": Fixed(50)})
    assert 0 == result.logged.progress(result.trace)
    assert 0 == result.replayed[0].progress(result.trace)
    _, out, _ = bigbatch("replay", history.path, "--policy", "fixed:50")
    cells = next(line for line in out.splitlines() if "fixed:50" in line).split()
    assert ["0.0", "-", "-"] == cells[-3:]


def test_progress_uses_averages_since_one_step_is_often_without_signal(logged):
    def noise(samples):
        return (9.0 if samples % 200 else -7.0), 1000.0  # 1 on average

    result = replay(logged(log([100] * 800, noise)), {"it": Fixed(100)})
    assert pytest.approx(800 / 11) == result.replayed[0].progress(result.trace)


# the scheduled learning rate


def cut_log(batches, scaled):
    """A run whose scheduled rate is halved after every 400 samples."""
    rows = log(batches, seconds=lambda B: 1.0)
    for previous, row in zip([None, *rows], rows, strict=False):
        seen = previous["samples"] if previous else 0
        row["lr"] = [0.1 * 0.5 ** (seen // 400) * scaled(row["batch_size"]) * (0.5 if seen else 1)]
        row["next_lr_factor"] = 0.5
    return rows


@pytest.mark.parametrize(
    ("rule", "scaled"),
    [("sqrt", lambda B: (B / 50) ** 0.5), ("linear", lambda B: B / 50), ("none", lambda B: 1.0)],
)
def test_seesaw_follows_the_scheduled_rate_that_the_log_tells(logged, rule, scaled):
    settings = {"lr_scaling": rule, "base_batch": 50}
    history = logged(cut_log([100] * 10 + [50] * 4, scaled), settings=settings)
    walk = only(history, Seesaw(max_batch=200))
    assert [100] * 4 + [200] * 4 == walk.batch_sizes
    assert [100] * 8 + [300, 100] == only(history, LateSwitch(0.25, Fixed(300))).batch_sizes


@pytest.mark.parametrize("settings", [{}, {"lr_scaling": "adascale", "base_batch": 50}])
def test_a_log_that_does_not_tell_the_scheduled_rate_is_refused(logged, settings):
    history = logged(log([100] * 4), settings=settings)
    with pytest.raises(RunError, match="it follows the scheduled learning rate"):
        only(history, Seesaw())


# names


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("fixed:256", Fixed(256)),
        ("simigrad", SimiGrad()),
        ("simigrad:0.3", SimiGrad(0.3)),
        (" simigrad : target = 0.3 , max_batch=512", SimiGrad(0.3, max_batch=512)),
        ("noise-scale:multiple=0.8", NoiseScale(0.8)),
        ("schedule:64, x2 every 2K samples", Schedule("64, x2 every 2K samples")),
        (
            "schedule:64, x2 at 9 tokens; tokens_per_sample=5",
            Schedule("64, x2 at 9 tokens", tokens_per_sample=5),
        ),
    ],
)
def test_a_text_names_a_policy(text, policy):
    assert policy == parse_policy(text)


WRONG_POLICIES = [
    ("magic", "policy 'magic' is unknown; choose one of: fixed, simigrad, noise-scale"),
    ("fixed", "policy 'fixed' lacks a value; write fixed:batch_size=..."),
    ("fixed:", "policy 'fixed:' lacks a value; write fixed:batch_size=..."),
    ("fixed:many", "batch_size='many' must be a whole number"),
    ("fixed:1.5", "batch_size='1.5' must be a whole number"),
    ("simigrad:target=high", "target='high' must be a number"),
    ("simigrad:goal=0.3", "'goal=0.3' is none of simigrad:target=...,min_batch=..."),
    ("simigrad:target=", "'target=' is none of simigrad:target=..."),
    ("simigrad:min_batch=8,0.3", "'0.3' is none of"),
    ("simigrad:target=2", "target=2.0 must be a number in (-1, 1)"),
    ("schedule", "policy 'schedule' lacks a value; write schedule:TEXT; tokens_per_sample=..."),
    ("schedule:64, x2", "clause 'x2': allowed here"),
]


@pytest.mark.parametrize(("text", "message"), WRONG_POLICIES)
def test_a_text_that_names_no_policy_is_refused_with_what_is_allowed(text, message):
    with pytest.raises(SettingError) as refusal:
        parse_policy(text)
    assert message in str(refusal.value)


# the command


@pytest.fixture
def run(logged):
    return logged(log([100] * 30 + [200] * 10, epoch=1000)).path


POLICIES = ("--policy", "fixed:50", "--policy", "schedule:32, x2 every 1K samples")


def test_the_command_shows_every_policy_in_one_table(bigbatch, run):
    status, out, err = bigbatch("replay", run, *POLICIES)
    assert (0, "") == (status, err)
    for word in ("run: 5,000 samples", "the run itself", "fixed:50", "progress", "10 ms + 1 ms"):
        assert word in out
    cells = next(line for line in out.splitlines() if "fixed:50" in line).split()
    steps, progress = 100, 100 / (1 + 1000 / 50)
    itself = 30 / (1 + 1000 / 100) + 10 / (1 + 1000 / 200)
    share = itself / progress
    expected = [steps, 50, 6.0, round(progress, 1), round(steps * share), round(5000 * share)]
    assert [f"{number:,}" for number in expected] == cells[1:]


@pytest.mark.parametrize("batches", [[100] * 40, [100] * 39 + [109], [50] + [100] * 9])
def test_a_log_with_nearly_one_batch_size_says_what_its_time_is_worth(bigbatch, logged, batches):
    history = logged(log(batches), "even")
    _, out, _ = bigbatch("replay", history.path, *POLICIES)
    assert "differ too little: all time counts as per sample" in " ".join(out.split())


def test_skipped_steps_are_no_part_of_a_replay(logged):
    rows = log([100] * 10)
    for row in rows[1::2]:
        row |= {"skipped": True, "grad_sqnorm": None, "grad_variance": None}
    result = replay(logged(rows), {"same": Fixed(100)})
    assert [100] * 5 == result.logged.batch_sizes == result.replayed[0].batch_sizes
    assert result.logged.progress(result.trace) == result.replayed[0].progress(result.trace)


def test_steps_without_a_gradient_make_no_progress(logged):
    alive = replay(logged(log([100] * 90), "alive"), {})
    dead = log([100] * 100, lambda samples: (1.0, 1000.0) if samples < 9000 else (0.0, 0.0))
    result = replay(logged(dead, "dead"), {})
    progress = result.logged.progress(result.trace)
    assert pytest.approx(alive.logged.progress(alive.trace), rel=0.03) == progress


def test_names_with_brackets_are_shown_as_they_are(bigbatch, logged):
    history = logged(log([100] * 40), "[red]run[-z]")
    status, out, _ = bigbatch("replay", history.path, *POLICIES)
    assert 0 == status
    assert "[red]run[-z]" in out


def test_several_runs_have_a_table_each_and_one_figure(bigbatch, run, logged, tmp_path):
    other = logged(log([50] * 40), "other").path
    status, out, _ = bigbatch("replay", run, other, *POLICIES, "-o", tmp_path / "figure.svg")
    assert 0 == status
    assert 2 == out.count("the run itself took")
    assert "other: 2,000 samples" in out
    drawn = (tmp_path / "figure.svg").read_text()
    for label in ("the run itself", "fixed:50", "schedule:32, x2 every 1K samples", "other: batch"):
        assert label in drawn


@pytest.mark.parametrize(
    "options",
    [
        {"smoothing": "500 samples"},
        {"smoothing": None},
        {"decide_every": 2},
        {"dead_band": 1.0},
        {"max_change": 1.05},
        {"warmup": "1000 samples"},
        {"smoothing": "500 samples", "dead_band": 0.5},
    ],
    ids=str,
)
def test_the_controllers_options_are_the_commands(bigbatch, logged, options):
    history = logged(log([100] * 80, lambda samples: (1.0, 1000.0 if samples < 4000 else 100.0)))
    *others, _ = options.items()
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    status, out, err = bigbatch("replay", history.path, "--policy", "simigrad:0.3", *given)
    assert (0, "") == (status, err)
    steps = next(line for line in out.splitlines() if "simigrad:0.3" in line).split()[1]
    expected = len(only(history, SimiGrad(0.3), **options).batch_sizes)
    assert expected == int(steps)
    assert expected != len(only(history, SimiGrad(0.3), **dict(others)).batch_sizes)


def test_what_takes_effect_badly_is_a_note(bigbatch, run):
    status, _, err = bigbatch("replay", run, "--policy", "noise-scale", "--smoothing", "none")
    assert (0, 1) == (status, err.count("\n"))
    assert err.startswith("bigbatch: note: NoiseScale goes by one step's noise scale")


def test_a_replay_averages_as_a_controller_does_by_default(bigbatch, run):
    given = ["replay", run, "--policy", "noise-scale", "--policy", "simigrad"]
    default, auto = bigbatch(*given), bigbatch(*given, "--smoothing", "auto")
    assert (0, "") == (default[0], default[2])
    assert default == auto != bigbatch(*given, "--smoothing", "none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "magic"], "policy 'magic' is unknown"),
        (["--policy", "schedule:64, x2"], "clause 'x2'"),
        (["--policy", "fixed:8", "--decide-every", "0"], "decide_every=0"),
        (["--policy", "simigrad", "--smoothing", "often"], "smoothing='often' must be"),
        (["--policy", "fixed:8", "-o", "figure.pdf"], "-o figure.pdf: the ending must be .svg"),
        (["--policy", "fixed:8", "-o", "no/such/folder.svg"], "cannot be written"),
        ([], "--policy"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line(bigbatch, run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, err = bigbatch("replay", run, *arguments)
    assert (2, 1) == (status, err.count("\n"))
    assert message in err
    assert not list(tmp_path.glob("figure*"))


def test_a_run_that_is_none_is_one_line(bigbatch, tmp_path):
    status, _, err = bigbatch("replay", tmp_path / "nowhere", "--policy", "fixed:8")
    assert (2, 1) == (status, err.count("\n"))
    assert "there is no run directory" in err


def test_no_walk_takes_fewer_samples_than_a_step_can_be_cut_into(logged):
    history = logged(log([100] * 20))
    least = history.rows[0]["micro_batches"]
    assert {least} == {*only(history, Fixed(1)).batch_sizes}


def test_a_run_in_which_nothing_is_measured_yet_is_left_out_among_others(bigbatch, logged, run):
    rows = log([100] * 3)
    for row in rows:
        row["grad_sqnorm"] = row["grad_variance"] = None
    early = logged(rows, "early").path
    status, out, _ = bigbatch("replay", early, run, "--policy", "fixed:50")
    assert 0 == status
    assert "early: nothing is measured yet; left out" in out
    assert "run: 5,000 samples" in out
    status, _, err = bigbatch("replay", early, "--policy", "fixed:50")
    assert (2, True) == (status, "nothing to replay" in err)


def test_a_figure_of_another_kind_is_refused_before_anything_is_replayed(bigbatch, run):
    status, out, _ = bigbatch("replay", run, "--policy", "fixed:50", "-o", "figure.pdf")
    assert (2, "") == (status, out)


def test_a_loss_that_is_not_finite_is_no_obstacle(logged):
    rows = log([100] * 20)
    rows[7]["loss"] = None  # as a log has it
    assert 20 == len(only(logged(rows), Fixed(100)).batch_sizes)


def test_goodput_takes_the_times_of_the_log(logged):
    history = logged(log([100, 300] * 30, noise=lambda samples: (1.0, 4000.0)))
    for row in history.rows:
        row["loss"] = 1.0 / (1 + row["samples"])
    sizes = only(history, Goodput()).batch_sizes
    # 0.01 s and 0.001 s a sample: an overhead of 10 samples
    assert sizes[-2] == pytest.approx((10 * 4000) ** 0.5, rel=0.02)


@pytest.mark.parametrize("policy", [Goodput(), Seesaw(cap=Goodput()), LateSwitch(0.5, Goodput())])
def test_a_log_of_one_batch_size_has_no_times_for_goodput(logged, policy):
    rows = log([100] * 40)
    for number, row in enumerate(rows):
        row["lr"] = [0.1 / (1 + number)]
    with pytest.raises((SettingError, RunError), match=r"overhead=|follows the scheduled"):
        only(logged(rows), policy)
