"""The bounds of a batch: its first size unless `min_batch` says otherwise, and the data set."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.log.history import history_of
from bigbatch.log.html_report import write_report
from loop_steps import trained
from numbered_samples import build, steps_of

torch.set_num_threads(1)
NOTE = (
    r"^the noise scale is \S+, below the batch of {}: a smaller batch would need fewer samples; {}$"
)
SHRINK = "min_batch= lets it shrink"
WHOLE = (
    "the batch has grown to all 400 samples of an epoch, so an epoch is one step; "
    "max_batch= bounds it"
)


def adaptive(policy, batch=32, samples=8000, virtual_ranks=1, **settings):
    """A linear classifier that hardly learns: its noise scale is about 1."""
    own = torch.Generator().manual_seed(1)
    x = 1 + 0.2 * torch.randn(samples, 4, generator=own)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = TensorDataset(x, torch.zeros(samples, dtype=torch.long))
    loader = bb.Batches(DataLoader(data, batch), virtual_ranks=virtual_ranks)
    return bb.AdaptiveBatch(model, optimizer, loader, policy=policy, **settings)


class Halves:
    """A policy of one's own, by statistics."""

    def decide(self, statistics, now):
        return bb.Decision(max(1, now.target_batch_size // 2), "halves")


@pytest.mark.parametrize(
    "policy",
    [
        bb.SimiGrad(),
        bb.NoiseScale(),
        bb.Goodput(overhead=4),
        bb.LateSwitch(0.5, bb.SimiGrad()),
        bb.Controller(bb.SimiGrad(), 32, smoothing="16 steps"),
        Halves(),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_a_policy_that_reads_statistics_never_goes_below_the_first_batch(policy):
    train = adaptive(policy)
    if isinstance(policy, bb.LateSwitch):
        train.scheduler = torch.optim.lr_scheduler.ExponentialLR(train.optimizer, 0.9)
    assert 32 == train.controller.min_batch
    assert {32} == {record.batch_size for record in trained(train, 40)}


@pytest.mark.parametrize(
    "policy",
    [
        bb.SimiGrad(min_batch=1),
        bb.NoiseScale(min_batch=1),
        bb.Goodput(overhead=4, min_batch=1),
        bb.Controller(bb.SimiGrad(), 32, min_batch=1),
        bb.Controller(Halves(), 32, min_batch=1),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_min_batch_lets_it_shrink_to_the_smallest_measured_step(policy):
    assert 4 == min(record.batch_size for record in trained(adaptive(policy), 40))


def test_policies_that_state_sizes_are_followed_below_the_first_batch():
    schedule = bb.Schedule("32, 16 from 3 steps, 8 from 6 steps")
    sizes = [record.batch_size for record in trained(adaptive(schedule), 9)]
    assert [32] * 3 + [16] * 3 + [8] * 3 == sizes
    assert {8} == {r.batch_size for r in trained(adaptive(bb.Fixed(8), batch_size=32), 5)[1:]}


@pytest.mark.parametrize(
    ("batch", "settings", "first"),
    [
        (30, {}, 30),  # 30 or 32 samples, where 28 are nearer or as near
        (30, {"samples": 30}, 30),
        (30, {"samples": 30, "virtual_ranks": 4}, 28),  # there are no more, and 28 is 4 x 7
        (30, {"max_batch": 31, "virtual_ranks": 4}, 28),
        (30, {"virtual_ranks": 4}, 30),
        (32, {"max_batch": 16}, 16),
        (3, {}, 4),  # of which each has a sample
        (8, {"fixed_micro_batch": True}, 32),
    ],
)
def test_the_bound_is_one_that_steps_can_keep(batch, settings, first):
    settings = dict(settings)
    policy = bb.SimiGrad(max_batch=settings.pop("max_batch", None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batch_size is out of bounds
        train = adaptive(policy, batch, **settings)
    assert first == train.controller.min_batch
    assert first <= min(record.batch_size for record in trained(train, 20))


def test_a_stream_that_turns_out_to_be_shorter_lowers_the_bound():
    class Stream:
        def __iter__(self):
            yield torch.randn(20, 4), torch.zeros(20, dtype=torch.long)

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loader = bb.Batches(Stream(), virtual_ranks=3)
    train = bb.AdaptiveBatch(
        model, optimizer, loader, policy=bb.SimiGrad(), batch_size=32, micro_batch=32
    )
    assert 32 == train.controller.min_batch
    records = [trained(train, 9)[0] for _ in range(6)]
    assert 18 == train.controller.min_batch == train.controller.decision.batch_size
    assert {20} == {record.batch_size for record in records}


def test_the_bound_is_that_of_the_run_after_resuming():
    train = adaptive(bb.SimiGrad())
    trained(train, 8)
    resumed = adaptive(bb.SimiGrad(), batch_size=64, base_batch=32)
    resumed.load_state_dict(train.state_dict())
    assert 32 == resumed.controller.min_batch == resumed.plan.batch_size


def test_the_gpt_loop_of_the_page_never_goes_below_its_batch():
    torch.manual_seed(0)
    tokens = torch.arange(4096) % 50  # what comes next is the same for each, at first

    def get_batch():
        ix = torch.randint(len(tokens) - 17, (8,)).tolist()
        return tuple(torch.stack([tokens[i + d : i + d + 16] for i in ix]) for d in (0, 1))

    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sizes = {"micro_batch": 8, "batch_size": 32}
    train = bb.AdaptiveBatch(
        model, optimizer, get_batch, policy=bb.SimiGrad(), scheduler=lambda it: 1e-3, **sizes
    )

    def loop():
        for step in train:
            for x, y in step:
                step.backward(cross_entropy(model(x).flatten(0, 1), y.flatten()))
            yield step.update()
            if train.base_step == 100:
                break

    with pytest.warns(UserWarning, match=NOTE.format(32, SHRINK)):
        records = list(loop())
    assert 32 == min(record.batch_size for record in records)


def test_a_shadow_may_advise_less_than_the_first_batch():
    records = trained(adaptive(bb.Shadow(bb.NoiseScale(2))), 20)
    assert {32} == {record.batch_size for record in records}
    assert 4 == records[-1].decision.advice  # the smallest measured step


# the note


@pytest.mark.parametrize(
    ("policy", "batch", "remedy"),
    [
        (bb.SimiGrad(), 32, SHRINK),
        (bb.NoiseScale(), 32, SHRINK),
        (bb.SimiGrad(min_batch=8), 8, SHRINK),
        (bb.SimiGrad(min_batch=1), 4, "no measured step is smaller"),
    ],
)
def test_a_batch_above_the_noise_scale_is_noted_once(tmp_path, policy, batch, remedy):
    train = adaptive(policy, log=tmp_path)
    note = NOTE.format(batch, remedy)
    with pytest.warns(UserWarning, match=note) as found:
        trained(train, 70)
    resumed = adaptive(policy, log=tmp_path)
    resumed.load_state_dict(train.state_dict())
    trained(resumed, 60)
    assert 1 == sum("noise scale" in str(one.message) for one in found)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 130 == len(rows)
    noted = [row for row in rows if "below the batch" in row["decision_reason"]]
    assert 1 == len(noted)
    write_report([history_of(tmp_path)], tmp_path / "page.html", "runs")
    page = (tmp_path / "page.html").read_text()
    assert f"below the batch of {batch}: a smaller batch would need fewer samples" in page


@pytest.mark.parametrize(
    "policy",
    [bb.Fixed(32), bb.Shadow(bb.SimiGrad()), bb.Schedule("32"), bb.NoiseScale(2000)],
    ids=str,
)
def test_a_batch_that_no_bound_holds_is_not_noted(policy):
    train = adaptive(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(train, 70)


class Doubles:
    """A policy of one's own, by statistics."""

    def decide(self, statistics, now):
        return bb.Decision(now.target_batch_size * 2, "doubles")


def test_a_batch_that_grows_to_the_whole_data_set_is_noted_once(tmp_path):
    train = adaptive(Doubles(), samples=400, log=tmp_path)
    with pytest.warns(UserWarning, match="grown to all") as found:
        sizes = [record.target_batch_size for record in trained(train, passes=3)]
    assert [32, 64, 128, 256, 400] == list(dict.fromkeys(sizes))
    resumed = adaptive(Doubles(), samples=400, log=tmp_path)
    resumed.load_state_dict(train.state_dict())
    trained(resumed, passes=3)
    assert [(WHOLE, "loop_steps.py")] == [
        (str(one.message), Path(one.filename).name) for one in found
    ]
    rows = history_of(tmp_path).rows
    assert [f"doubles; note: {WHOLE}"] == [
        row["decision_reason"] for row in rows if "note" in row["decision_reason"]
    ]
    write_report([history_of(tmp_path)], tmp_path / "page.html", "runs")
    assert f"{WHOLE}." in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("policy", "batch"),
    [
        (bb.Controller(Doubles(), 32, max_batch=400), 32),
        (bb.Controller(Doubles(), 32, max_batch=200), 32),
        (Doubles(), 400),
        (bb.Fixed(400), 32),
        (bb.Schedule("32, 400 from 3 steps"), 32),
    ],
)
def test_a_batch_of_all_samples_that_was_asked_for_is_not_noted(policy, batch):
    train = adaptive(policy, batch, samples=400)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(train, passes=3)


def on_ranks(rank, ranks):
    """The warnings of a rank whose batch is above the noise scale."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        policy = bb.Controller(Halves(), 200, smoothing="16 steps")
        train = build(rank, ranks, "ddp", 2, policy=policy, batch_size=None, every=1)
        train.optimizer.param_groups[0]["lr"] = 1e-6  # so that it stays there
        records = [record for _, record in steps_of(train, 10**9, 90)]
    notes = [str(one.message) for one in found if "below the batch" in str(one.message)]
    return notes, {record.target_batch_size for record in records}


def test_ranks_keep_the_bound_and_one_of_them_says_so(ranks):
    (notes, sizes), (others, _) = ranks(2)(on_ranks)
    assert {200} == sizes
    assert [] == others
    assert 1 == len(notes)
