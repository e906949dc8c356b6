"""Every optimizer of torch with the settings of torch's own tests, as the base of VarianceReduced.

Its list, `torch.testing._internal.common_optimizers.optim_db`, says which settings are worth a
test; the checks are those of torch's tests that hold for what wraps an optimizer.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bigbatch.errors import SettingError
from bigbatch.optim import VarianceReduced

optim_db = pytest.importorskip("torch.testing._internal.common_optimizers").optim_db
pytestmark = pytest.mark.filterwarnings("ignore")
K = 4
NOT_WRAPPED = {"LBFGS": "closure", "SparseAdam": None}  # the second takes sparse gradients alone


def settings_of(info):
    kinds = [{}, {"foreach": True}, {"fused": True}]
    kinds = [kind for kind in kinds if not kind or next(iter(kind)) in info.supported_impls]
    for case in info.optim_inputs_func(device="cpu"):
        if not {"capturable", "differentiable"} & {k for k, v in case.kwargs.items() if v}:
            for kind in kinds:
                name = f"{info.optim_cls.__name__} {case.desc} {'-'.join(kind) or 'plain'}"
                yield pytest.param(info.optim_cls, case.kwargs | kind, id=name)


ALL = [
    case for info in optim_db if info.optim_cls.__name__ not in NOT_WRAPPED
    for case in settings_of(info)
]  # fmt: skip
each = pytest.mark.parametrize(("kind", "settings"), ALL)


def network(kind):
    torch.manual_seed(1)
    bias = kind.__name__ != "Muon"  # which takes matrices alone
    layers = [nn.Linear(6, 16, bias=bias), nn.Tanh(), nn.Linear(16, 3, bias=bias)]
    return nn.Sequential(*layers).double()


def train(model, optimizer, steps):
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for _ in range(K):
            x = torch.randn(8, 6, generator=draw, dtype=torch.float64)
            (cross_entropy(model(x), (x[:, 0] > 0).long() + (x[:, 1] > 0).long()) / K).backward()
        optimizer.step()


def assert_same(expected, actual):
    for one, other in zip(expected.parameters(), actual.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_list_has_every_optimizer_of_torch():
    listed = {info.optim_cls for info in optim_db}
    known = {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    known = {k for k in known if issubclass(k, torch.optim.Optimizer)} - {torch.optim.Optimizer}
    assert known <= listed


def test_lbfgs_is_refused_in_a_sentence():
    base = torch.optim.LBFGS(network(torch.optim.LBFGS).parameters())
    with pytest.raises(SettingError, match=NOT_WRAPPED["LBFGS"]):
        VarianceReduced(base)


@each
def test_a_factor_of_one_is_its_own_step(kind, settings):
    expected, actual = network(kind), network(kind)
    train(expected, kind(expected.parameters(), **settings), range(6))
    base = kind(actual.parameters(), **settings)
    train(actual, VarianceReduced(base, gamma=1.0, r_max=1.0), range(6))
    assert_same(expected, actual)


@each
def test_a_loaded_or_copied_state_continues_as_if_never_saved(kind, settings):
    model = network(kind)
    optimizer = VarianceReduced(kind(model.parameters(), **settings), beta3=0.9)
    train(model, optimizer, range(2))
    loaded, copied = copy.deepcopy(model), copy.deepcopy([model, optimizer])
    resumed = VarianceReduced(kind(loaded.parameters(), **settings), beta3=0.9)
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    train(model, optimizer, range(2, 5))
    train(loaded, resumed, range(2, 5))
    train(*copied, range(2, 5))
    assert_same(model, copied[0])
    if kind is torch.optim.NAdam:  # one of its sums is float32, and float64 once loaded, alone too
        torch.testing.assert_close([*model.parameters()], [*loaded.parameters()], rtol=1e-7, atol=0)
    else:
        assert_same(model, loaded)


@each
def test_groups_keep_settings_of_their_own(kind, settings):
    """A group of rate 0 and no decay stands still; the other moves."""
    if kind in (torch.optim.Rprop, torch.optim.Adafactor):
        pytest.skip("lr is where its steps begin, or a bound of them")
    model = network(kind)
    before = copy.deepcopy(model)
    first, last = model[0].parameters(), model[2].parameters()
    if isinstance(settings.get("lr"), torch.Tensor):
        pytest.skip("torch's groups have rates of one kind")
    still = {"params": first, "lr": 0.0, "weight_decay": 0.0}
    base = kind([still, {"params": last}], **settings)
    train(model, VarianceReduced(base), range(2))
    assert_same(before[0], model[0])
    assert not torch.equal(before[2].weight, model[2].weight)
