"""A recipe on DeepSpeed: the run that DDP would give, its checkpoints, and what is refused."""

import itertools
import resource
import warnings
from functools import partial

import pytest
import torch

from bigbatch.errors import RunError, SettingError
from bigbatch.log.history import history_of
from bigbatch_recipes.console import LiveView
from bigbatch_recipes.digits import DIGITS
from bigbatch_recipes.run_directory import RunDirectory
from bigbatch_recipes.train_run import Training, train_run
from deepspeed_training import quiet
from tensors import same
from torchrun import alone, torchrun

SMALL = {"double": False, "samples": 300, "epochs": 2, "micro_batch": 16, "target": 0.5}
CUT = 5  # steps before a training is left; the first epoch has 7 or so


def settings(**changes):
    return DIGITS.settings().with_changes({**SMALL, **changes})


def on_zero(stage, **changes):
    return settings(engine="deepspeed", zero_stage=stage, **changes)


def seen(record):
    return record.batch_size, record.samples, record.loss, record.lr[0]


def weights_of(training):
    return [p.detach().clone() for p in training.model.parameters()]


def curve(rank, ranks, asked):
    """What every step did, the scores after every epoch, and the weights."""
    quiet()
    training, rows, scores = Training(DIGITS, asked), [], []
    for _ in training.train.epochs(asked.epochs):
        rows += [seen(record) for record in training.engine.steps(training.loss)]
        scores.append(training.scores())
    return rows, scores, weights_of(training)


def assert_same(expected, actual):
    """To 1e-6 in float32: sums come in another order."""
    assert [row[:2] for row in expected] == [row[:2] for row in actual]
    for one, other in zip(expected, actual, strict=True):
        assert pytest.approx(one[2:], rel=1e-6, abs=1e-6) == other[2:]


@pytest.mark.parametrize("stage", [0, 2])
def test_two_ranks_on_deepspeed_draw_the_curve_of_ddp(deepspeed_ranks, stage):
    """A schedule, clipping and a batch that changes among it."""
    more = {"lr_schedule": "warm-up 1 epoch; cosine", "clip": 1.0}
    expected, judged, weights = deepspeed_ranks(2)(curve, settings(**more))[0]
    assert len({row[0] for row in expected}) > 2
    for rows, scores, others in deepspeed_ranks(2)(curve, on_zero(stage, **more)):
        assert_same(expected, rows)
        for one, other in zip(judged, scores, strict=True):
            assert pytest.approx(one, rel=1e-4) == other  # the weights differ by up to 1e-5
        for one, other in zip(weights, others, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


def folders_of(run):
    """Names of DeepSpeed's own checkpoints."""
    return [path.name for path in (run.path / "deepspeed").iterdir() if path.is_dir()]


def left_and_resumed(rank, ranks, folder, asked):
    """Rows of a run that is left after some steps, and resumed by another training."""
    quiet()
    view = LiveView(quiet=True)
    run = RunDirectory(folder / "run", asked.as_dict())
    first = Training(DIGITS, asked)
    rows = [seen(record) for record in itertools.islice(first.engine.steps(first.loss), CUT)]
    first.engine.save(run)
    again = Training(DIGITS, asked)
    train_run(again, run, view, "again")
    return rows, weights_of(again)


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [0, 2])
def test_a_run_that_was_left_continues_where_it_was(deepspeed_ranks, tmp_path, stage):
    asked = on_zero(stage, optimizer="vr-momentum" if stage else "momentum")
    run = RunDirectory.create(tmp_path / "run", asked.as_dict())
    expected, _, weights = deepspeed_ranks(2)(curve, asked)[0]
    rows, resumed = deepspeed_ranks(2)(left_and_resumed, tmp_path, asked)[0]
    assert expected[:CUT] == rows
    written = [
        (row["batch_size"], row["samples"], row["loss"]) for row in history_of(run.path).rows
    ]
    assert [row[:3] for row in expected[CUT:]] == written
    assert same(weights, resumed)
    assert [f"epoch{asked.epochs}-step{len(expected)}"] == folders_of(run)
    assert set(run.load_weights()) == set(DIGITS.model(asked).state_dict())


def folders_at_the_end(rank, ranks):
    """Where the last step of an epoch is saved, before the epoch's end and after it."""
    quiet()
    training = Training(DIGITS, on_zero(0))
    found = [training.state_dict()["folder"] for _ in training.engine.steps(training.loss)]
    return found[-1], training.state_dict()["folder"]


def test_no_checkpoint_is_written_over_the_one_that_counts(deepspeed_ranks):
    before, after = deepspeed_ranks(2)(folders_at_the_end)[0]
    assert before != after


def refusal(rank, ranks, asked):
    quiet()
    try:
        Training(DIGITS, asked)
    except SettingError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"double": True}, "parameters to float32, and the model has torch.float64"),
        ({"precision": "float16"}, "engine=deepspeed with precision=float16: DeepSpeed's loss"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused_in_one_line(deepspeed_ranks, changes, said):
    for found in deepspeed_ranks(2)(refusal, on_zero(0, **changes)):
        assert said in found
        assert "\n" not in found


def sums_kept(rank, ranks, asked):
    """How many parameters have a sum of their own after a real step."""
    quiet()
    training = Training(DIGITS, asked)
    next(training.engine.steps(training.loss))
    moments = training.optimizer.gsnr_state.moments
    watched = [p for p in training.model.parameters() if moments.is_reached(p)]
    return len(watched), sum(moments.reached_and_own_sum(p)[1] is not None for p in watched)


@pytest.mark.parametrize("engine", ["ddp", "deepspeed"])
def test_vr_keeps_no_sums_on_ranks_or_on_deepspeed(deepspeed_ranks, engine):
    ranks = 2 if engine == "ddp" else 1
    asked = settings(optimizer="vr-sgd", engine=engine, clip=1.0, batch_size=64)
    for found in deepspeed_ranks(ranks)(sums_kept, asked):
        assert (8, 0) == found


def saved_on_a_full_disk(rank, ranks, folder, asked):
    """What is said of two saves for which there is no room, after one for which there was."""
    quiet()
    run, training = RunDirectory(folder / "run", asked.as_dict()), Training(DIGITS, asked)
    steps, room = training.engine.steps(training.loss), resource.getrlimit(resource.RLIMIT_FSIZE)
    next(steps)
    training.engine.save(run)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, room[1]))  # bytes of a file
        with warnings.catch_warnings(record=True, action="always") as said:
            for _ in range(2):
                next(steps)
                training.engine.save(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    return [str(one.message) for one in said]


@pytest.mark.parametrize("stage", [0, 2])
def test_a_full_disk_leaves_the_checkpoint_before_and_is_said_once(
    deepspeed_ranks, tmp_path, stage
):
    asked = on_zero(stage)
    run = RunDirectory.create(tmp_path / "run", asked.as_dict())
    (said,) = deepspeed_ranks(1)(saved_on_a_full_disk, tmp_path, asked)
    about = [one for one in said if "checkpoint" in one]
    assert 1 == len(about)
    assert about[0].startswith("the checkpoint could not be written (")
    assert about[0].endswith("; training continues")
    assert ["epoch0-step1"] == folders_of(run)
    assert "epoch0-step1" == run.load_checkpoint()["folder"]


def saved_where_nothing_can_name_it(rank, ranks, folder, asked):
    """DeepSpeed writes its folder, and then checkpoint.pt cannot be replaced."""
    quiet()
    run, training = RunDirectory(folder / "run", asked.as_dict()), Training(DIGITS, asked)
    for _ in itertools.islice(training.engine.steps(training.loss), 2):
        training.engine.save(run)
        (run.path / ".checkpoint.pt.new").mkdir(exist_ok=True)


def test_a_folder_that_no_checkpoint_names_is_taken_away(deepspeed_ranks, tmp_path):
    asked = on_zero(0)
    run = RunDirectory.create(tmp_path / "run", asked.as_dict())
    deepspeed_ranks(1)(saved_where_nothing_can_name_it, tmp_path, asked)
    assert ["epoch0-step1"] == folders_of(run)
    assert "epoch0-step1" == run.load_checkpoint()["folder"]


def gone(rank, ranks, folder, state):
    quiet()
    training = Training(DIGITS, on_zero(2))
    try:
        training.load_state_dict(state, folder)
    except RunError as error:
        return str(error)
    return "none"


def damaged(rank, ranks, folder, asked):
    quiet()
    training, run = Training(DIGITS, asked), RunDirectory.open(folder / "run")
    next(training.engine.steps(training.loss))
    training.engine.save(run)
    training.load_state_dict(run.load_checkpoint(), run.path)
    file = sorted((run.path / "deepspeed").rglob("*.pt"))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    try:
        training.load_state_dict(run.load_checkpoint(), run.path)
    except RunError as error:
        return str(error)
    return "none"


def test_a_damaged_file_of_deepspeed_is_refused_by_name(deepspeed_ranks, tmp_path):
    asked = on_zero(0)
    RunDirectory.create(tmp_path / "run", asked.as_dict())
    (said,) = deepspeed_ranks(1)(damaged, tmp_path, asked)
    assert "epoch0-step1" in said
    assert ".pt is damaged" in said
    assert "delete checkpoint.pt to start the run again" in said


@pytest.mark.parametrize(
    ("ranks_then", "said"),
    [(3, "saved by 3 ranks at zero_stage=2, whose shards 2 cannot take"), (2, "step7 is gone")],
)
def test_a_checkpoint_that_cannot_be_loaded_says_why(deepspeed_ranks, tmp_path, ranks_then, said):
    state = {"model": {}, "folder": "step7", "ranks": ranks_then}
    for found in deepspeed_ranks(2)(gone, tmp_path, state):
        assert said in found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": "horovod"}, "engine='horovod' must be one of"),
        ({"zero_stage": 2}, "zero_stage=2 with engine=ddp"),
        ({"engine": "deepspeed", "zero_stage": 3}, "zero_stage=3 with engine=deepspeed"),
    ],
)
def test_an_engine_that_there_is_not_is_refused(changes, said):
    with pytest.raises(SettingError, match=said):
        settings(**changes)


@pytest.mark.release
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command_trains_and_resumes_on_deepspeed(tmp_path, ranks):
    """One rank is plain python, which DeepSpeed is given a group of one for."""
    start = partial(torchrun, ranks) if ranks > 1 else alone
    command, run = ["-m", "bigbatch", "train"], tmp_path / "run"
    options = ["--set", "engine=deepspeed", "--set", "zero_stage=2", "--set", "double=false"]
    made = start(
        *command, "digits", "--arm", "simigrad-vr", *options, "--epochs=1", "--run-dir", run
    )
    assert 0 == made.returncode, made.stderr
    again = start(*command, "--resume", tmp_path / "run")
    assert 0 == again.returncode, again.stderr
    assert 1347 == history_of(tmp_path / "run").rows[-1]["samples"]
