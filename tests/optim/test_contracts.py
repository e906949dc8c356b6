"""What every optimizer has to keep: one list of optimizers, and each contract over all of it.

The list is ROWS; a contract is one function. Numbers are in the other files: oracles of VRSGD and
VRAdam in test_vr_optimizers.py, of LARS and LAMB in test_trust_ratio.py.
"""

import contextlib
import copy
import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer, lr_scheduler, swa_utils
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader, TensorDataset

import bigbatch as bb
from bigbatch.errors import GradientError, SettingError, StateError
from bigbatch.optim import LAMB, LARS, VRLAMB, VRLARS, VRSGD, VarianceReduced, VRAdam
from oracles import vr
from tensors import difference, pickled, same, threads, through_a_file, values

torch.set_num_threads(1)  # small tensors: a second thread only waits
pytestmark = [
    pytest.mark.filterwarnings("ignore:k = [2-7] micro-batches:UserWarning"),
    # pytorch_optimizer's
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pytorch_optimizer"),
]

Batch = tuple[Tensor, Tensor]
Make = Callable[..., Optimizer]


class Lion(Optimizer):
    """Somebody else's optimizer: nothing of torch's own machinery, all of its contract."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0) -> None:
        if not (isinstance(lr, Tensor) or lr >= 0):
            raise ValueError(f"Invalid lr: {lr}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (b1 * state["momentum"] + (1 - b1) * p.grad).sign())
                state["momentum"].lerp_(p.grad, 1 - b2)
        return loss


# the list


@dataclass(frozen=True)
class Row:
    """An optimizer with its settings.

    Args:
        make: of parameters; takes `lr`, `weight_decay` and, where scaled, the options of VR.
        base: the same without any scaling; None: it is a base itself.
        lr: at which it goes downhill on `network`.
        refused: settings out of their ranges.
        matrices: whether it takes nothing else.
        maximize: whether it can.
        sparse: whether the base takes sparse gradients.
        copies: whether its base can be copied.
        smooth: whether a rounding of the gradient is a rounding of the step, as no sign is.
    """

    make: Make
    base: Make | None
    lr: float
    refused: tuple[tuple[str, Any], ...] = (("lr", -1.0), ("weight_decay", -1.0))
    matrices: bool = False
    maximize: bool = True
    sparse: bool = False
    copies: bool = True
    smooth: bool = True


OWN = ("gamma", "r_max", "beta3", "watch")


def around(base: Make, params: Any, **settings: Any) -> VarianceReduced:
    """VarianceReduced over a base; each of them gets its settings."""
    own = {name: settings.pop(name) for name in OWN if name in settings}
    return VarianceReduced(base(params, **settings), **own)


def wrapped(base: Make, **rest: Any) -> Row:
    return Row(functools.partial(around, base), base, **rest)


def named(make: Make, base: Make, own: dict[str, Any], only: dict[str, Any], **rest: Any) -> Row:
    """A class and its base with common settings; `only` are the base's."""
    return Row(functools.partial(make, **own), functools.partial(base, **own, **only), **rest)


BAD_BETAS = (("betas", (1.0, 0.9)), ("betas", (0.9, -0.1)))
# as VRSGD and VRAdam choose for themselves, so that bits are the same
FUSED = {"fused": torch.get_default_device().type == "cpu"}
NO_DECAY = {"weight_decay": 0.0}

ROWS = {
    "VRSGD": named(
        VRSGD, SGD, {}, FUSED, lr=0.2, sparse=True, refused=(("momentum", -0.5), ("lr", -1.0))
    ),
    "VRMomentum": named(VRSGD, SGD, {"momentum": 0.9}, FUSED, lr=0.05),
    "VRNesterov": named(
        VRSGD,
        SGD,
        {"momentum": 0.8, "nesterov": True},
        FUSED,
        lr=0.05,
        refused=(("momentum", 0.0), ("momentum", -0.5)),
    ),
    "VRAdam": named(
        VRAdam,
        AdamW,
        NO_DECAY,
        FUSED,
        lr=0.02,
        refused=(*BAD_BETAS, ("eps", -1e-8), ("weight_decay", -1.0)),
    ),
    "VRAdam-L2": named(
        functools.partial(VRAdam, decoupled_weight_decay=False),
        Adam,
        {"weight_decay": 0.01},
        FUSED,
        lr=0.02,
    ),
    "VRLARS": named(VRLARS, LARS, {"trust_coefficient": 0.02}, {}, lr=1.0),
    "VRLAMB": named(VRLAMB, LAMB, {}, {}, lr=0.04, refused=BAD_BETAS),
    "LARS": Row(functools.partial(LARS, trust_coefficient=0.02), None, lr=1.0),
    "LAMB": Row(LAMB, None, lr=0.04, refused=BAD_BETAS),
    "VR(SGD)": wrapped(functools.partial(SGD, momentum=0.9), lr=0.05, sparse=True),
    "VR(AdamW-fused)": wrapped(functools.partial(AdamW, fused=True), lr=0.02),
    "VR(Adafactor)": wrapped(Adafactor, lr=0.05, smooth=False),
    "VR(Muon)": wrapped(Muon, lr=0.05, matrices=True, maximize=False, smooth=False),
    "VR(Lion)": wrapped(Lion, lr=0.01, maximize=False, smooth=False, refused=(("lr", -1.0),)),
}
if importlib.util.find_spec("pytorch_optimizer"):
    from pytorch_optimizer import AdaBelief

    ROWS["VR(AdaBelief)"] = wrapped(AdaBelief, lr=0.02, copies=False, refused=())

SCALED = {name: row for name, row in ROWS.items() if row.base is not None}
FIRST = {"VRSGD", "VRAdam", "VRLARS", "VRLAMB", "LARS", "VR(AdamW-fused)"}


OTHER_BASES = {"VRMomentum", "VR(SGD)", "VR(Adafactor)", "VR(Muon)"}


def cases(rows: dict[str, Row], first: set[str] = FIRST) -> list[Any]:
    """Their names; the first of the three commands runs the contracts of `first`."""
    return [
        pytest.param(name, marks=() if name in first else pytest.mark.thorough) for name in rows
    ]


every_row = pytest.mark.parametrize("name", cases(ROWS))
scaled_rows = pytest.mark.parametrize("name", cases(SCALED))
every_base = pytest.mark.parametrize("name", cases(ROWS, FIRST | OTHER_BASES))
scaled_bases = pytest.mark.parametrize("name", cases(SCALED, FIRST | OTHER_BASES))
float_types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


# what they train


def network(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Two layers; without biases where only matrices are taken."""
    torch.manual_seed(seed)
    bias = not ROWS[name].matrices
    layers = [nn.Linear(5, 7, bias=bias), nn.Tanh(), nn.Linear(7, 1, bias=bias)]
    return nn.Sequential(*layers).to(dtype)


def make(name: str, model: nn.Module | Iterable[Any], **settings: Any) -> Optimizer:
    params = model.parameters() if isinstance(model, nn.Module) else model
    return ROWS[name].make(params, **({"lr": ROWS[name].lr} | settings))


def base_of(name: str, model: nn.Module | Iterable[Any], **settings: Any) -> Optimizer:
    params = model.parameters() if isinstance(model, nn.Module) else model
    return ROWS[name].base(params, **({"lr": ROWS[name].lr} | settings))


def batches(
    seed: int, k: int = 8, dtype: torch.dtype = torch.float32, size: int = 4
) -> list[Batch]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(k, size, 5, generator=draw, dtype=torch.float64)
    y = x[..., :1] - x[..., 1:2] * x[..., 2:3] + 0.5
    return list(zip(x.to(dtype), y.to(dtype), strict=True))


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def accumulate(model: nn.Module, micro: Sequence[Batch], factor: float = 1.0) -> None:
    for batch in micro:
        (squared_error(model, batch) * (factor / len(micro))).backward()


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def train(model: nn.Module, optimizer: Optimizer, seeds: Iterable[int], k: int = 8) -> None:
    for seed in seeds:
        accumulate(model, batches(seed, k, dtype_of(model)))
        optimizer.step()
        optimizer.zero_grad()


# where they lead


@every_row
def test_it_goes_downhill(name: str) -> None:
    model = network(name)
    optimizer = make(name, model)
    fixed = batches(0)
    before = sum(squared_error(model, batch).item() for batch in fixed)
    train(model, optimizer, [0] * 40)
    after = sum(squared_error(model, batch).item() for batch in fixed)
    assert after < before / 2


@every_row
def test_it_maximizes_where_it_can(name: str) -> None:
    if not ROWS[name].maximize:
        with pytest.raises(TypeError):
            make(name, network(name), maximize=True)
        return
    up, down = network(name), network(name)
    optimizers = make(name, up, maximize=True), make(name, down)
    for seed in range(3):
        for model, optimizer, sign in zip((up, down), optimizers, (1, -1), strict=True):
            accumulate(model, batches(seed), factor=sign)
            optimizer.step()
            optimizer.zero_grad()
    assert same(down, up)  # negation rounds nothing


@scaled_rows
@float_types
def test_gamma_one_without_momentum_on_r_is_the_base_to_the_bit(
    name: str, dtype: torch.dtype
) -> None:
    ours, theirs = network(name, dtype), network(name, dtype)
    train(ours, make(name, ours, gamma=1.0, r_max=1.0, beta3=None), range(6))
    train(theirs, base_of(name, theirs), range(6))
    assert same(theirs, ours)  # r is 1 exactly


@scaled_rows
@float_types
def test_gamma_one_with_momentum_on_r_is_the_base_to_rounding(
    name: str, dtype: torch.dtype
) -> None:
    if not ROWS[name].smooth:
        pytest.skip("one rounding of the gradient may turn a sign of its step")
    ours, theirs = network(name, dtype), network(name, dtype)
    train(ours, make(name, ours, gamma=1.0, r_max=1.0, beta3=0.9), range(6))
    train(theirs, base_of(name, theirs), range(6))
    # p_hat is 1 to a rounding or two; Adam's first steps are g / |g| and pass them on, six times
    assert difference(theirs, ours) < 200 * torch.finfo(dtype).eps


@scaled_rows
def test_gamma_below_one_is_not_the_base(name: str) -> None:
    ours, theirs = network(name), network(name)
    train(ours, make(name, ours), range(3))
    train(theirs, base_of(name, theirs), range(3))
    assert difference(theirs, ours) > 1e-4


@every_row
@pytest.mark.parametrize("seed", [0, 1])
def test_the_loop_steps_as_backwards_by_hand_do(name: str, seed: int) -> None:
    by_hand, in_loop = network(name, torch.float64), network(name, torch.float64)
    optimizer = make(name, by_hand)
    samples = batches(seed, k=3, dtype=torch.float64, size=24)
    for x, y in samples:
        accumulate(by_hand, list(zip(x.split(3), y.split(3), strict=True)))
        optimizer.step()
        optimizer.zero_grad()
    data = TensorDataset(*(torch.cat(part) for part in zip(*samples, strict=True)))
    loop = bb.AdaptiveBatch(
        in_loop,
        make(name, in_loop),
        DataLoader(data, batch_size=24),
        policy=bb.Fixed(24),
        micro_batch=3,
        lr_scaling=None,
        every=1,
    )
    for step in loop:
        for batch in step:
            step.backward(squared_error(in_loop, batch))
        step.update()
    # another order of the same divisions; what has signs or rounds to bfloat16 is not so smooth
    assert difference(by_hand, in_loop) < (1e-10 if ROWS[name].smooth else 1e-2)


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam-L2"])
def test_vradam_of_every_kind_equals_its_oracle(decoupled: bool) -> None:
    own = {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": decoupled, "gamma": 0.05}
    model = network("VRAdam", torch.float64)
    optimizer, oracle = VRAdam(model.parameters(), **own), vr.VRAdam(model.parameters(), **own)
    check_against(oracle, model, optimizer, k=8)


def check_against(oracle: Any, model: nn.Module, optimizer: Optimizer, k: int) -> None:
    """Twenty steps on the same micro-batch gradients, in float64."""
    for seed in range(20):
        micro = batches(seed, k, torch.float64)
        replica = copy.deepcopy(model)
        rows = [torch.autograd.grad(squared_error(replica, b), replica.parameters()) for b in micro]
        oracle.step(list(zip(*rows, strict=True)))
        accumulate(model, micro)
        optimizer.step()
        optimizer.zero_grad()
    # roundings of 1e-16; a weight that agrees to 1e-3 costs its layer three digits
    assert difference(oracle.params, model) < 1e-10


# r


def factors_of(name: str, dtype: torch.dtype, scale: float) -> list[Tensor]:
    """What three steps on losses of a scale tell of r; the weights do not move."""
    model = network(name, dtype)
    optimizer = make(name, model, watch=True, lr=1e-30)
    records = []
    for seed in range(3):
        accumulate(model, batches(seed, dtype=dtype), factor=scale)
        optimizer.step()
        optimizer.zero_grad()
        factors = optimizer.gsnr
        records.append(
            torch.stack([factors.mean, factors.at_gamma, factors.at_r_max, factors.lr_factor])
        )
    return records


@scaled_rows
@float_types
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_r_does_not_depend_on_the_scale_of_the_loss(
    name: str, scale: float, dtype: torch.dtype
) -> None:
    expected, actual = factors_of(name, dtype, 1.0), factors_of(name, dtype, scale)
    # no gradient is rounded again, but norms of them are; counts at a clip are the same
    close = 1e-4 if dtype == torch.float32 else 1e-12
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(b, a, rtol=close, atol=0)
        assert 0 < a[0, 0] < 1


@scaled_bases
@pytest.mark.parametrize(
    "order", [[7, 6, 5, 4, 3, 2, 1, 0], [0, 2, 4, 6, 1, 3, 5, 7], [5, 2, 7, 0, 3, 6, 1, 4]], ids=str
)
def test_the_order_of_the_micro_batches_does_not_matter(name: str, order: list[int]) -> None:
    model, other = network(name, torch.float64), network(name, torch.float64)
    optimizers = [make(name, m, beta3=0.5) for m in (model, other)]
    for seed in range(3):
        micro = batches(seed, dtype=torch.float64)
        for m, optimizer, indices in zip(
            (model, other), optimizers, (range(8), order), strict=True
        ):
            optimizer.zero_grad()
            accumulate(m, [micro[d] for d in indices])
            optimizer.step()
        expected, actual = ([p.grad for p in m.parameters()] for m in (model, other))
        assert difference(expected, actual) < 1e-12  # sums in another order
        other.load_state_dict(model.state_dict())  # so that no later step starts elsewhere


@scaled_rows
def test_bfloat16_gradients_have_float32_moments(name: str) -> None:
    """A signal of 100 to 1: bfloat16 sums would be off by half of the variance."""
    draw = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.ones(20, 10, dtype=torch.bfloat16))
    optimizer = make(name, [weight], watch=True, beta3=0.9, r_max=3.0)
    for _ in range(3):
        rows = (1 + 0.1 * torch.randn(8, 20, 10, generator=draw)).bfloat16()
        for row in rows:
            torch.autograd.backward([weight], [row])
        optimizer.step()
        optimizer.zero_grad()
        expected = vr.gsnr(list(rows.double()), [1.0] * 8, 0.1, 3.0)
        assert pytest.approx(expected.mean().item(), rel=1e-4) == optimizer.gsnr.mean.item()
    state = optimizer.state_dict()["state"][0]
    assert torch.float32 == state["gsnr_average"].dtype
    assert torch.bfloat16 == weight.dtype


@scaled_rows
def test_watching_changes_no_bit(name: str) -> None:
    plain, watched = network(name), network(name)
    train(plain, make(name, plain), range(3))
    optimizer = make(name, watched, watch=True)
    train(watched, optimizer, range(3))
    assert same(plain, watched)
    assert 8 == optimizer.gsnr.k
    assert len(values(plain)) == len(optimizer.gsnr.mean)


@scaled_rows
def test_a_hook_that_scales_every_gradient_leaves_r(name: str) -> None:
    """Registered before the optimizer or after it, it stands before or behind the optimizer's."""
    records = []
    for when in ("never", "before", "after"):
        model = network(name)
        if when == "before":
            halve(model)
        optimizer = make(name, model, watch=True, lr=1e-30)
        if when == "after":
            halve(model)
        train(model, optimizer, range(3))
        records.append(optimizer.gsnr.mean)
    assert torch.equal(records[0], records[1])  # a power of 2 rounds nothing
    assert torch.equal(records[0], records[2])


def halve(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / 2)


# steps that do little

REMEDY = ".*split the batch into micro-batches"


@every_base
def test_a_step_without_gradients_is_refused_or_does_nothing(name: str) -> None:
    model = network(name)
    before = values(model)
    optimizer = make(name, model, weight_decay=0.1)
    if name in SCALED:
        with pytest.raises(GradientError, match=f"saw 0 {REMEDY}"):
            optimizer.step()
    else:
        optimizer.step()
    assert same(before, model)
    assert {} == optimizer.state_dict()["state"]


@scaled_bases
def test_a_step_on_one_backward_is_refused(name: str) -> None:
    model = network(name)
    before = values(model)
    optimizer = make(name, model)
    accumulate(model, batches(0, k=1))
    with pytest.raises(GradientError, match=f"saw 1 {REMEDY}"):
        optimizer.step()
    assert same(before, model)


@every_row
def test_a_step_on_zero_gradients_changes_nothing(name: str) -> None:
    model = network(name)
    before = values(model)
    accumulate_on = make(name, model, weight_decay=0.0)
    for _ in range(3):
        accumulate(model, batches(0), factor=0.0)
        accumulate_on.step()
        accumulate_on.zero_grad()
    assert same(before, model)


@scaled_rows
def test_a_step_on_zero_gradients_decays_as_the_base_does(name: str) -> None:
    ours, theirs = network(name), network(name)
    before = values(ours)
    settings = {"weight_decay": 0.1}
    for model, optimizer in (
        (ours, make(name, ours, **settings)),
        (theirs, base_of(name, theirs, **settings)),
    ):
        for _ in range(3):
            accumulate(model, batches(0), factor=0.0)
            optimizer.step()
            optimizer.zero_grad()
    assert same(theirs, ours)
    assert not same(before, ours)


@every_row
def test_a_learning_rate_of_zero_moves_nothing(name: str) -> None:
    model = network(name)
    before = values(model)
    train(model, make(name, model, lr=0.0, weight_decay=0.1), range(2))
    assert same(before, model)


@every_row
@pytest.mark.parametrize("set_to_none", [True, False])
def test_either_zero_grad_will_do(name: str, set_to_none: bool) -> None:
    expected, model = network(name), network(name)
    train(expected, make(name, expected), range(3))
    optimizer = make(name, model)
    for seed in range(3):
        accumulate(model, batches(seed))
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) == set_to_none for p in model.parameters())
        assert set_to_none or not any(p.grad.any() for p in model.parameters())
    assert same(expected, model)


# types


@every_row
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_parameters_keep_their_type(name: str, dtype: torch.dtype) -> None:
    model = network(name, dtype)
    before = values(model)
    train(model, make(name, model), range(3))
    assert {dtype} == {p.dtype for p in model.parameters()}
    assert all(p.isfinite().all() for p in model.parameters())
    assert not same(before, model)


@pytest.mark.parametrize("name", ["LAMB", "VRLAMB"])
def test_lambs_moments_of_bfloat16_parameters_are_float32(name: str) -> None:
    """Its second moment moves by a thousandth a step, which bfloat16 rounds away."""
    model = network(name, torch.bfloat16)
    optimizer = make(name, model)
    train(model, optimizer, range(2))
    for state in optimizer.state_dict()["state"].values():
        assert torch.float32 == state["exp_avg"].dtype == state["exp_avg_sq"].dtype


@every_row
@pytest.mark.parametrize("rate", [0.125, torch.tensor(0.125)], ids=["number", "tensor"])
def test_a_learning_rate_may_be_changed_and_be_a_tensor(name: str, rate: float | Tensor) -> None:
    expected, model = network(name), network(name)
    by_number, optimizer = make(name, expected, lr=0.125), make(name, model, lr=copy.deepcopy(rate))
    train(expected, by_number, range(2))
    train(model, optimizer, range(2))
    by_number.param_groups[0]["lr"] = 0.0625
    if isinstance(rate, Tensor):
        optimizer.param_groups[0]["lr"].fill_(0.0625)
    else:
        optimizer.param_groups[0]["lr"] = 0.0625
    train(expected, by_number, range(2, 4))
    train(model, optimizer, range(2, 4))
    # 1 / 8 is exact in any type; some of torch's own take a tensor by another road
    assert difference(expected, model) < 1e-5


# what is saved


@every_row
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_state_continues_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model = network(name, dtype)
    optimizer = make(name, model)
    train(model, optimizer, range(3))
    saved, weights = through_a_file(optimizer.state_dict()), through_a_file(model.state_dict())
    train(model, optimizer, range(3, 6))
    resumed = network(name, dtype, seed=1)
    resumed.load_state_dict(weights)
    loaded = make(name, resumed, lr=0.5)  # settings come with the state, as torch's do
    loaded.load_state_dict(saved)
    for state in (again := loaded.state_dict(), saved):
        state["state"] = {i: entries for i, entries in state["state"].items() if entries}
    torch.testing.assert_close(again, saved, rtol=0, atol=0)
    train(resumed, loaded, range(3, 6))
    assert same(model, resumed)


@every_row
def test_a_state_may_come_in_any_order_of_its_keys(name: str) -> None:
    model = network(name)
    optimizer = make(name, model)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {i: dict(reversed(s.items())) for i, s in reversed(saved["state"].items())}
    resumed = copy.deepcopy(model)
    loaded = make(name, resumed)
    loaded.load_state_dict(saved)
    train(model, optimizer, range(3, 5))
    train(resumed, loaded, range(3, 5))
    assert same(model, resumed)


@every_row
def test_a_state_finds_its_parameters_by_its_groups(name: str) -> None:
    """What stands in for a parameter may be anything: checkpoints take names."""
    model = network(name)
    optimizer = make(name, model)
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {f"weight-{i}": state for i, state in saved["state"].items()}
    for group in saved["param_groups"]:
        group["params"] = [f"weight-{i}" for i in group["params"]]
    resumed = copy.deepcopy(model)
    loaded = make(name, resumed)
    loaded.load_state_dict(saved)
    train(model, optimizer, range(3, 5))
    train(resumed, loaded, range(3, 5))
    assert same(model, resumed)


@scaled_bases
def test_the_state_of_a_bare_base_can_be_loaded(name: str) -> None:
    bare = network(name)
    plain = base_of(name, bare)
    train(bare, plain, range(3))
    model = copy.deepcopy(bare)
    optimizer = make(name, model, gamma=1.0, beta3=None)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    group = optimizer.param_groups[0]
    assert (1.0, 1.0, None, True) == tuple(group[k] for k in ("gamma", "r_max", "beta3", "vr"))
    train(bare, plain, range(3, 6))
    train(model, optimizer, range(3, 6))
    assert same(bare, model)


@scaled_rows
def test_a_bare_base_continues_from_the_state_of_a_scaled_one(name: str) -> None:
    model = network(name, torch.float64)
    optimizer = make(name, model, gamma=1.0, beta3=None)
    train(model, optimizer, range(3))
    optimizer.param_groups[0]["beta3"] = 0.9  # so that there is a p to be ignored
    train(model, optimizer, range(3, 4))
    bare = copy.deepcopy(model)
    plain = base_of(name, bare)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[0]["beta3"] = None
    train(model, optimizer, range(4, 6))
    train(bare, plain, range(4, 6))
    assert same(model, bare)


@every_row
def test_state_is_tensors_under_parameters(name: str) -> None:
    """As torch.distributed.checkpoint wants it: a string among the keys breaks it."""
    model = network(name)
    optimizer = make(name, model)
    train(model, optimizer, range(2))
    assert set(optimizer.state) <= set(model.parameters())
    for state in optimizer.state_dict()["state"].values():
        assert all(isinstance(value, Tensor) or value is None for value in state.values())


@every_row
@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
def test_distributed_checkpoints_take_it_out_and_put_it_back(name: str, flat: bool) -> None:
    """They begin with a step at a learning rate of 0, which only makes state."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model = network(name)
    optimizer = make(name, model)
    train(model, optimizer, range(3))
    saved = through_a_file(get_optimizer_state_dict(model, optimizer, options=options))
    resumed = copy.deepcopy(model)
    loaded = make(name, resumed)
    set_optimizer_state_dict(resumed, loaded, saved, options=options)
    train(model, optimizer, range(3, 5))
    train(resumed, loaded, range(3, 5))
    assert same(model, resumed)


def test_p_can_be_seen_in_the_state_and_moved_as_the_rest_of_it() -> None:
    """As trainers do that take an optimizer to another device."""
    model = network("VRAdam")
    optimizer = make("VRAdam", model)
    assert not optimizer.state
    train(model, optimizer, range(2))
    expected = copy.deepcopy(optimizer.state_dict())
    for parameter, state in optimizer.state.items():
        assert {"step", "exp_avg", "exp_avg_sq", "gsnr_average", "gsnr_steps"} == set(state)
        optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}
    assert all(
        torch.equal(value, optimizer.state_dict()["state"][i][key])
        for i, state in expected["state"].items()
        for key, value in state.items()
    )
    assert set(model.parameters()) == set(optimizer.state)


@pytest.mark.parametrize("name", ["VRAdam", "VRLAMB"])
def test_a_state_that_lost_its_average_is_refused(name: str) -> None:
    model = network(name)
    optimizer = make(name, model)
    train(model, optimizer, range(2))
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        del state["gsnr_average"]
    with pytest.raises(StateError, match="4 parameters, 0 the first, was saved with a beta3"):
        optimizer.load_state_dict(saved)


@every_row
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_a_copy_of_model_and_optimizer_continues_by_itself(
    name: str, copied: Callable[[Any], Any], steps: int
) -> None:
    if not ROWS[name].copies:
        pytest.skip("its base loses attributes when it is copied")
    model = network(name)
    optimizer = make(name, model)
    train(model, optimizer, range(steps))
    other, its = copied((model, optimizer))
    assert type(optimizer) is type(its)
    train(model, optimizer, range(3, 5))
    assert not same(model, other)
    train(other, its, range(3, 5))
    assert same(model, other)


@every_row
def test_named_parameters_leave_their_names_in_the_state(name: str) -> None:
    model, plain = network(name), network(name)
    optimizer = make(name, model.named_parameters())
    train(model, optimizer, range(2))
    train(plain, make(name, plain), range(2))
    names = [key for key, _ in model.named_parameters()]
    assert names == optimizer.state_dict()["param_groups"][0]["param_names"]
    assert same(plain, model)


@every_row
def test_hooks_of_state_dicts_are_called(name: str) -> None:
    model = network(name)
    optimizer = make(name, model)
    train(model, optimizer, range(1))
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("before-saving"))
    optimizer.register_state_dict_post_hook(lambda opt, state: calls.append("after-saving"))
    optimizer.register_load_state_dict_pre_hook(lambda opt, state: calls.append("before-loading"))
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("after-loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert ["before-saving", "after-saving", "before-loading", "after-loading"] == calls


# torch's loops


@every_base
def test_hooks_fire_once_a_step(name: str) -> None:
    model = network(name)
    optimizer = make(name, model)
    assert isinstance(optimizer, Optimizer)
    calls = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("pre", opt)))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(("post", opt)))
    train(model, optimizer, range(2))
    assert [("pre", optimizer), ("post", optimizer)] * 2 == calls


@every_row
def test_hooks_of_all_optimizers_fire_once_a_step_for_this_one(name: str) -> None:
    model = network(name)
    optimizer = make(name, model)
    calls = []
    handles = [
        register_optimizer_step_pre_hook(lambda opt, args, kwargs: calls.append(("pre", opt))),
        register_optimizer_step_post_hook(lambda opt, args, kwargs: calls.append(("post", opt))),
    ]
    try:
        train(model, optimizer, range(2))
    finally:
        for handle in handles:
            handle.remove()
    of_this_one = [call for call in calls if call[1] is optimizer]
    assert [("pre", optimizer), ("post", optimizer)] * 2 == of_this_one
    # the base is an optimizer too, and steps inside
    inside = [optimizer.base] if name in SCALED else []
    assert {id(opt) for opt in (optimizer, *inside)} == {id(opt) for _, opt in calls}


@every_base
def test_a_closure_is_called_once_with_gradients_on(name: str) -> None:
    plain, model = network(name), network(name)
    train(plain, make(name, plain), range(3))
    optimizer = make(name, model)
    calls = []
    for seed in range(3):

        def closure(seed: int = seed) -> float:
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            accumulate(model, batches(seed))
            return 0.5 + seed

        with torch.no_grad():
            assert 0.5 + seed == optimizer.step(closure)
    assert [True] * 3 == calls
    assert same(plain, model)


@every_row
def test_a_step_that_overflowed_has_never_been(name: str) -> None:
    """Weights, p, m, v and what comes after are those of a run without that batch."""
    model, sound = network(name), network(name)
    optimizer, expected = make(name, model), make(name, sound)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)  # a power of 2 rounds nothing
    for seed in range(5):
        overflows = seed in (1, 3)
        before, state = values(model), copy.deepcopy(optimizer.state_dict())
        for d, batch in enumerate(batches(seed)):
            blow_up = float("inf") if overflows and d == 5 else 1.0
            (scaler.scale(squared_error(model, batch)) * blow_up / 8).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if overflows:
            assert same(before, model)
            torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
        else:
            train(sound, expected, [seed])
    assert same(sound, model)


@every_row
def test_clipping_between_unscaling_and_the_step_leaves_r(name: str) -> None:
    model, sound = network(name), network(name)
    optimizer, expected = make(name, model), make(name, sound)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(3):
        for batch in batches(seed):
            scaler.scale(squared_error(model, batch) / 8).backward()
        scaler.unscale_(optimizer)
        accumulate(sound, batches(seed))
        for parameters, steps in ((model, scaler.step), (sound, None)):
            norm = nn.utils.clip_grad_norm_(parameters.parameters(), 0.125)
            assert norm > 0.125
            if steps is None:
                expected.step()
            else:
                steps(optimizer)
        scaler.update()
        optimizer.zero_grad()
        expected.zero_grad()
    assert same(sound, model)


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.5),
    "StepLR": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, milestones=[1, 3], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, factor=0.25, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(
        o, base_lr=0.01, max_lr=0.1, step_size_up=2, cycle_momentum=has_momentum(o)
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, max_lr=0.1, total_steps=6, cycle_momentum=has_momentum(o)
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)],
        milestones=[2],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.StepLR(o, 2)]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=3),
}


def has_momentum(optimizer: Optimizer) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


@every_row
@pytest.mark.parametrize("schedule", SCHEDULERS)
def test_every_scheduler_drives_it_as_it_drives_a_torch_optimizer(name: str, schedule: str) -> None:
    ours = network(name)
    theirs = network(name)
    reference = base_of(name, theirs, lr=0.1) if name in SCALED else None
    if reference is None:
        stand_in = SGD if name == "LARS" else Adam
        reference = stand_in(theirs.parameters(), lr=0.1)
        if name == "LARS":
            reference.param_groups[0]["momentum"] = 0.9
    traces = []
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", "k = 2 micro-batches")
        warnings.filterwarnings("ignore", "The epoch parameter in")  # SequentialLR's, of itself
        for model, optimizer in ((ours, make(name, ours, lr=0.1)), (theirs, reference)):
            scheduler = SCHEDULERS[schedule](optimizer)
            trace = []
            for seed in range(5):
                train(model, optimizer, [seed], k=2)
                scheduler.step(*[1.0] if schedule == "ReduceLROnPlateau" else [])
                group = optimizer.param_groups[0]
                trace.append([float(group["lr"]), group.get("momentum"), group.get("betas")])
            traces.append(trace)
            scheduler.load_state_dict(scheduler.state_dict())
    assert traces[1] == traces[0]
    assert len({lr for lr, *_ in traces[0]}) > 1
    assert all(p.isfinite().all() for p in ours.parameters())


@every_row
def test_a_group_added_later_is_as_an_optimizer_of_its_own(name: str) -> None:
    together, apart = network(name, torch.float64), network(name, torch.float64)
    optimizer = make(name, together[2])
    first = make(name, apart[2])
    for model, either in ((together, optimizer), (apart, first)):
        train(model, either, range(2))
        model.zero_grad()
    optimizer.add_param_group({"params": list(together[0].parameters()), "lr": 0.015625})
    second = make(name, apart[0], lr=0.015625)
    for seed in range(2, 4):
        train(together, optimizer, [seed])
        accumulate(apart, batches(seed, dtype=torch.float64))
        for either in (first, second):
            either.step()
        for either in (first, second):
            either.zero_grad()
    # a new group may be stepped by another of torch's implementations
    assert difference(apart, together) < 1e-12


# groups that are left alone


@scaled_rows
def test_a_group_with_vr_false_is_the_bases(name: str) -> None:
    """Two models, one loss each; the second is not scaled."""
    scaled, left, expected = (network(name, seed=seed) for seed in (0, 1, 1))
    groups = [{"params": list(m.parameters())} for m in (scaled, left)]
    groups[1]["vr"] = False
    optimizer, base = make(name, groups), base_of(name, expected)
    for seed in range(3):
        for batch in batches(seed):
            ((squared_error(scaled, batch) + squared_error(left, batch)) / 8).backward()
        accumulate(expected, batches(seed))
        optimizer.step()
        base.step()
        # r is some tenths of 1; matrix products round by where in memory they are, on some CPUs
        assert difference(*([p.grad for p in m.parameters()] for m in (expected, left))) < 1e-5
        optimizer.zero_grad()
        base.zero_grad()
    # VRSGD and VRAdam leave it to torch how such a group is stepped
    assert difference(expected, left) < 1e-4
    assert "gsnr_average" not in optimizer.state_dict()["state"].get(len(groups[0]["params"]), {})


@scaled_rows
@pytest.mark.parametrize("watch", [False, True], ids=["unwatched", "watched"])
def test_an_optimizer_of_which_nothing_is_scaled_is_its_base(name: str, watch: bool) -> None:
    """As where everything is frozen but the embeddings; one backward a step will do then."""
    model, expected = network(name), network(name)
    groups = [{"params": list(model.parameters()), "vr": False}]
    train(model, make(name, groups, watch=watch), range(3), k=1)
    train(expected, base_of(name, expected), range(3), k=1)
    assert difference(expected, model) < 1e-6


@pytest.mark.parametrize("name", [name for name, row in SCALED.items() if row.sparse])
def test_a_group_with_vr_false_may_have_sparse_gradients(name: str) -> None:
    ends = []
    for sparse in (False, True):
        torch.manual_seed(0)
        words, head = nn.Embedding(20, 5, sparse=sparse), nn.Linear(5, 1)
        groups = [
            {"params": list(head.parameters())},
            {"params": list(words.parameters()), "vr": False},
        ]
        optimizer = make(name, groups)
        draw = torch.Generator().manual_seed(0)
        for _ in range(3):
            for _ in range(8):
                indices = torch.randint(20, (6,), generator=draw)
                (head(words(indices)).square().mean() / 8).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append([*words.parameters(), *head.parameters()])
    assert difference(*ends) < 1e-4


# what is refused

NOT_A_FACTOR = [
    ("gamma", 0.0),
    ("gamma", -0.1),
    ("gamma", 1.01),
    ("r_max", 0.99),
    ("r_max", float("inf")),
    ("beta3", 1.0),
    ("beta3", -0.1),
]


@scaled_rows
@pytest.mark.parametrize(("setting", "value"), NOT_A_FACTOR)
def test_an_option_out_of_range_is_refused(name: str, setting: str, value: Any) -> None:
    with pytest.raises(SettingError, match=f"{setting}="):
        make(name, network(name), **{setting: value})


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [(name, *case) for name, row in ROWS.items() for case in row.refused],
)
def test_a_setting_of_the_base_out_of_range_is_refused(name: str, setting: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        make(name, network(name), **{setting: value})


@every_row
@pytest.mark.parametrize(
    ("params", "error"),
    [(lambda p: [*p, p[0]], SettingError), (lambda p: [], ValueError), (lambda p: p[0], TypeError)],
    ids=["twice", "none", "a-tensor"],
)
@pytest.mark.filterwarnings("ignore:optimizer contains .* duplicate:UserWarning")
def test_what_are_no_parameters_is_refused(
    name: str, params: Callable[[list[Tensor]], Any], error: type[Exception]
) -> None:
    given = params(list(network(name).parameters()))
    with pytest.raises(error):
        make(name, given)


@every_row
def test_a_parameter_in_two_groups_is_refused(name: str) -> None:
    params = list(network(name).parameters())
    with pytest.raises(ValueError, match="more than one parameter group"):
        make(name, [{"params": params}, {"params": params[:1]}])
    optimizer = make(name, params)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": params[:1]})
    assert 1 == len(optimizer.param_groups)


@every_row
def test_a_graph_from_before_the_step_is_not_differentiated_again(name: str) -> None:
    """As with torch's own steps: the weights that it kept are no longer there."""
    model = network(name)
    optimizer = make(name, model)
    losses = [squared_error(model, batch) / 8 for batch in batches(0)]
    for loss in losses:
        loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()


@pytest.mark.parametrize("shape", [(12, 8), (8, 10)], ids=["larger", "transposed"])
@every_row
def test_a_state_of_another_shape_is_refused(name: str, shape: tuple[int, int]) -> None:
    """By StateError, or by torch at the step; what is written has to be the parameter's own."""
    optimizers, weights = [], []
    for own in ((10, 8), shape):
        weights.append(nn.Parameter(torch.ones(own)))
        optimizers.append(make(name, weights[-1:]))
    for weight, optimizer in zip(weights, optimizers, strict=True):
        for row in torch.randn(3, *weight.shape):
            torch.autograd.backward([weight], [row])
        if weight is weights[0]:
            optimizer.step()
    saved = optimizers[0].state_dict()
    if not any(value.ndim for state in saved["state"].values() for value in state.values()):
        pytest.skip("its state has no shape")

    def load_and_step() -> None:
        optimizers[1].load_state_dict(saved)
        optimizers[1].step()

    with pytest.raises((StateError, RuntimeError)):
        load_and_step()


@pytest.mark.parametrize("make_other", [torch.optim.Adam, torch.optim.SGD])
@every_row
def test_a_state_of_another_optimizer_that_is_refused_changes_nothing(name, make_other) -> None:
    weights = [nn.Parameter(torch.ones(10, 8)) for _ in range(3)]
    optimizer, untouched = (make(name, [weight]) for weight in weights[:2])
    other = make_other(weights[2:], lr=0.1)

    def step(number: int) -> None:
        for row in torch.randn(3, 10, 8, generator=torch.Generator().manual_seed(number)):
            for weight in weights:
                torch.autograd.backward([weight], [row])
        for each in (optimizer, untouched, other):
            each.step()
            each.zero_grad()

    step(0)
    try:
        optimizer.load_state_dict(other.state_dict())
    except StateError:
        step(1)
        assert torch.equal(*weights[:2])


@pytest.mark.parametrize("shape", [(12, 8), (8, 10)], ids=["larger", "transposed"])
def test_an_average_of_another_shape_is_refused_when_it_is_loaded(shape: tuple[int, int]) -> None:
    weights = [nn.Parameter(torch.ones(own)) for own in ((10, 8), shape)]
    one, other = (VRSGD([weight], lr=0.1, beta3=0.9) for weight in weights)
    for row in torch.randn(3, 10, 8):
        torch.autograd.backward(weights[:1], [row])
    one.step()
    with pytest.raises(StateError, match=r"was saved for a parameter of shape \(10, 8\)"):
        other.load_state_dict(one.state_dict())


@scaled_rows
def test_a_refused_step_has_never_been(name: str) -> None:
    """What is refused in the second group leaves the first one's p, and both gradients."""
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(2)]
    optimizer = make(name, [{"params": [w]} for w in weights], beta3=0.9, watch=True)
    for attempt in range(2):
        for row in torch.randn(8, 2, 2, generator=torch.Generator().manual_seed(0)):
            torch.autograd.backward(weights[: 1 + attempt], [row] * (1 + attempt))
        if not attempt:
            weights[1].grad = torch.ones(2, 2)
            before = weights[0].grad.clone()
            with pytest.raises(GradientError, match="no counted backward"):
                optimizer.step()
            assert torch.equal(before, weights[0].grad)
            optimizer.zero_grad()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    assert [1.0, 1.0] == [state[i]["gsnr_steps"].item() for i in range(2)]


# types of what is around it


@every_row
def test_a_default_type_and_device_of_the_users_are_left_alone(name: str) -> None:
    """Steps are counted in float32, beyond 256; kernels' arrays are where the kernels are."""
    ends = []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "meta")):
        weight = nn.Parameter(torch.ones(3, 2))
        optimizer = make(name, [weight])
        draw = torch.Generator().manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            for _ in range(4):
                rows = torch.randn(2, 3, 2, generator=draw, dtype=torch.float32)
                for row in rows:
                    torch.autograd.backward([weight], [row])
                # torch's own optimizers make state on the default device
                with torch.device(device) if optimizer.state else contextlib.nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.set_default_dtype(torch.float32)
        ends.append([weight])
        counts = [
            value.dtype
            for state in optimizer.state_dict()["state"].values()
            for key, value in state.items()
            if key == "gsnr_steps" or (key == "step" and not name.startswith("VR("))
        ]
        assert {torch.float32} >= set(counts)
    assert same(*ends)


@scaled_rows
@pytest.mark.parametrize("start", [torch.float32, torch.float64], ids=str)
def test_a_state_continues_in_the_other_precision(name: str, start: torch.dtype) -> None:
    end = torch.float64 if start == torch.float32 else torch.float32
    model = network(name, start)
    optimizer = make(name, model, beta3=0.9)
    train(model, optimizer, range(2))
    other = copy.deepcopy(model).to(end)
    replica = make(name, other, beta3=0.9)
    replica.load_state_dict(through_a_file(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, replica)):
        train(m, o, range(2, 4))
    # float32 steps against float64 ones; signs and bfloat16 pass on what a rounding turned
    assert difference(model, other) < (1e-4 if ROWS[name].smooth else 0.1)


# threads and compilers


@every_row
def test_two_threads_do_what_one_does(name: str) -> None:
    """Large enough that torch shares it out, and the kernels too, from 2^18 elements on."""
    ends = []
    for count in (1, 2):
        draw = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(600, 500, generator=draw))
        optimizer = make(name, [weight])
        with threads(count):
            for _ in range(3):
                row = torch.randn(600, 500, generator=draw) + 0.3
                torch.autograd.backward([weight], [row])
            optimizer.step()
        ends.append([weight])
    # sums in another order; Muon multiplies matrices in bfloat16
    assert difference(*ends) < (1e-2 if name == "VR(Muon)" else 1e-5)


# it takes a while: as a rule one of each kind
COMPILED = ("VRSGD", "VRAdam", "VRLARS", "LAMB", "VR(Lion)")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in COMPILED else pytest.mark.thorough) for name in ROWS],
)
def test_a_compiled_training_step_is_the_same_and_silent(name: str) -> None:
    expected, model = network(name), network(name)
    train(expected, make(name, expected), range(3))
    optimizer = make(name, model)

    def step(micro: list[Batch]) -> None:
        for batch in micro:
            (squared_error(model, batch) / 8).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager")
    with warnings.catch_warnings(action="error"):
        for seed in range(3):
            compiled(batches(seed))
    assert same(expected, model)


@scaled_rows
def test_a_compiled_model_is_trained_as_the_model_is(name: str) -> None:
    expected, model = network(name), network(name)
    train(expected, make(name, expected), range(3))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)  # no break inside
    optimizer = make(name, compiled)
    with warnings.catch_warnings(action="error"):
        train(compiled, optimizer, range(3))
    assert same(expected, model)


# torch's own list of settings


def torchs_settings() -> list[Any]:
    """(class, description, settings) of torch's test data; one that says why, where it is not."""
    try:
        from torch.testing._internal.common_optimizers import optim_db
    except ImportError as missing:
        reason = f"torch's test data need what is not installed: {missing}"
        return [pytest.param("SGD", "all", {}, marks=pytest.mark.skip(reason=reason))]
    left_out = {"amsgrad", "capturable", "differentiable"}
    return [
        pytest.param(info.optim_cls.__name__, case.desc, case.kwargs)
        for info in optim_db
        if info.optim_cls in (SGD, Adam, AdamW)
        for case in info.optim_inputs_func(device="cpu")
        if not left_out & {key for key, value in case.kwargs.items() if value}
    ]


COUNTERPARTS: dict[str, tuple[Make, Make]] = {
    "SGD": (VRSGD, SGD),
    "Adam": (functools.partial(VRAdam, decoupled_weight_decay=False), Adam),
    "AdamW": (functools.partial(VRAdam, weight_decay=1e-2), AdamW),
}


@pytest.mark.parametrize(("kind", "description", "settings"), torchs_settings())
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_gamma_one_is_torchs_with_each_of_torchs_own_settings(
    kind: str, description: str, settings: dict[str, Any], fused: bool
) -> None:
    ours_of, theirs_of = COUNTERPARTS[kind]
    ours, theirs = network("VRSGD", torch.float64), network("VRSGD", torch.float64)
    own = {"gamma": 1.0, "r_max": 1.0, "beta3": None, "fused": fused}
    train(ours, ours_of(ours.parameters(), **(settings | own)), range(6))
    train(theirs, theirs_of(theirs.parameters(), **settings, fused=fused), range(6))
    assert same(theirs, ours)
