"""The hand loops train as their scripts do, and measure what `GradientMeter` measures."""

import pytest
import torch
from torch import nn

import bigbatch as bb
from advised_script import losses_of
from oracles.hand_loop import GROUPS, groups_of, measured, module_of, repeat

ALONE = [
    pytest.param("nanogpt_style", ["--bf16"]),
    pytest.param("timm_style", ["--amp"], marks=pytest.mark.thorough),
    pytest.param("timm_style", ["--norm=batch"], marks=pytest.mark.thorough),
    pytest.param("two_optimizers", [], marks=pytest.mark.thorough),
]
STEPS = 12


@pytest.mark.parametrize(("script", "arguments"), ALONE)
def test_a_hand_loop_has_the_losses_of_its_script(tmp_path, script, arguments):
    arguments = [*arguments, f"--steps={STEPS}"]
    assert losses_of(tmp_path, script, *arguments) == repeat(script, arguments, groups=8).losses


@pytest.mark.thorough
def test_a_hand_loop_of_all_ranks_has_the_losses_of_its_script(tmp_path):
    arguments = [f"--steps={STEPS}"]
    expected = losses_of(tmp_path, "ddp_script", *arguments, ranks=2)
    assert expected == repeat("ddp_script", arguments, groups=8, ranks=2).losses


def assert_near(expected, actual, rel):
    """The signal is a difference, |G|^2 - noise / N: its tolerance is relative to |G|^2."""
    sqnorm = expected.grad_sqnorm + expected.grad_variance / expected.samples
    assert pytest.approx(expected.grad_variance, rel=rel) == actual.grad_variance
    assert pytest.approx(expected.grad_sqnorm, abs=rel * sqnorm) == actual.grad_sqnorm
    assert expected.samples == actual.samples
    assert expected.micro_batches == actual.micro_batches


def test_micro_batches_by_hand_are_those_of_the_meter():
    script = module_of("nanogpt_style")
    arguments = [f"--steps={STEPS}", "--grad_clip=1e9"]
    args = script.parse(arguments)
    by_hand = repeat("nanogpt_style", arguments).measurements()  # draws from the same generator
    data, model, optimizer = script.build(args)
    meter, accumulation = bb.GradientMeter(model), args.gradient_accumulation_steps
    for step, expected in enumerate(by_hand):
        for group in optimizer.param_groups:
            group["lr"] = script.get_lr(step, args)
        for _ in range(accumulation):
            (model(*script.get_batch(data, args))[1] / accumulation).backward()
        actual = meter.read(samples=[args.batch_size] * accumulation)
        optimizer.step()
        optimizer.zero_grad()
        assert_near(expected, actual, rel=1e-4)


@pytest.mark.parametrize(
    ("precision", "rel"), [("", 1e-4), ("--amp", 3e-2), ("--amp --amp-dtype float16", 1e-2)]
)
def test_groups_by_hand_are_those_of_the_meter(precision, rel):
    """Under autocast both gradients are rounded, to 8 or 11 bits, each on its own way."""
    arguments = [*precision.split(), f"--steps={STEPS}", "--batch-size=29", "--clip-grad=1e9"]
    by_hand = repeat("timm_style", arguments, groups=GROUPS).measurements()
    script = module_of("timm_style")
    args = script.parse(arguments)
    loader, model, optimizer, scheduler, scaler = script.build(args)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    meter = bb.GradientMeter(model, groups=GROUPS, scaler=scaler)
    for expected, (images, target) in zip(by_hand, script.endless(loader), strict=False):
        with script.autocast_of(args):
            loss = criterion(model(images), target)
        scaler.scale(loss).backward()
        assert_near(expected, meter.read(samples=[len(images)]), rel)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()


def test_two_opposite_gradients_by_hand_are_noise_alone():
    """By hand: G = 0, noise = (8 + 8) / 1, signal = 0 - 16 / 16."""
    one = torch.ones(1, dtype=torch.float64)
    assert (-1.0, 16.0, 16, 2) == measured([one, -one], [8, 8])


def test_groups_by_hand_are_consecutive_and_larger_ones_come_first():
    assert [[0, 1, 2], [3, 4], [5, 6]] == [part.tolist() for part in groups_of(torch.arange(7), 3)]
    assert [[0], [1]] == [part.tolist() for part in groups_of(torch.arange(2), 3)]
