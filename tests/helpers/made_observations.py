"""Observations of a training that never ran, from which tests make advice."""

from dataclasses import replace

from bigbatch import GradientStatistics
from bigbatch.advisor.advise import Advice
from bigbatch.advisor.cluster_time import Network
from bigbatch.advisor.observations import Found, MachineTime, Measurement, Observations
from bigbatch.policies.step_time import StepTime


def machine(fixed=0.01, per_sample=1e-4, optimizer=0.0, data=0.0, rest=0.0, largest=None):
    """Where the seconds of a step go."""
    return MachineTime(StepTime(fixed, per_sample, 16, 256), optimizer, data, rest, largest)


def found(batch_size=64, ranks=1, **others):
    """A training of one backward a step."""
    settings = {
        "optimizer": "Adam",
        "engine": "PyTorch",
        "model": "Network",
        "parameters": 1000,
        "gradient_bytes": 4000,
        "ranks": ranks,
        "accumulation": 1,
        "micro_batch": batch_size // ranks,
        "counted": "counted in dimension 0 of the model's first tensor",
        "rows": 1.0,
        "dim": 0,
        "is_loaders": True,
        "batch_size": batch_size,
        "device": "cpu",
        "autocast": "",
        "scaler": False,
        "has_loader": True,
        "lr": {},
        "betas": ((0.9, 0.999),),
        "momentum": (),
    }
    made = Found(**settings | others)
    return made if "lr" in others else replace(made, lr=dict.fromkeys(made.optimizers, (0.001,)))


def measured(step, signal, noise, samples=64, features=(), **layers):
    """The measurement of a step; layers are (signal, noise) by name."""
    of_layers = {name: GradientStatistics(*pair, samples, 8) for name, pair in layers.items()}
    statistics = GradientStatistics(signal, noise, samples, 8, layers=of_layers)
    return Measurement(step, statistics, features)


def steady(noise_scale, steps=40, spread=0.02):
    """Measurements around a noise scale, so that the interval is narrow and not empty."""
    signals = [1 + spread * (-1) ** i for i in range(steps)]
    return [measured(i, signal, noise_scale) for i, signal in enumerate(signals)]


def advice_of(measurements, time=None, network=None, unseen=(), steps=400, **settings):
    """The advice about a training with these measurements."""
    observations = Observations(
        refusal="",
        found=found(**settings),
        way="groups",
        steps=steps,
        seconds=4.0,
        step_seconds=0.01,
        measurements=list(measurements),
        time=time,
        unseen=list(unseen),
    )
    return Advice(observations, network or Network())
