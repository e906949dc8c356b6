"""The advice as a function of made observations, and its pages."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.advisor.advise import Advice, parse_seconds
from bigbatch.advisor.batch_advice import DEVICES
from bigbatch.advisor.html_page import html_page
from bigbatch.advisor.lines_to_add import lines_to_add, schedule
from bigbatch.advisor.observations import Observations
from bigbatch.advisor.text_page import bars, conclusion, device_cells, number, text_page, two_digits
from bigbatch.errors import LoopError, SettingError
from bigbatch.log.chart_axis import text_width
from made_observations import advice_of, machine, measured, steady

VOID = {"meta", "line", "polyline"}


class Page(HTMLParser):
    """Checks that elements are nested, and keeps attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert [] == self.open

    def handle_starttag(self, tag, attributes):
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert tag == self.open.pop()

    def handle_data(self, data):
        self.text += data


def uncertain():
    """The signal is lost in some steps, so the interval has no upper end."""
    return [measured(i, 8.0 if i % 4 == 0 else -2.0, 5000.0) for i in range(24)]


def rising(first=100.0, last=40_000.0, steps=64):
    scales = [first * (last / first) ** (i / steps) for i in range(steps)]
    return [measured(i, 1 + 0.01 * (-1) ** i, scale) for i, scale in enumerate(scales)]


REFUSED = Advice(Observations(refusal="LBFGS <b>& others</b>"))
MADE = {
    "grow": advice_of(steady(10_000.0), machine()),
    "shrink": advice_of(steady(10.0), machine(fixed=1e-5), batch_size=256),
    "leave": advice_of(steady(64.0), machine(fixed=0.0064)),
    "undecided": advice_of(
        [measured(i, -2.0 if i % 2 else 4.0, 500.0) for i in range(40)],
        machine(fixed=0.02),
        batch_size=1024,
    ),
    "uncertain": advice_of(uncertain(), machine(), batch_size=8192),
    "unknown time": advice_of(steady(500.0), unseen=["the time of other batch sizes: no"]),
    "no signal": advice_of([measured(i, -1.0, 5.0) for i in range(20)], machine()),
    "no noise": advice_of([measured(i, 1.0, 0.0) for i in range(20)], machine()),
    "rising": advice_of(rising(), machine()),
    "one step": advice_of([measured(3, 1.0, 50.0)], machine()),
    "sgd": advice_of(steady(1000.0), machine(largest=100), optimizer="SGD", betas=()),
    "no rate": advice_of(steady(1000.0), machine(), lr={}, betas=()),
    "two rates": advice_of(steady(1000.0), machine(), lr={"Adam": (0.1, 0.01)}),
    "twelve ranks": advice_of(steady(1e5), machine(largest=40), batch_size=96, ranks=12),
    "names": advice_of(
        [measured(i, 1.0, 9.0, **{"<i>&": (1.0, 9.0)}) for i in range(20)],
        machine(),
        model="<script>alert(1)</script>",
        optimizer='A"&<b>',
        unseen=["groups: <img src=https://example.com/x>"],
    ),
    "refused": REFUSED,
}


@pytest.fixture(params=MADE)
def made(request):
    return MADE[request.param]


def assert_left(advice):
    """Nothing after the first sentence names another batch, or another rate, for this machine."""
    present, found = advice.found.batch_size, advice.as_dict()
    row = advice.this_machine
    assert (present, True, 1.0) == (found["batch_size"], found["leave_it"], found["lr_factor"])
    assert (present, 1.0, 1.0) == (row.batch_size, row.time, row.samples)
    assert row == advice.devices[0]
    assert ({}, {1.0}) == (lines_to_add(advice), {*found["lr_factors"].values()})
    assert [[*pair] for pair in advice.found.betas] == [[*pair] for pair in found["betas"]]
    page = html_page(advice)
    assert f"<span>batch</span><strong>{present:,}</strong><span>as it is</span>" in page
    assert "<span>learning rate</span><strong>x 1</strong>" in page
    for text in (str(advice), page):
        assert "learning rate as it is" in text
        assert not re.search(r"learning rate for|Lines to add|advised \d", text)


@pytest.mark.parametrize("fixed", [0.02, 0.025, 0.03])
def test_a_batch_within_ten_percent_of_the_least_time_is_left(fixed):
    advice = advice_of(steady(64.0), machine(fixed=fixed))
    assert advice.leaves_batch
    assert "Leave it at 64: the fastest batch, " in conclusion(advice)
    assert_left(advice)


@pytest.mark.parametrize(
    ("scale", "time", "present"),
    [
        (2e4, machine(fixed=0.01, per_sample=2e-4), 1024),
        (1000.0, machine(fixed=0.001, per_sample=0.001), 32),
        (100.0, machine(fixed=0.001, per_sample=1e-9), 16384),
    ],
)
def test_a_batch_that_is_not_slower_than_any_other_by_five_percent_is_left(scale, time, present):
    advice = advice_of(steady(scale), time, batch_size=present)
    row = advice.this_machine
    assert (present, 1.0, 1.0) == (row.batch_size, row.time, row.samples)
    assert row.low <= present <= row.high
    least = min(advice.relative_time(base << i) for i in range(24) for base in (1, 3))
    assert 1 / 1.05 <= least
    assert f"no batch trains more than 5% faster than the present one, {present}." in conclusion(
        advice
    )


@pytest.mark.parametrize("fixed", [0.0004, 0.1])
def test_a_batch_that_is_slower_by_more_is_not_left(fixed):
    advice = advice_of(steady(64.0), machine(fixed=fixed))
    assert not advice.leaves_batch
    assert "Leave it" not in str(advice)
    word = "Grow" if fixed == 0.1 else "Shrink"
    assert conclusion(advice).startswith(f"{word} the batch from 64 to {advice.batch_size}: ")


def test_an_interval_that_holds_the_present_batch_leaves_it_for_now():
    advice = MADE["undecided"]
    row = advice.this_machine
    assert (True, False) == (advice.is_undecided, advice.leaves_batch)
    assert row.low < 2 * advice.fastest_row.batch_size < 1024 <= row.high
    assert_left(advice)
    assert conclusion(advice).startswith(
        f"Leave it for now: the fastest batch on this machine is {row.low} to {row.high:,}, and"
    )


@pytest.mark.parametrize("present", [8192, 262_144])
def test_an_interval_without_an_upper_end_gives_no_batch(present):
    """It holds every larger one; the farthest size of the search is no end."""
    advice = advice_of(uncertain(), machine(), batch_size=present)
    assert math.inf == advice.trend.high
    assert present > withheld(advice)
    assert "learning rate" not in str(advice)
    assert conclusion(advice).startswith(
        f"No batch size: the fastest one may be any from {advice.bound} on, since the noise scale's"
    )
    assert any("no upper end" in doubt for doubt in advice.doubts)


def test_an_unknown_time_gives_no_batch_but_the_noise_scale():
    advice = MADE["unknown time"]
    assert advice.batch_size is None
    assert () == advice.devices
    assert {} == lines_to_add(advice)
    assert pytest.approx(500.0, rel=0.01) == advice.noise_scale
    assert "No fastest batch size" in str(advice)
    assert "not seen: the time of other batch sizes: no" in str(advice)


def test_no_signal_gives_no_batch_and_the_lower_end():
    advice = MADE["no signal"]
    assert advice.batch_size is None
    assert str(advice).startswith("No batch size: the gradient's signal was not")
    assert "from noise. The program ended after 400 steps" in conclusion(advice)  # to infinity
    some = advice_of([measured(i, 8.5 if i == 15 else -1.0, 5.0) for i in range(20)], machine())
    assert math.isfinite(some.trend.low)
    assert f"at least {number(some.trend.low)}" in conclusion(some)


def test_no_advice_gives_no_number():
    assert math.isnan(REFUSED.noise_scale)
    assert all(map(math.isnan, REFUSED.noise_scale_interval))
    assert (None, None, ()) == (REFUSED.batch_size, REFUSED.this_machine, REFUSED.devices)
    with pytest.raises(LoopError, match="no advice: LBFGS"):
        _ = REFUSED.trend
    assert "No advice: LBFGS <b>& others</b>\n" == str(REFUSED)
    assert "" == re.sub(r"LBFGS.*", "", Page(html_page(REFUSED)).text.split("No advice")[1]).strip()


def test_backwards_that_differ_by_position_are_refused():
    rows = [measured(i, 1.0, 9.0, features=((1.0,), (2.0,), (3.0,), (4.0,))) for i in range(20)]
    advice = advice_of(rows, machine())
    assert "not micro-batches of one loss" in advice.refusal
    assert advice.batch_size is None


def test_the_advised_batch_is_the_fastest_of_its_noise_scale_on_each_number_of_devices():
    advice = MADE["grow"]
    assert list(DEVICES) == [row.devices for row in advice.devices]
    for row in advice.devices:
        assert row.batch_size == advice.fastest(advice.noise_scale, row.devices)
        assert row.low <= row.batch_size <= row.high
        assert 0 == row.batch_size % row.devices
        assert row.time <= 1 or (row.devices, "-") == (512, device_cells(row)[4])
    assert "-: the present batch of 64 has no sample for some devices" in str(advice)
    assert None is advice.as_dict()["devices"][3]["time"]
    assert advice.this_machine == advice.devices[0]
    assert pytest.approx(1 / advice.this_machine.time) == advice.this_machine.speedup
    assert pytest.approx(advice.this_machine.time) == advice.relative_time(advice.batch_size)


def withheld(advice):
    """The bound of a page that advises no size."""
    found = advice.as_dict()
    assert (None, advice.bound) == (advice.batch_size, found["bound"])
    assert ((), {}, []) == (advice.devices, lines_to_add(advice), found["devices"])
    assert not re.search("Grow|Shrink|Lines to add", str(advice) + html_page(advice))
    return advice.bound


@pytest.mark.parametrize(("fixed", "size"), [(0.14, 2048), (0.3, None)])
def test_a_size_beyond_32_times_the_present_one_is_a_bound(fixed, size):
    advice = advice_of(steady(8000.0), machine(fixed=fixed), batch_size=64)
    assert size == advice.batch_size
    if size is None:
        assert 2048 == withheld(advice)
        assert "At least 2048; no size is advised" in conclusion(advice)
        assert "Train with 2048, and observe that run" in conclusion(advice)
        rate = "learning rate for 2048: x 5.66 (0.001 to 0.00566)"  # the root of 32
        assert all(rate in page(advice) for page in (str, html_page))


def test_a_size_below_a_32nd_of_the_present_one_is_a_bound():
    advice = advice_of(steady(10.0), machine(fixed=1e-5), batch_size=4096)
    assert 128 == withheld(advice)
    assert conclusion(advice).startswith("At most 128; no size is advised")


def test_an_interval_without_an_upper_end_gives_a_bound():
    """The signal is lost in one step of four; at its lower end the noise scale is far above 16."""
    advice = advice_of(uncertain(), machine(), batch_size=16)
    assert math.inf == advice.trend.high
    assert 16 < withheld(advice) <= 512
    assert f"At least {advice.bound}, where the present batch is 16" in conclusion(advice)
    assert f"learning rate for {advice.bound}: x " in str(advice)
    assert "no upper end. The program ended after 400 steps" in conclusion(advice)


def test_sgd_grows_its_rate_by_its_gain_and_adam_by_the_root():
    sgd, adam = MADE["sgd"], MADE["grow"]
    scale = sgd.noise_scale
    assert pytest.approx((1 + scale / 64) / (1 + scale / 256)) == sgd.lr_factor(256)
    assert (2.0, 0.5) == (adam.lr_factor(256), adam.lr_factor(16))
    assert 1.0 == sgd.lr_factor(64) == adam.lr_factor(64)


def test_betas_keep_their_half_life_in_samples_within_a_factor_of_four():
    advice = MADE["grow"]
    assert ((0.9, 0.999),) == advice.betas(64)
    assert [pytest.approx((0.81, 0.998001))] == [*advice.betas(128)]
    assert [pytest.approx((0.9**4, 0.999**4))] == [*advice.betas(256)]
    assert () == advice.betas(257) == advice.betas(15)
    assert () == MADE["sgd"].betas(128)


def test_each_betas_of_the_parameter_groups_and_the_momentum_are_shown_once():
    """nanochat's: Muon for matrices, AdamW with three pairs."""
    pairs = ((0.8, 0.95), (0.9, 0.95), (0.96, 0.95))
    advice = advice_of(steady(1000.0), machine(fixed=0.009), betas=pairs, momentum=(0.95,))
    assert 192 == advice.batch_size  # three times as many
    betas = "; ".join(f"{a:g}, {b:g} to {a**3:.4g}, {b**3:.4g}" for a, b in pairs)
    assert f"betas of the same half-life in samples: {betas} (worth" in str(advice)
    assert "momentum of the same half-life in samples: 0.95 to 0.8574 (worth" in str(advice)
    found = json.loads(json.dumps(advice.as_dict()))
    assert [[*pair] for pair in pairs] == found["found"]["betas"]
    assert [pytest.approx(0.95**3)] == found["momentum"]
    assert [pytest.approx([a**3, b**3]) for a, b in pairs] == found["betas"]


@pytest.mark.parametrize(
    ("name", "doubts"),
    [("rising", True), ("grow", False), ("no signal", False), ("no noise", False)],
)
def test_only_a_noise_scale_that_rose_is_said_to_rise(name, doubts):
    assert doubts == any("still rising" in doubt for doubt in MADE[name].doubts)


def test_few_steps_and_consecutive_steps_are_doubts():
    advice = MADE["one step"]
    assert any("only 1 steps" in doubt for doubt in advice.doubts)
    observations = replace(advice.observations, way="consecutive steps")
    assert any("biased" in doubt for doubt in Advice(observations).doubts)


# pages


def test_everything_is_strict_json_that_comes_back(made):
    text = json.dumps(made.as_dict(), allow_nan=False)
    back = json.loads(text)
    assert back == json.loads(json.dumps(back))
    assert made.refusal == back["refusal"]
    assert made.batch_size == back.get("batch_size")
    assert len(made.observations.measurements) == len(back["measurements"])


def test_the_html_page_is_one_well_formed_file_without_links(made):
    text = html_page(made)
    page = Page(text)
    references = {"href", "src", "srcset", "action", "data", "xlink:href", "style"}
    assert [] == [name for name, _ in page.attributes if name in references]
    assert "url(" not in text
    assert "@import" not in text
    assert not re.findall(r"<(script|img|link|iframe|b|i)\b", text)
    linked = text.replace("https://example.com/x", "")  # in the reason for a refusal, as text
    assert not re.findall(r"https?://", linked)


def test_names_are_escaped_and_shown():
    page = Page(html_page(MADE["names"]))
    for name in ("<script>alert(1)</script>", 'A"&<b>', "<i>&", "<img src="):
        assert name in page.text


def test_pages_have_no_number_that_is_none(made):
    for text in (text_page(made), html_page(made)):
        assert not re.findall(r"\bnan\b|\bNone\b", text)


@pytest.mark.parametrize("ending", ["html", "json", "txt"])
def test_a_page_is_written_by_its_ending(tmp_path, made, ending):
    path = tmp_path / f"page.{ending}"
    made.write(path)
    text = path.read_text(encoding="utf-8")
    if ending == "json":
        assert json.loads(text) == json.loads(json.dumps(made.as_dict()))
    else:
        assert text == {"html": html_page, "txt": text_page}[ending](made)


@pytest.mark.parametrize("name", ["page", "page.pdf", "page.HTML", ".html"])
def test_another_ending_is_refused(tmp_path, name):
    with pytest.raises(SettingError, match=r"must end in \.html, \.json, \.txt"):
        REFUSED.write(tmp_path / name)


# lines to add


def numbers_in(text, *names):
    return [int(re.search(rf"{name}[= ](\d+)", text)[1]) for name in names]


WITH_LINES = [name for name, advice in MADE.items() if lines_to_add(advice)]


@pytest.mark.parametrize("name", WITH_LINES)
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("largest", [None, 1, 20, 37, 100_000])
def test_the_lines_of_all_trainers_are_the_advised_batch(name, ranks, largest):
    made = MADE[name].observations
    time = replace(made.time, largest=largest)
    observations = replace(made, time=time, found=replace(made.found, ranks=ranks))
    advice = Advice(observations)
    lines, batch = lines_to_add(advice), advice.batch_size
    if not lines:
        assert batch == advice.found.batch_size or withheld(advice)
        return
    deepspeed = json.loads(lines["DeepSpeed"])
    micro = deepspeed["train_micro_batch_size_per_gpu"]
    accumulation = deepspeed["gradient_accumulation_steps"]
    assert batch == deepspeed["train_batch_size"] == micro * accumulation * ranks
    assert micro <= (largest or batch)
    trainer = numbers_in(
        lines["HF Trainer"], "per_device_train_batch_size", "gradient_accumulation_steps"
    )
    assert [micro, accumulation] == trainer
    names = ("batch_size", "accumulate_grad_batches")
    assert [micro, accumulation] == numbers_in(lines["Lightning"], *names)
    assert [micro] == numbers_in(lines["PyTorch"], "batch_size")
    assert (accumulation > 1) == (f"{accumulation} backwards a step" in lines["PyTorch"])


@pytest.mark.parametrize("name", WITH_LINES)
@pytest.mark.parametrize("ranks", [1, 3, 8])
@pytest.mark.parametrize("largest", [None, 20, 37])
def test_megatron_accepts_its_lines(name, ranks, largest):
    """Its rule: whole micro-batches on all ranks."""
    made = MADE[name].observations
    time = replace(made.time, largest=largest)
    advice = Advice(replace(made, time=time, found=replace(made.found, ranks=ranks)))
    if not (lines := lines_to_add(advice)):
        assert advice.batch_size == advice.found.batch_size or withheld(advice)
        return
    line = lines["Megatron-LM"]
    micro, size = numbers_in(line, "micro-batch-size", "global-batch-size")
    assert 0 == size % (micro * ranks)
    assert micro <= (largest or size)


@pytest.mark.parametrize("name", WITH_LINES)
def test_a_schedule_is_read_by_bigbatch(name):
    advice = MADE[name]
    line = lines_to_add(advice)["bigbatch, a schedule"]
    policy = eval(line.removeprefix("policy="), {"bb": bb})
    assert isinstance(policy, bb.Schedule)
    assert ("to" in schedule(advice)) == (name == "rising")


@pytest.mark.parametrize(
    ("scale", "fixed", "present", "optimizer"),
    [(1e4, 0.01, 64, "Adam"), (1000.0, 0.1, 64, "SGD"), (100.0, 3e-4, 128, "SGD")],
)
def test_the_line_of_adaptive_batch_trains_as_it_stands(scale, fixed, present, optimizer):
    settings = {"batch_size": present, "optimizer": optimizer}
    advice = advice_of(steady(scale), machine(fixed=fixed), **settings)
    advised, line = advice.batch_size, lines_to_add(advice)["bigbatch, measuring"]
    assert advised != present
    assert all(part.strip() in str(advice) for part in line.splitlines())
    model = nn.Linear(4, 1)
    data = TensorDataset(torch.randn(4 * advised, 4))
    names = {
        "bb": bb,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "loader": DataLoader(data, batch_size=present, shuffle=True),
    }
    exec(line, names)
    train, sizes = names["train"], []
    for step in train:
        for (x,) in step:
            step.backward(model(x).square().mean())
        sizes.append(step.update().batch_size)
    assert advised == sizes[0]
    policy = train.controller.policy
    assert min(present, advised) == policy.min_batch
    assert max(present, advice.this_machine.high) == policy.max_batch


def test_each_of_two_optimizers_has_its_rate():
    """SGD by its gain, others by the root; a loop of bigbatch steps a Composite of them."""
    rates = {"SGD": (0.1, 0.01), "AdamW": (3e-4,)}
    advice = advice_of(
        steady(1000.0),
        machine(fixed=0.05),
        optimizer="SGD and AdamW",
        lr=rates,
        betas=(),
        composite="sgd, adamw",
    )
    batch = advice.batch_size
    assert batch > 128
    factors = {"SGD": (1 + 1000 / 64) / (1 + 1000 / batch), "AdamW": math.sqrt(batch / 64)}
    found, lines, page = advice.as_dict(), lines_to_add(advice), html_page(advice)
    assert pytest.approx(factors, rel=1e-2) == found["lr_factors"]
    assert "model, bb.Composite(sgd, adamw), loader," in lines["bigbatch, measuring"]
    trainer = lines["HF Trainer"]
    assert "optimizers=(bb.Composite(sgd, adamw), None)" in trainer
    assert "learning_rate" not in trainer
    for name, factor in found["lr_factors"].items():
        assert f"learning rate of {name} for {batch}: x {factor:.3g} (" in str(advice)
        tile = f"<span>learning rate</span><strong>x {factor:.3g}</strong><span>of {name}</span>"
        assert tile in page
        line = f"{name} lr={', '.join(f'{lr * factor:.3g}' for lr in rates[name])}"
        assert line in page
        assert line in trainer


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("present", [64, 96, 100])
@pytest.mark.parametrize("scale", [5.0, 64.0, 1e4])
def test_every_device_has_as_many_samples_of_a_batch(ranks, present, scale):
    present = -(-present // ranks) * ranks
    advice = advice_of(steady(scale), machine(), batch_size=present, ranks=ranks)
    for row in advice.devices:
        is_own = row.devices == ranks
        sizes = [row.batch_size, row.low, row.high]
        assert all(size >= row.devices for size in sizes)
        assert is_own or not any(size % row.devices for size in sizes)
        assert math.isnan(row.time) == (present < row.devices)
        assert pytest.approx(advice.relative_samples(row.batch_size)) == row.samples


def test_the_chart_of_the_noise_scale_has_every_measured_step():
    """Its axis is that of all observed steps; steps without signal are hollow."""
    advice = advice_of([measured(5 * i, 1 if i % 3 else -1, 500.0) for i in range(33)], machine())
    chart = html_page(advice).partition("How the noise scale moved")[2].partition("<h2>")[0]
    assert 'data-x="0 400 ' in chart
    points, moved, _ = re.findall(r'<g class="series.*?</g>', chart)
    assert (33, 11) == (points.count("<path"), points.count("marker hollow"))
    assert 4 == moved.count("<path")
    assert 1 == len(re.findall('class="band', chart))


@pytest.mark.parametrize(("present", "scale"), [(64, 400.0), (64, 3e4), (1024, 60.0)])
def test_names_of_marks_stand_apart(present, scale):
    advice = advice_of(steady(scale), machine(fixed=0.02), batch_size=present)
    chart = html_page(advice).partition("Time to the same progress, by")[2].partition("<h2>")[0]
    texts = re.findall(r'x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">(\w+ [\d,]+)<', chart)
    ends = []
    for x, _, anchor, text in texts:
        width = text_width(text, 11.5)
        ends.append((float(x) - width * (anchor == "end"), float(x) + width * (anchor == "start")))
    assert 2 == len(texts)
    assert all(0 <= low < high <= 420 for low, high in ends)
    assert ends[0][1] < ends[1][0] or ends[1][1] < ends[0][0] or texts[0][1] != texts[1][1]


def test_the_observed_trainer_comes_first():
    for engine, first in [("HF Trainer", "HF Trainer"), ("DDP", "PyTorch"), ("DeepSpeed",) * 2]:
        advice = advice_of(steady(1e4), machine(), engine=engine)
        assert first == next(iter(lines_to_add(advice)))


def test_the_text_shows_the_lines_of_the_observed_trainer_alone():
    text = str(advice_of(steady(1e4), machine(), engine="HF Trainer"))
    assert "per_device_train_batch_size=" in text
    assert "--micro-batch-size" not in text
    assert "-o advice.html shows those of PyTorch, Lightning, DeepSpeed, Megatron-LM, " in text


# details of pages


def test_bars_are_of_logarithms_and_empty_without_signal():
    assert "▁▄█ " == bars([1.0, 10.0**0.45, 10.0, math.inf])
    assert "▁▁" == bars([3.0, 3.0])
    assert "  " == bars([math.inf, 0.0])


def test_numbers_have_two_or_three_digits():
    expected = ["inf", "0.0123", "12.3", "1,235", "0"]
    assert expected == [number(x) for x in (math.inf, 0.01234, 12.34, 1234.6, 0.0)]
    assert [0, 7, 42, 120, 12000] == [two_digits(x) for x in (0.5, 7, 42, 128.9, 12999)]


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("5min", 300), ("1.5 h", 5400), (" 2M ", 120), ("3sec", 3)]
)
def test_a_time_is_read_with_its_unit(text, expected):
    assert expected == parse_seconds(text)


@pytest.mark.parametrize("text", ["", "5", "0s", "-1s", "min", "1e3s", "5 days", "nan s"])
def test_another_text_is_no_time(text):
    with pytest.raises(SettingError, match="is no time such as"):
        parse_seconds(text)
