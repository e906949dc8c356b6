"""What tests of the DeepSpeed connection train; and the same by AdaptiveBatch in one process."""

import itertools
import logging
import warnings
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb

SEED = 3
SAMPLES = 403  # no multiple of anything
BATCH = 48  # to begin with
ACCUMULATION = 6  # micro-batches in it, over all ranks
MICRO = 16  # at most
TARGET = 0.55  # .027 from every similarity of the reference, which bfloat16 is within
VIRTUAL_RANKS = 6  # so that 1, 2 and 3 ranks compare the same groups of samples
LOWEST, HIGHEST = 24, 120
CLIP = 0.25  # below most norms
GATHERED = ("batch_size", "similarity", "loss", "samples", "skipped", "epoch")

OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
LAYOUTS = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "1, fp32 accumulation": {"stage": 1},
    "2": {"stage": 2},
    "2, CPU offload": {"stage": 2, **OFFLOADED},
    "3": {"stage": 3},
    "3, CPU offload": {"stage": 3, **OFFLOADED},
}
PARAMS = {
    "enable_adjust": True,
    "similarity_target": TARGET,
    "batch_size_lower_bound": LOWEST,
    "batch_size_upper_bound": HIGHEST,
    "max_micro_batch_size": MICRO,
}


def quiet():
    """DeepSpeed says much, and torch of its calls more."""
    warnings.filterwarnings("ignore", module="(deepspeed|torch).*")
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)


def data(samples=SAMPLES):
    draw = torch.Generator().manual_seed(SEED)
    x = torch.randn(samples, 5, generator=draw)
    noise = torch.randn(samples, generator=draw)
    return TensorDataset(x, (x[:, 0] + noise > 0).long() + (x[:, 1] > 0).long())


def batches_of(rank=0, ranks=1, size=8, samples=SAMPLES):
    numbered = data(samples)
    sampler = bb.ElasticDistributedSampler(numbered, seed=SEED, num_replicas=ranks, rank=rank)
    loader = DataLoader(numbered, size, sampler=sampler)
    return bb.Batches(loader, virtual_ranks=VIRTUAL_RANKS)


def network():
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def optimizer_of(model, groups=1):
    each = list(model.parameters())
    cut = [each] if groups == 1 else [each[:1], each[1:]]
    return torch.optim.SGD([{"params": some} for some in cut], lr=0.1, momentum=0.9)


def decaying_schedule(optimizer):
    return ExponentialLR(optimizer, 0.98)


def tokens_of(y):
    """What the mean of a weighted loss is taken over."""
    return int((y < 2).sum())


def loss_of(output, y, weighted=False):
    return cross_entropy(output.float(), y, ignore_index=2 if weighted else -100)


def record_values(records):
    gathered = {name: [getattr(record, name) for record in records] for name in GATHERED}
    return gathered | {"lr": [set(record.lr) for record in records]}  # one for all groups


def controller_of():
    """What `adaptive_batch_params` asks for: the paper's rule, by single steps."""
    policy = bb.SimiGrad(TARGET, min_batch=LOWEST, max_batch=HIGHEST)
    return bb.Controller(policy, BATCH, smoothing=None)


def train_in_one_process(steps, *, clip=0.0, weighted=False, **settings):
    """(records, weights) of AdaptiveBatch in one process."""
    model = network()
    optimizer = optimizer_of(model)
    train = bb.AdaptiveBatch(
        model,
        optimizer,
        batches_of(),
        policy=controller_of(),
        micro_batch=MICRO,
        scheduler=decaying_schedule(optimizer),
        **{"every": 1, **settings},
    )
    records = []
    for step in itertools.islice(endless(train), steps):
        for x, y in step:
            loss = loss_of(model(x), y, weighted)
            step.backward(loss, **({"weight": tokens_of(y)} if weighted else {}))
        if clip:
            step.clip_grad_norm_(clip)
        records.append(step.update())
    return record_values(records), [p.detach().clone() for p in model.parameters()]


def endless(loader):
    while True:
        yield from loader


def config_of(ranks, layout="0", dtype="fp32", clip=0.0, **more):
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATION // ranks,
        "zero_optimization": dict(LAYOUTS[layout]),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": clip,
        "bf16": {"enabled": dtype == "bf16"},
    }
    if layout == "1, fp32 accumulation":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    config["zero_optimization"].update(more.pop("zero", {}))
    return config | more


def engine_of(rank, ranks, layout="0", dtype="fp32", *, clip=0.0, groups=1, more=None, **given):
    """What `initialize` returns."""
    quiet()
    from bigbatch.integrations import deepspeed

    model = given.pop("model", None) or network()
    optimizer = optimizer_of(model, groups)
    given = {
        "optimizer": optimizer,
        "training_data": batches_of(rank, ranks),
        "lr_scheduler": decaying_schedule(optimizer) if "optimizer" not in given else None,
        "adaptive_batch_params": PARAMS,
        "every": 1,
        "config": config_of(ranks, layout, dtype, clip, **(more or {})),
    } | given
    return deepspeed.initialize(model=model, **given)


def micro_step(engine, x, y, weighted=False, factor=1.0):
    """One micro-batch; whether it was the last of its step."""
    kind = next(engine.module.parameters()).dtype
    loss = loss_of(engine(x.to(kind)), y, weighted) * factor
    engine.backward(loss, **({"weight": tokens_of(y)} if weighted else {}))
    ends = engine.is_gradient_accumulation_boundary()
    engine.step()
    return ends


def train_steps(engine, loader, steps, **how):
    """Records of so many steps, over a loader's epochs or an iterator."""
    records = []
    micro_batches = loader if isinstance(loader, Iterator) else endless(loader)
    while len(records) < steps:
        if micro_step(engine, *next(micro_batches), **how):
            records.append(engine.bigbatch.record)
    return records


def weights_of(engine):
    import deepspeed

    each = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(each):
        return [p.detach().float().clone() for p in each]


def max_difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def build_once(rank, ranks):
    """DeepSpeed compiles its communication when it is first used on a machine."""
    engine_of(rank, ranks)
