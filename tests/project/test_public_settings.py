"""Every public setting is checked by type and range: nonsense is refused in a sentence of ours.

What a setting may be is written down here once more, as plain predicates, apart from the library's
annotations.
"""

import math
import pydoc
import random
import re
import traceback
from numbers import Integral, Real

import numpy as np
import pytest
import torch
from torch import nn

import bigbatch as bb
from bigbatch.errors import LoopError, SettingError
from bigbatch.optim import LAMB, LARS, VRLAMB, VRLARS, VRSGD, VarianceReduced, VRAdam


def is_number(value):
    return isinstance(value, Real) and not isinstance(value, bool) and abs(value) < 1e300


def number(low, high, *, open_low=False, open_high=True):
    def fits(value):
        above = is_number(value) and (value > low if open_low else value >= low)
        return above and (value < high if open_high else value <= high)

    return fits


def is_count(value):
    return is_whole(value) and value >= 1


def is_whole(value):
    return isinstance(value, Integral) and is_number(value) and value >= 0


def is_flag(value):
    return isinstance(value, bool)


def is_none(value):
    return value is None


def one_of(*choices):
    return lambda value: isinstance(value, str) and value in choices


def either(*kinds):
    return lambda value: any(kind(value) for kind in kinds)


def pair_of(kind):
    return lambda value: (
        isinstance(value, tuple | list) and len(value) == 2 and all(map(kind, value))
    )


def amount(units):
    return lambda value: (
        value is None
        or (isinstance(value, str) and bool(re.fullmatch(rf"[1-9]\d*K? (?:{units})s?", value)))
    )


def is_function(value):
    return callable(value)


count = either(is_none, is_count)
groups = either(is_none, lambda value: is_count(value) and value > 1)
coverage = either(is_none, number(0, 1, open_low=True))
share, positive = number(0, 1), number(0, math.inf, open_low=True)
not_negative = number(0, math.inf)
factor = number(1, 1e9, open_low=True, open_high=False)
rate = either(not_negative, lambda value: torch.is_tensor(value) and value.numel() == 1)
bounds = {"min_batch": count, "max_batch": count}
VR = {
    "gamma": number(0, 1, open_low=True, open_high=False),
    "r_max": number(1, math.inf),
    "beta3": either(is_none, share),
    "watch": is_flag,
    "fused": either(is_none, is_flag),
}
DECAY = {"lr": rate, "weight_decay": not_negative, "maximize": is_flag}
ADAM = {"betas": pair_of(share), "eps": not_negative}
MOMENTUM = {"momentum": share, "nesterov": is_flag}


def weights():
    return [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))]


def adaptive(**settings):
    model = nn.Linear(2, 1)
    parts = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": torch.utils.data.DataLoader(torch.randn(64, 2), batch_size=8),
        "policy": bb.Fixed(8),
    }
    return bb.AdaptiveBatch(model, **(parts | settings))


# what is made, with arguments that work, and what each of its settings may be
PUBLIC = {
    "SimiGrad": (
        bb.SimiGrad,
        {},
        {"target": number(-1, 1, open_low=True), "grow": factor, **bounds}
        | {"shrink": number(0, 1, open_low=True)},
    ),
    "NoiseScale": (bb.NoiseScale, {}, {"multiple": positive, **bounds}),
    "Fixed": (bb.Fixed, {"batch_size": 8}, {"batch_size": is_count}),
    "Schedule": (
        bb.Schedule,
        {"text": "64, x2 at 9 tokens", "tokens_per_sample": 2},
        {"tokens_per_sample": either(is_none, positive)},
    ),
    "Shadow": (bb.Shadow, {"policy": bb.Fixed(8)}, {"policy": lambda value: False}),
    "Seesaw": (bb.Seesaw, {}, {"max_batch": count, "cap": is_none}),
    "LateSwitch": (
        bb.LateSwitch,
        {"at": 0.5, "policy": bb.Fixed(8)},
        {"at": number(0, 1, open_low=True), "policy": lambda value: False},
    ),
    "ema_decay": (
        bb.ema_decay,
        {"decay": 0.9, "batch_size": 8, "base_batch": 8},
        {"decay": share, "batch_size": is_count, "base_batch": is_count},
    ),
    "Needs": (
        bb.Needs,
        {},
        {"statistics": is_flag, "average": is_flag, "history": is_flag, "lr_decay": is_flag}
        | {"lr_scaling": either(is_none, one_of("any", "sqrt", "linear", "adascale"))}
        | {"max_change": either(is_none, factor), "batch_size": count, **bounds},
    ),
    "Decision": (
        bb.Decision,
        {"batch_size": 8, "reason": "said"},
        {"batch_size": is_count, "lr_factor": not_negative, "advice": count}
        | {"reason": lambda value: isinstance(value, str)},
    ),
    "Controller": (
        bb.Controller,
        {"policy": bb.SimiGrad(), "batch_size": 8},
        {"policy": lambda value: False, "batch_size": is_count, "base_batch": count, **bounds}
        | {"decide_every": is_count}
        | {"smoothing": either(one_of("auto"), amount("step|sample|token"))}
        | {
            "dead_band": number(0, 1e9, open_high=False),
            "warmup": amount("step|sample|token|epoch"),
        }
        | {"max_change": either(is_none, factor)},
    ),
    "BatchPlan.fit": (
        bb.BatchPlan.fit,
        {"batch_size": 64, "max_micro": 8},
        {"batch_size": is_count, "ranks": is_count, "max_micro": is_count, **bounds}
        | {"min_batch": is_count}
        | {"min_micro_batches": is_count, "min_accumulation": is_count, "micro": count},
    ),
    "NoiseAverage": (
        bb.NoiseAverage,
        {"window": 100},
        {"window": positive, "unit": one_of("samples", "steps"), "confidence": coverage},
    ),
    "GradientMeter": (
        lambda **settings: bb.GradientMeter(nn.Linear(2, 1), **settings),
        {},
        {"loss": one_of("weighted", "mean"), "confidence": coverage, "per_layer": is_flag}
        | {"half_batch_cosine": is_flag}
        | {"every": is_count, "groups": groups, "cluster_parts": groups}
        | {"scaler": is_none},
    ),
    "Batches": (
        bb.Batches,
        {"loader": [torch.ones(4)]},
        {"remainder": one_of("share", "step", "drop")}
        | {"virtual_ranks": count, "split": is_none, "count": is_none},
    ),
    "ElasticDistributedSampler": (
        bb.ElasticDistributedSampler,
        {"data": range(64)},
        {"shuffle": is_flag, "seed": is_whole, "num_replicas": count}
        | {"rank": lambda value: value is None or (is_whole(value) and value == 0)},
    ),
    "AdaptiveBatch": (
        adaptive,
        {},
        {"batch_size": count, "base_batch": count, "micro_batch": count}
        | {"fixed_micro_batch": is_flag, "scheduler": is_none, "scaler": is_none}
        | {"min_micro_batches": count, "groups": groups}
        | {"lr_scaling": either(is_none, one_of("sqrt", "linear", "adascale"), is_function)}
        | {name: (lambda value: False) for name in ("optimizer", "loader", "policy")}
        | {"transport": lambda value: value is False}  # SGD has no betas
        | {"meter": is_none, "every": either(is_none, is_whole)}
        | {"accumulate_float32_above": either(is_none, is_whole)},
    ),
    "VarianceReduced": (
        lambda **settings: VarianceReduced(torch.optim.SGD(weights(), lr=0.1), **settings),
        {},
        VR,
    ),
    **{
        made.__name__: (lambda made=made, **settings: made(weights(), **settings), {}, options)
        for made, options in (
            (VRSGD, VR | DECAY | MOMENTUM | {"dampening": is_number}),
            (VRAdam, VR | DECAY | ADAM | {"decoupled_weight_decay": is_flag}),
            (VRLARS, VR | DECAY | MOMENTUM | {"trust_coefficient": positive}),
            (VRLAMB, VR | DECAY | ADAM | {"eps": positive, "exclude_bias_and_norm": is_flag}),
            (LARS, DECAY | MOMENTUM | {"trust_coefficient": positive, "fused": VR["fused"]}),
            (LAMB, DECAY | ADAM | {"eps": positive, "fused": VR["fused"]}),
        )
    },
}

ODD = [
    *(None, True, False, 0, 1, 2, -1, 3, 64, 0.0, 0.1, 0.5, 0.9, 1.0, -0.5, 1.5, 2.0, 1e40, 1e-40),
    *(math.inf, -math.inf, math.nan, 10**400, "", "3", "0.5", "abc", "sqrt", "mean", "drop", b"3"),
    *("16 steps", "4K samples", "2 epochs", "1.5 epochs", "0 steps", "2 tokens", "steps"),
    *([], [0.9, 0.99], (0.9, 0.99), (2,), (0.9, "x"), {}, {"a": 1}, set(), object(), print, int),
    *(
        np.int64(4),
        np.int64(-4),
        np.float32(0.5),
        np.float64(0.5),
        np.bool_(True),
        np.array([1, 2]),
    ),
    *(torch.tensor(0.5), torch.tensor(4), torch.ones(2), torch.float32, nn.Linear(1, 1), bb.Fixed),
]


def refused_or_made(name, settings):
    """Whether it was refused; what is raised is ours, or a sentence of torch's own optimizers."""
    make, works, _ = PUBLIC[name]
    try:
        make(**(works | settings))
    except bb.BigbatchError:
        return True
    except ValueError as error:
        if "/torch/optim/" not in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise
        return True
    return False


def cases(name, count, seed):
    rng, kinds = random.Random(f"{name} {seed}"), PUBLIC[name][2]
    for _ in range(count):
        chosen = rng.sample(sorted(kinds), k=min(len(kinds), rng.choice([1, 1, 2])))
        yield {setting: rng.choice(ODD) for setting in chosen}


def require_nonsense_refused(name, count, seed):
    """Sense may be refused too, for two settings that do not go together."""
    kinds = PUBLIC[name][2]
    for settings in cases(name, count, seed):
        nonsense = [one for one, value in settings.items() if not kinds[one](value)]
        refused = refused_or_made(name, settings)
        assert refused or not nonsense, f"{name}({settings}) was accepted: {nonsense}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUBLIC)
def test_nonsense_is_refused_in_a_sentence(name):
    require_nonsense_refused(name, count=40, seed=0)


@pytest.mark.release
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUBLIC)
def test_ten_thousand_settings_raise_no_error_but_ours(name):
    require_nonsense_refused(name, count=10_000 // len(PUBLIC) + 1, seed=1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUBLIC)
def test_each_odd_value_of_a_setting_alone_is_judged_as_written_here(name):
    """Sense is not refused: a setting alone, with the others at what works."""
    kinds = PUBLIC[name][2]
    for setting in kinds:
        for value in (
            None,
            True,
            "3",
            "16 steps",
            "2 epochs",
            0.5,
            2,
            np.int64(4),
            np.float64(0.5),
            math.nan,
            [],
            0,
        ):
            if kinds[setting](value) and _goes_alone(name, setting, value):
                assert not refused_or_made(name, {setting: value}), f"{name}({setting}={value!r})"


def _goes_alone(name, setting, value):
    """Not where a setting needs another one."""
    return not (
        (setting == "nesterov" and value)  # a momentum
        or (setting == "fused" and value)  # built kernels
        or (setting in ("r_max", "micro", "base_batch", "batch_size", "scheduler"))
        or (name == "BatchPlan.fit" and setting in ("max_batch", "ranks"))
    )


# what is not a plain value


def test_numbers_of_numpy_become_pythons():
    policy = bb.SimiGrad(np.float64(0.25), max_batch=np.int64(512))
    assert bb.SimiGrad(0.25, max_batch=512) == policy
    assert "SimiGrad(target=0.25, min_batch=None, max_batch=512, grow=1.1, shrink=0.9)" == repr(
        policy
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bb.SimiGrad(torch.tensor(0.3)), r"target=<Tensor> .* pass its \.item\(\)"),
        (
            lambda: adaptive(optimizer=[torch.optim.SGD(weights())]),
            "1 optimizers are given as a list",
        ),
        (lambda: adaptive(policy=bb.SimiGrad), r"pass SimiGrad\(\.\.\.\)"),
        (lambda: VRLARS(weights(), foreach=True), "foreach is unknown here; there are gamma"),
        (lambda: VRAdam([{"params": weights(), "lr": "fast"}]), "lr='fast' must be a number"),
        (lambda: VRSGD(weights()).add_param_group({"params": weights()[0], "gamma": "x"}), "gamma"),
    ],
)
def test_what_is_no_plain_value_is_refused_with_the_remedy(make, words):
    with pytest.raises(SettingError, match=words):
        make()


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused():
    model = nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader(torch.randn(64, 2), batch_size=8)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(SettingError, match=r"LBFGS.step\(\) needs a closure"):
        bb.AdaptiveBatch(model, optimizer, loader, policy=bb.SimiGrad())


@pytest.mark.parametrize("loss", [None, 0.3, "loss", np.float64(0.3)])
def test_a_loss_that_is_no_tensor_is_refused_by_its_type(loss):
    step = next(iter(adaptive()))
    next(iter(step))
    with pytest.raises(LoopError, match=type(loss).__name__):
        step.backward(loss)


@pytest.mark.parametrize(
    "weight", ["3", True, [1], torch.ones(3), torch.ones(2, 1), np.bool_(True)]
)
def test_a_weight_that_is_no_number_is_refused(weight):
    model = nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader(torch.randn(64, 2), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = next(iter(bb.AdaptiveBatch(model, optimizer, loader, policy=bb.SimiGrad())))
    x = next(iter(step))
    with pytest.raises(SettingError, match="weight="):
        step.backward(model(x).mean(), weight=weight)


def test_all_that_a_stream_does_not_say_is_asked_for_at_once():
    stream = [torch.randn(16, 2)]
    with pytest.raises(SettingError, match="pass micro_batch= and batch_size="):
        adaptive(loader=stream, policy=bb.SimiGrad())
    with pytest.raises(SettingError, match=r"pass batch_size=$"):
        adaptive(loader=stream, policy=bb.SimiGrad(), micro_batch=8)


@pytest.mark.parametrize("samples", [0, -8, math.nan, "8", None, True])
def test_a_batch_of_the_schedule_that_is_none_is_refused(samples):
    train = adaptive()
    with pytest.raises(SettingError, match="scheduler_batch="):
        train.scheduler_batch = samples


@pytest.mark.parametrize("name", [*bb.__all__, "optim.VRSGD"])
def test_help_shows_which_values_a_setting_allows(name):
    text = pydoc.render_doc(f"bigbatch.{name}")
    assert "object at 0x" not in text
    assert name != "SimiGrad" or "Annotated[float, in (0, 1)] = 0.9" in text
