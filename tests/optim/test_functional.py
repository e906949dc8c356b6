"""The pure rules of optim/functional.py and the kernels, `welford` and GSNR, against float64."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch.gradients import SingleProcessSource
from bigbatch.kernels import native
from bigbatch.optim import functional
from bigbatch.optim.apply_gsnr import Layers
from bigbatch.optim.apply_gsnr import apply_gsnr as apply_to_columns
from bigbatch.optim.two_pass import Chunk
from bigbatch.statistics.second_moment import GradientMoments
from oracles import vr
from property_tests import property_test
from tensors import threads

torch.set_num_threads(1)  # small tensors: a second thread only waits

EPS = torch.finfo(torch.float32).eps
INF, NAN = math.inf, math.nan
CLIPS = {"printed": (0.1, 1.0), "wide": (0.1, 10.0), "off": (1.0, 1.0), "narrow": (0.5, 2.0)}
every_clip = pytest.mark.parametrize("clip", CLIPS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no compiled kernels here")
ways = pytest.mark.parametrize(
    "fused", [pytest.param(True, marks=needs_kernels), False], ids=["kernels", "torch"]
)


class Layer(NamedTuple):
    """One row of `Layers`."""

    total: Tensor
    m2: Tensor
    gradient: Tensor
    average: Tensor | None = None
    correction: float = 1.0


def columns_of(layers: Sequence[Layer]) -> list[Any]:
    """S, M2, gradients and p of the layers, each a list; None for no p."""
    columns = [[layer[place] for layer in layers] for place in range(4)]
    return [None if any(x is None for x in column) else column for column in columns]


def apply_gsnr(options: dict[str, Any], layers: Sequence[Layer]) -> Tensor:
    """The library's function, over a list of layers."""
    corrections = [layer.correction for layer in layers]
    return apply_to_columns(Layers(*columns_of(layers), corrections), **options)


def options(
    clip: tuple[float, float], beta3: float, weight: float, *, fused: bool, watch: bool = False
) -> dict[str, Any]:
    group = {"gamma": clip[0], "r_max": clip[1], "beta3": beta3}
    return {"group": group, "weight": weight, "fused": fused, "watch": watch}


def squares(x: Tensor) -> Tensor:
    """|x|^2, as the torch operations sum it."""
    return Chunk([[x]], slice(0, 1), [(1.0, 0.0)], [x.numel()]).squares(x.flatten())[0, 0]


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)


def moments_of(
    gradients: Sequence[Tensor], *, fused: bool, weights: Sequence[float] | None = None
) -> tuple[Tensor, Tensor, float]:
    """(S, M2, N) as an optimizer gets them: each given h_d = n_d g_d comes by a backward."""
    weight = nn.Parameter(torch.empty_like(gradients[0]))
    source = SingleProcessSource([weight], explicit=True)
    source.subscribe(moments := GradientMoments(fused=fused))
    for h_d, n_d in zip(gradients, weights or [1.0] * len(gradients), strict=True):
        with source.micro_batch(weight=n_d):
            torch.autograd.backward([weight], [h_d])
    (total,), (m2,) = moments.sums_and_m2s([weight], source.sums_of)
    return total, m2, moments.weight


def r_of(
    gradients: Sequence[Tensor],
    *,
    fused: bool,
    clip: tuple[float, float] = (0.1, 1.0),
    weights: Sequence[float] | None = None,
) -> Tensor:
    """r itself: what a gradient of ones becomes."""
    total, m2, weight = moments_of(gradients, fused=fused, weights=weights)
    ones = torch.ones_like(total)
    apply_gsnr(options(clip, 0.0, weight, fused=fused), [Layer(total, m2, ones)])
    return ones


def expected_r(
    gradients: Sequence[Tensor],
    *,
    clip: tuple[float, float] = (0.1, 1.0),
    weights: Sequence[float] | None = None,
) -> Tensor:
    """The oracle's, of the same h_d."""
    n_ds = list(weights or [1.0] * len(gradients))
    g_ds = [h_d.double() / n_d for h_d, n_d in zip(gradients, n_ds, strict=True)]
    return vr.GsnrScaling(*clip, None)(0, g_ds, n_ds)


# closed forms


def test_the_ratio_is_the_square_of_students_t_over_k_minus_one() -> None:
    rows = torch.tensor([[1.0, 5.0], [2.0, 1.0], [6.0, -3.0]], dtype=torch.float64)
    mean, deviation = rows.mean(0), rows.std(0)  # over k - 1
    t = mean / (deviation / 3**0.5)
    m2 = (rows - mean).square().sum(0)
    torch.testing.assert_close(functional.ratio(rows.sum(0), m2, 3.0), t.square() / 2)


def test_the_ratio_of_a_mean_of_3_and_a_variance_of_2_is_four_and_a_half() -> None:
    # over N = 4: S = 12, M2 = 8
    assert [4.5] == functional.ratio(torch.tensor([12.0]), torch.tensor([8.0]), 4.0).tolist()


@dtypes
def test_the_ratio_is_infinite_where_all_agree_and_nan_where_all_are_zero(
    dtype: torch.dtype,
) -> None:
    total = torch.tensor([3.0, -3.0, 0.0, 0.0, NAN, 3.0], dtype=dtype)
    m2 = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, NAN], dtype=dtype)
    expected = torch.tensor([INF, INF, NAN, 0.0, NAN, NAN], dtype=dtype)
    torch.testing.assert_close(
        functional.ratio(total, m2, 8.0), expected, equal_nan=True, rtol=0, atol=0
    )


@dtypes
def test_agreement_begins_at_four_roundings_of_the_mean(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    assert pytest.approx((4 * eps) ** -2) == functional.agreement(dtype)
    for deviation, agrees in ((2 * eps, True), (3.9 * eps, True), (4.1 * eps, False)):
        q = functional.ratio(
            torch.tensor([1.0], dtype=dtype), torch.tensor([deviation**2]).to(dtype), 1
        )
        assert agrees == bool(q.isinf())


def test_live_sums_leave_out_what_is_not_finite() -> None:
    q = torch.tensor([1.0, INF, 2.5, NAN, 0.0])
    values, ones = functional.live(q)
    assert (3.5, 3.0) == (values.sum(), ones.sum())
    assert torch.equal(q.isfinite(), ones == 1)


def test_the_normalized_ratio_is_over_its_mean_and_clipped() -> None:
    q = torch.tensor([1.0, INF, 3.0, NAN, 0.0, 40.0])
    expected = [0.5, 10.0, 1.5, 0.1, 0.1, 10.0]
    r = functional.normalized(q, torch.tensor(2.0), 0.1, 10.0)
    assert pytest.approx(expected) == r.tolist()


def test_a_layer_without_live_elements_has_no_mean_to_divide_by() -> None:
    total, m2 = torch.tensor([3.0, 0.0]), torch.zeros(2)
    r = functional.gsnr(total, m2, 8.0, gamma=0.1, r_max=10.0)
    assert pytest.approx([10.0, 0.1]) == r.tolist()


def test_what_is_no_number_is_clipped_to_the_lower_bound() -> None:
    q = torch.tensor([NAN, -INF, -1.0, 0.5, 3.0, INF])
    r = functional.normalized(q, torch.tensor(1.0), 0.25, 2.0)
    assert [0.25, 0.25, 0.25, 0.5, 2.0, 2.0] == functional.normalized(
        r, torch.tensor(1.0), 0.25, 2.0
    ).tolist()


def test_the_average_of_r_is_corrected_for_its_start_at_zero() -> None:
    average = torch.zeros(2, dtype=torch.float64)
    seen = [torch.tensor([1.0, 0.2]), torch.tensor([1.0, 0.8]), torch.tensor([1.0, 0.1])]
    for t, r in enumerate(seen, start=1):
        hat = functional.update_average(average, r.double(), 0.9, 1 / (1 - 0.9**t))
    weights = [0.1 * 0.9**2, 0.1 * 0.9, 0.1]
    second = sum(w * float(r[1]) for w, r in zip(weights, seen, strict=True)) / sum(weights)
    assert pytest.approx([1.0, second]) == hat.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_squares_are_summed_in_the_widest_type(dtype: torch.dtype) -> None:
    x = torch.full((3000,), 2e-4).to(dtype)  # whose squares are no float16 numbers
    norm = squares(x)
    assert torch.float64 == norm.dtype
    assert pytest.approx(x.double().square().sum().item(), rel=1e-5) == norm.item()


@pytest.mark.parametrize("elements", [2**12, 2**18, 2**22])
def test_squares_of_large_layers_are_as_good_as_those_of_small_ones(elements: int) -> None:
    x = gaussian(elements, seed=0, dtype=torch.float32)
    assert pytest.approx(x.double().square().sum().item(), rel=1e-6) == squares(x).item()


def test_the_rate_of_lars() -> None:
    """0.1 * 5 / (2 + 0.2 * 5) = 1 / 6."""
    rate = functional.lars_rate(torch.tensor(5.0), torch.tensor(2.0), 0.2, 0.1)
    assert pytest.approx(1 / 6) == rate.item()


@pytest.mark.parametrize(("weight", "gradient"), [(0.0, 2.0), (5.0, 0.0), (0.0, 0.0)])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_a_rate_with_a_norm_of_zero_is_one(weight: float, gradient: float, decay: float) -> None:
    norms = torch.tensor(weight), torch.tensor(gradient)
    assert 1.0 == functional.lars_rate(*norms, decay, 0.1)
    assert 1.0 == functional.lamb_rate(*norms)


def test_the_rate_of_lamb() -> None:
    assert 2.5 == functional.lamb_rate(torch.tensor(5.0), torch.tensor(2.0))


@pytest.mark.parametrize(("nesterov", "second"), [(False, 0.0), (True, -0.75)])
def test_two_steps_of_lars(nesterov: bool, second: float) -> None:
    """Both summands are .5 (1 + .5 2) = 1, then .5 (1 + .5 theta); the buffer is halved."""
    theta, buffer = torch.tensor([2.0]), torch.zeros(1)
    for _ in range(2):
        functional.lars_step(theta, torch.ones(1), buffer, 0.5, 0.5, 0.5, nesterov)
    # plain: 2 - 1 = 1, b = .5 + .75, 1 - 1.25; nesterov: 2 - 1.5, b = .5 + .625, - (.5625 + .625)
    first_plain, first_nesterov = 1.0, 0.5
    summand = 0.5 * (1 + 0.5 * (first_nesterov if nesterov else first_plain))
    b = 0.5 * 1 + summand
    assert [b] == buffer.tolist()
    expected = first_nesterov - (0.5 * b + summand) if nesterov else first_plain - b
    assert pytest.approx([expected]) == theta.tolist()


def test_two_moments_of_lamb_and_its_direction() -> None:
    m, v = torch.tensor([1.0]), torch.tensor([4.0])
    functional.lamb_moments(torch.tensor([3.0]), m, v, 0.5, 0.75)
    assert ([2.0], [5.25]) == (m.tolist(), v.tolist())
    theta = torch.tensor([10.0])
    u = functional.lamb_direction(theta, m, v, (0.5, 0.25), 0.5, 0.1)
    assert pytest.approx([4 / (21**0.5 + 0.5) + 1.0]) == u.tolist()


def test_moments_of_bfloat16_gradients_are_kept_in_the_moments_type() -> None:
    m, v = torch.zeros(1), torch.zeros(1)
    for _ in range(100):
        functional.lamb_moments(torch.ones(1, dtype=torch.bfloat16), m, v, 0.9, 0.999)
    assert pytest.approx(1 - 0.999**100, rel=1e-4) == v.item()  # bfloat16 would stall at 0.25


numbers = st.floats(-1e3, 1e3, allow_subnormal=False).map(
    lambda x: 0.0 if abs(x) < 1e-3 else x
)  # nothing whose square is lost


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=2, max_size=6))
@property_test(25)
def test_r_lies_between_its_bounds_and_says_the_same_of_minus_g(rows: list[list[float]]) -> None:
    gradients = torch.tensor(rows, dtype=torch.float64)
    clip = CLIPS["wide"]
    r = r_of(list(gradients), fused=False, clip=clip)
    assert bool((clip[0] <= r).all())
    assert bool((r <= clip[1]).all())
    assert torch.equal(r, r_of(list(-gradients), fused=False, clip=clip))


# both ways, from backwards to r


@ways
@dtypes
@every_clip
@pytest.mark.parametrize("sizes", [[1.0] * 8, [3.0, 17.0, 8.0, 1.0, 11.0]], ids=["equal", "uneven"])
def test_r_is_the_oracles(clip: str, dtype: torch.dtype, sizes: list[float], fused: bool) -> None:
    gradients = (gaussian(len(sizes), 40, seed=1) + 0.4) * torch.tensor(sizes)[:, None]
    gradients[:, :5] = 0  # dead
    gradients[:, 5:8] = torch.tensor(sizes)[:, None] / 4  # all agree, exactly
    own = {"clip": CLIPS[clip], "weights": sizes}
    rows = list(gradients.to(dtype))
    expected = expected_r(rows, **own)
    # float32: a variance has lost two digits where the gradients agree to .01, and so has the mean
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        r_of(rows, fused=fused, **own).double(), expected, rtol=tolerance, atol=0
    )


@ways
def test_the_order_of_the_micro_batches_does_not_matter(fused: bool) -> None:
    sizes = [3.0, 17.0, 8.0, 1.0, 11.0, 2.0]
    gradients = ((gaussian(6, 50, seed=2) + 0.4) * torch.tensor(sizes)[:, None]).float()
    own = {"clip": CLIPS["wide"], "fused": fused}
    expected = r_of(list(gradients), weights=sizes, **own)
    for order in ([5, 4, 3, 2, 1, 0], [1, 3, 5, 0, 2, 4]):
        actual = r_of([gradients[d] for d in order], weights=[sizes[d] for d in order], **own)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


@ways
@dtypes
@pytest.mark.parametrize("scale", [1e-12, 1e-4, 1e4, 1e12])
def test_the_unit_of_the_gradient_does_not_matter(
    scale: float, dtype: torch.dtype, fused: bool
) -> None:
    gradients = (gaussian(8, 50, seed=3) + 0.4).to(dtype)
    own = {"clip": CLIPS["wide"], "fused": fused}
    expected, actual = r_of(list(gradients), **own), r_of(list(scale * gradients), **own)
    torch.testing.assert_close(actual, expected, rtol=200 * torch.finfo(dtype).eps, atol=0)


@ways
@pytest.mark.parametrize("scale", [2.0**-45, 2.0**-20, 2.0**20, 2.0**45])
def test_a_power_of_two_changes_no_bit_of_r(scale: float, fused: bool) -> None:
    gradients = (gaussian(8, 50, seed=3) + 0.4).float()
    assert torch.equal(
        r_of(list(gradients), fused=fused), r_of(list(scale * gradients), fused=fused)
    )


@ways
@pytest.mark.parametrize("order", ["as-they-come", "backwards"])
def test_variance_is_right_at_a_signal_of_a_million_times_the_noise(
    order: str, fused: bool
) -> None:
    k = 64
    gradients = (1 + 1e-3 * gaussian(k, 1000, seed=4)).float()
    rows = list(gradients if order == "as-they-come" else gradients.flip(0))
    exact = (gradients.double() - gradients.double().mean(0)).square().sum(0)
    literal = gradients.square().sum(0) - gradients.sum(0).square() / k
    assert (literal / exact - 1).abs().max() > 0.05  # the case is a hard one
    _, m2, _ = moments_of(rows, fused=fused)
    # the running mean is rounded to 6e-8, 6e-5 of a deviation; of 64 squares most cancels
    assert (m2 / exact - 1).abs().max() < 2e-4
    torch.testing.assert_close(
        r_of(rows, fused=fused, clip=(0.1, 10.0)).double(),
        expected_r(rows, clip=(0.1, 10.0)),
        rtol=1e-3,
        atol=0,
    )


@ways
@pytest.mark.parametrize("signal", [1e4, 1e7])
def test_no_variance_is_negative_or_zero_however_large_the_signal(
    signal: float, fused: bool
) -> None:
    gradients = (signal**0.5 + gaussian(64, 2000, seed=5)).float()
    _, m2, _ = moments_of(list(gradients), fused=fused)
    assert bool((m2 > 0).all())


@ways
@pytest.mark.parametrize("k", [8, 16, 64])
def test_pure_noise_has_a_mean_ratio_of_one_over_k_minus_three(k: int, fused: bool) -> None:
    elements = 100_000
    total, m2, weight = moments_of(
        list(gaussian(k, elements, seed=k, dtype=torch.float32)), fused=fused
    )
    q = functional.ratio(total, m2, weight).double()
    error = float(q.std()) / elements**0.5
    assert pytest.approx(1 / (k - 3), abs=4 * error) == float(q.mean())
    assert error < 0.02 / (k - 3)  # so that the test can fail


@ways
@pytest.mark.parametrize(
    "sizes", [[1.0] * 2, [1.0] * 8, [1.0, 2.0, 4.0, 8.0, 16.0]], ids=["2", "8", "uneven"]
)
def test_the_ratio_of_pure_noise_is_fisher_distributed(sizes: list[float], fused: bool) -> None:
    """(k - 1) q ~ F(1, k - 1), with unequal micro-batches too, whose mean has variance 1 / n_d."""
    k = len(sizes)
    noise = gaussian(k, 20_000, seed=7, dtype=torch.float32)
    rows = [h * n**0.5 for h, n in zip(noise, sizes, strict=True)]  # h_d = n_d g_d
    q = functional.ratio(*moments_of(rows, weights=sizes, fused=fused))
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    found = stats.kstest(((k - 1) * q).double().cpu().numpy(), stats.f(1, k - 1).cdf)
    assert found.pvalue > 0.001  # given the seed, this either holds or does not


@ways
@pytest.mark.parametrize(("m", "k"), [(1, 2), (1, 8), (3, 8), (7, 8), (5, 64)])
def test_rows_that_m_of_k_micro_batches_see_have_a_ratio_of_m_over_k_minus_m(
    m: int, k: int, fused: bool
) -> None:
    row = torch.tensor([2.0, -0.5, 1e-6])
    rows = [row if d % k < m else torch.zeros(3) for d in range(k)]
    q = functional.ratio(*moments_of(rows, fused=fused))
    assert pytest.approx([m / (k - m)] * 3, rel=1e-5) == q.tolist()


@ways
def test_how_often_a_row_is_seen_decides_over_its_factor(fused: bool) -> None:
    """The frequent rows of an embedding get more than the rare ones; `vr=False` is the remedy."""
    rows = torch.zeros(8, 2)
    rows[:7, 0] = 1.0
    rows[0, 1] = 1.0  # q = 7 and 1/7, mean 25/7
    expected = [min(10.0, 7 * 7 / 25), 0.1]
    assert (
        pytest.approx(expected, rel=1e-5)
        == r_of(list(rows), fused=fused, clip=(0.1, 10.0)).tolist()
    )


# the kernel welford


def welford(
    gradients: list[Tensor],
    totals: list[Tensor],
    m2s: list[Tensor],
    mean_of: float,
    share: float,
    *,
    adds: bool,
    first: bool = False,
) -> None:
    values = (mean_of, share, first, adds)
    native.run(native.Rule.WELFORD, [gradients, totals, m2s], values)


@needs_kernels
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (17,), (4096,), (4097,), (3, 5, 7), (400_003,)])
@pytest.mark.parametrize("adds", [True, False], ids=["adds", "leaves-the-sum"])
def test_the_welford_kernel_is_its_formula(shape: tuple[int, ...], count: int, adds: bool) -> None:
    gradient, total, m2 = (gaussian(*shape, seed=s, dtype=torch.float32) for s in range(3))
    m2 = m2.square()
    expected_m2 = m2.double() + 0.75 * (gradient.double() - 0.5 * total.double()).square()
    expected_total = total.double() + (gradient.double() if adds else 0)
    before = gradient.clone()
    with threads(count):
        welford([gradient], [total], [m2], 0.5, 0.75, adds=adds)
    # a rounding of 6e-8 in the difference, whose terms are at most 5, one in its square, one after
    torch.testing.assert_close(m2.double(), expected_m2, rtol=4 * EPS, atol=20 * EPS)
    torch.testing.assert_close(total.double(), expected_total, rtol=EPS, atol=5 * EPS)
    assert torch.equal(before, gradient)


@pytest.mark.cpu
@needs_kernels
def test_squared_norms_are_summed_in_double() -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (17,), (400_003,)]
    gradients = [1e-23 * gaussian(*s, seed=len(s), dtype=torch.float32) for s in shapes]
    with threads(2):
        actual = native.squared_norms(gradients)
    expected = torch.stack([g.double().square().sum() for g in gradients])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)


@needs_kernels
def test_the_first_pair_of_micro_batches_writes_m2() -> None:
    """So nobody has to set it to 0."""
    first, second = (gaussian(4097, seed=s, dtype=torch.float32) for s in range(2))
    total, m2 = first.clone(), torch.full((4097,), NAN)
    welford([second], [total], [m2], 1.0, 0.5, adds=True, first=True)
    expected = 0.5 * (second.double() - first.double()).square()
    torch.testing.assert_close(m2.double(), expected, rtol=4 * EPS, atol=20 * EPS)
    torch.testing.assert_close(total, first + second)


@needs_kernels
def test_the_welford_kernel_gives_the_same_bits_on_any_number_of_threads() -> None:
    seen = []
    for count in (1, 2, 5):
        gradient, total, m2 = (gaussian(400_003, seed=s, dtype=torch.float32) for s in range(3))
        with threads(count):
            welford([gradient], [total], [m2], 0.5, 0.75, adds=True)
        seen.append((total, m2))
    for total, m2 in seen[1:]:
        assert torch.equal(seen[0][0], total)
        assert torch.equal(seen[0][1], m2)


@pytest.mark.cpu
@needs_kernels
def test_the_welford_kernel_takes_channels_last_arrays_as_they_lie() -> None:
    arrays = [gaussian(4, 3, 5, 5, seed=s, dtype=torch.float32) for s in range(3)]
    last = [x.contiguous(memory_format=torch.channels_last) for x in arrays]
    assert native.fits(*([x] for x in last))
    welford(*([x] for x in arrays), 0.5, 0.75, adds=True)
    welford(*([x] for x in last), 0.5, 0.75, adds=True)
    for plain, other in zip(arrays, last, strict=True):
        torch.testing.assert_close(other, plain, rtol=EPS, atol=EPS)


@needs_kernels
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_what_is_not_finite_stays_where_it_is(bad: float) -> None:
    gradient, total, m2 = torch.ones(3), torch.ones(3), torch.ones(3)
    gradient[1] = bad
    welford([gradient], [total], [m2], 1.0, 1.0, adds=True)
    assert [True, False, True] == total.isfinite().tolist()
    assert [True, False, True] == m2.isfinite().tolist()


FITS = {
    "contiguous": ([(4, 6), (4, 6)], lambda x: x, True),
    "0-dim": ([(), ()], lambda x: x, True),
    "empty": ([(0, 3), (0, 3)], lambda x: x, True),
    "channels-last": (
        [(2, 3, 4, 4), (2, 3, 4, 4)],
        lambda x: x.contiguous(memory_format=torch.channels_last),
        True,
    ),
    "transposed": ([(4, 6), (4, 6)], lambda x: x.t(), False),
    "strided": ([(4, 6), (4, 6)], lambda x: x[:, ::2], False),
    "expanded": ([(1, 6), (1, 6)], lambda x: x.expand(4, 6), False),
    "double": ([(4, 6), (4, 6)], lambda x: x.double(), False),
    "half": ([(4, 6), (4, 6)], lambda x: x.half(), False),
    "bfloat16": ([(4, 6), (4, 6)], lambda x: x.bfloat16(), False),
}


@pytest.mark.cpu
@needs_kernels
@pytest.mark.parametrize("name", FITS)
def test_what_fits_the_kernels(name: str) -> None:
    shapes, lay_out, expected = FITS[name]
    arrays = [lay_out(torch.ones(shape)) for shape in shapes]
    assert expected == native.fits(arrays[:1], arrays[1:])
    assert expected == native.fits(arrays[:1], None, arrays[1:])
    assert expected == native.fits([arrays[0], torch.ones(3)], [arrays[1], torch.ones(3)])


@pytest.mark.cpu
@needs_kernels
def test_arrays_of_different_layouts_do_not_fit_together() -> None:
    plain = torch.ones(2, 3, 4, 4)
    last = plain.contiguous(memory_format=torch.channels_last)
    assert not native.fits([plain], [last])
    assert not native.fits([last], [plain])
    three = torch.ones(1, 3, 1, 1)
    assert native.fits([three], [three.contiguous(memory_format=torch.channels_last)])


# the kernel GSNR

SHAPES = [(), (1,), (17,), (40, 25), (4096,), (4097,), (3, 2, 4, 4), (0,), (300_007,)]


def random_layers(
    shapes: Sequence[tuple[int, ...]], *, averages: bool, dtype: torch.dtype = torch.float32
) -> list[Layer]:
    """Layers as after eight micro-batches of size 3, with dead and exact elements."""
    layers = []
    for i, shape in enumerate(shapes):
        total = (gaussian(*shape, seed=10 + i) + 0.4).to(dtype) * 24
        m2 = gaussian(*shape, seed=20 + i).square().add(0.1).to(dtype) * 24
        if total.numel() > 5:
            total.view(-1)[:2] = m2.view(-1)[:2] = 0.0  # dead
            m2.view(-1)[3] = 0.0  # exact
        p = gaussian(*shape, seed=30 + i).abs().to(dtype) if averages else None
        layers.append(Layer(total, m2, gaussian(*shape, seed=40 + i).to(dtype), p, 1.25))
    return layers


def copied(layers: Sequence[Layer], dtype: torch.dtype) -> list[Layer]:
    return [
        Layer(*(None if x is None else x.to(dtype, copy=True) for x in layer[:4]), 1.25)
        for layer in layers
    ]


def how(clip: tuple[float, float], *, fused: bool, watch: bool = True) -> dict[str, Any]:
    return options(clip, 0.75, 24.0, fused=fused, watch=watch)


@needs_kernels
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("averages", [False, True], ids=["r", "p"])
def test_the_gsnr_kernel_is_the_float64_rule(averages: bool, count: int) -> None:
    """And so is what it tells: sums and counts over each layer."""
    clip = CLIPS["narrow"]
    layers = random_layers(SHAPES if count > 1 else SHAPES[:-1], averages=averages)
    exact = copied(layers, torch.float64)
    expected = apply_gsnr(how(clip, fused=False), exact)
    with threads(count):
        summary = apply_gsnr(how(clip, fused=True), layers)
    for layer, reference in zip(layers, exact, strict=True):
        # q has three roundings, its mean and r three more, p two; |g| is at most 5, r at most 2
        close = {"rtol": 20 * EPS, "atol": EPS}
        torch.testing.assert_close(layer.gradient.double(), reference.gradient, **close)
        if averages:
            torch.testing.assert_close(layer.average.double(), reference.average, **close)
    torch.testing.assert_close(summary, expected, rtol=1e-5, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("averages", [False, True], ids=["r", "p"])
@pytest.mark.parametrize("watch", [False, True], ids=["unwatched", "watched"])
def test_gsnr_by_torch_and_by_kernel_agree_to_rounding(watch: bool, averages: bool) -> None:
    clip = CLIPS["narrow"]
    by_kernel = random_layers(SHAPES[:-1], averages=averages)
    by_torch = copied(by_kernel, torch.float32)
    apply_gsnr(how(clip, fused=True, watch=watch), by_kernel)
    apply_gsnr(how(clip, fused=False, watch=watch), by_torch)
    for a, b in zip(by_torch, by_kernel, strict=True):
        torch.testing.assert_close(b.gradient, a.gradient, rtol=10 * EPS, atol=EPS)
        if averages:
            torch.testing.assert_close(b.average, a.average, rtol=10 * EPS, atol=EPS)


@ways
def test_watching_changes_nothing(fused: bool) -> None:
    clip = CLIPS["narrow"]
    ends = []
    for watch in (False, True):
        layers = random_layers(SHAPES[:-1], averages=True)
        summary = apply_gsnr(how(clip, fused=fused, watch=watch), layers)
        assert watch == bool(summary.any())
        ends.append(layers)
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(b.gradient, a.gradient, rtol=2 * EPS, atol=0)
        torch.testing.assert_close(b.average, a.average, rtol=2 * EPS, atol=0)


@needs_kernels
def test_the_passes_may_be_run_one_by_one() -> None:
    """As ranks do that hold parts of layers, and add the sums of the first up between them."""
    whole, parts = (columns_of(random_layers([(64,), (40, 25)], averages=True)) for _ in "ab")
    own = [1.25, 0.0] * 2
    group = [24.0, functional.agreement(torch.float32), 0.5, 2.0, 0.75]
    sums, summary = native.run(native.Rule.GSNR, whole, group, own, watch=True)
    first, _ = native.run(native.Rule.GSNR, parts, group, own, passes=native.Passes.FIRST)
    torch.testing.assert_close(first, sums, rtol=0, atol=0)
    _, seen = native.run(
        native.Rule.GSNR, parts, group, own, passes=native.Passes.SECOND, sums=first, watch=True
    )
    torch.testing.assert_close(seen, summary, rtol=0, atol=0)
    for column in (2, 3):
        assert all(map(torch.equal, whole[column], parts[column]))


@needs_kernels
def test_the_first_pass_sums_the_live_ratios() -> None:
    total = torch.tensor([4.0, 8.0, 0.0, 2.0, 0.0])
    m2 = torch.tensor([2.0, 4.0, 0.0, 0.0, 1.0])
    columns = [[total], [m2], [torch.ones(5)], None]
    group = [4.0, functional.agreement(torch.float32), 0.1, 10.0, 0.0]
    sums, _ = native.run(native.Rule.GSNR, columns, group, [1.0, 0.0], passes=native.Passes.FIRST)
    assert [[2.0 + 4.0 + 0.0, 3.0]] == sums.tolist()
    assert torch.equal(torch.ones(5), columns[2][0])


@needs_kernels
@pytest.mark.parametrize("elements", [2**18 - 1, 2**18, 2**18 + 1, 2**18 + 17, 400_003])
@pytest.mark.parametrize("count", [2, 5, 64])
def test_every_element_is_scaled_once_however_many_threads_share_it(
    elements: int, count: int
) -> None:
    layers = random_layers([(n,) for n in (5, elements, 70_000, 3)], averages=True)
    by_torch = copied(layers, torch.float32)
    apply_gsnr(how((0.5, 2.0), fused=False), by_torch)
    with threads(count):
        apply_gsnr(how((0.5, 2.0), fused=True), layers)
    for a, b in zip(by_torch, layers, strict=True):  # hardly an r is 1, so twice shows, and never
        torch.testing.assert_close(b.gradient, a.gradient, rtol=20 * EPS, atol=EPS)
        torch.testing.assert_close(b.average, a.average, rtol=20 * EPS, atol=EPS)


@needs_kernels
def test_a_list_of_no_layers_is_scaled() -> None:
    assert (0, 5) == apply_gsnr(how((0.1, 1.0), fused=True), []).shape


@ways
@pytest.mark.parametrize("where", ["total", "m2"])
def test_a_ratio_that_is_no_number_makes_gamma_and_spares_the_rest(where: str, fused: bool) -> None:
    (layer,) = random_layers([(40,)], averages=False)
    (sound,) = copied([layer], torch.float32)
    getattr(layer, where)[10] = NAN
    sound.total[10] = sound.m2[10] = 0.0  # so is a dead one
    apply_gsnr(how((0.5, 2.0), fused=fused), [layer])
    apply_gsnr(how((0.5, 2.0), fused=fused), [sound])
    assert torch.equal(sound.gradient, layer.gradient)


@ways
def test_a_gradient_that_is_no_number_stays_none(fused: bool) -> None:
    (layer,) = random_layers([(40,)], averages=True)
    layer.gradient[10] = NAN
    apply_gsnr(how((0.5, 2.0), fused=fused), [layer])
    assert 1 == layer.gradient.isnan().sum()
    assert bool(layer.average.isfinite().all())


LAYOUTS = {
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every-other": lambda x: torch.stack([x, 0 * x], dim=-1)[..., 0],
}


@ways
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scaling_goes_by_elements_however_they_lie(layout: str, fused: bool) -> None:
    clip = CLIPS["narrow"]
    plain = random_layers([(3, 2, 4, 4)], averages=True)
    arranged = [Layer(*(LAYOUTS[layout](x) for x in plain[0][:4]), plain[0].correction)]
    assert arranged[0].total.stride() != plain[0].total.stride()
    expected = apply_gsnr(how(clip, fused=False), plain)
    summary = apply_gsnr(how(clip, fused=fused), arranged)
    torch.testing.assert_close(arranged[0].gradient, plain[0].gradient, rtol=10 * EPS, atol=EPS)
    torch.testing.assert_close(arranged[0].average, plain[0].average, rtol=10 * EPS, atol=EPS)
    torch.testing.assert_close(summary, expected, rtol=1e-5, atol=0)


@ways
def test_the_sum_may_be_the_gradient_itself(fused: bool) -> None:
    """As where `.grad` is the sum of the backwards: it is read before it is written."""
    clip = CLIPS["narrow"]
    layers = random_layers(SHAPES, averages=True)
    apart = [layer._replace(gradient=layer.total.clone()) for layer in layers]
    together = [layer._replace(total=layer.gradient) for layer in copied(apart, torch.float32)]
    apply_gsnr(how(clip, fused=fused), apart)
    apply_gsnr(how(clip, fused=fused), together)
    for a, b in zip(apart, together, strict=True):
        assert torch.equal(a.gradient, b.gradient)
        assert torch.equal(a.average, b.average)


@ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_gradients_are_multiplied_by_float32_factors(dtype: torch.dtype, fused: bool) -> None:
    (layer,) = random_layers([(40, 5)], averages=True)
    (exact,) = copied([layer], torch.float64)
    layer = layer._replace(gradient=layer.gradient.to(dtype))
    exact = exact._replace(gradient=layer.gradient.double())
    apply_gsnr(how((0.5, 2.0), fused=fused), [layer])
    apply_gsnr(how((0.5, 2.0), fused=False), [exact])
    assert dtype == layer.gradient.dtype
    # one rounding of the product, none of the factor
    close = {"rtol": torch.finfo(dtype).eps, "atol": 1e-7}
    torch.testing.assert_close(layer.gradient.double(), exact.gradient, **close)
    torch.testing.assert_close(layer.average.double(), exact.average, rtol=20 * EPS, atol=EPS)


# the figures of docs/optimizers.md, section "When it helps, and when not"


def null_layer(k: int, seed: int = 0, elements: int = 200_000) -> tuple[Tensor, Tensor]:
    """(G, s2) over k micro-batches of a layer without any signal."""
    g = gaussian(k, elements, seed=seed)
    return g.mean(0), g.var(0, correction=0)


@pytest.mark.parametrize(("k", "share"), [(2, 0.98), (3, 0.60), (4, 0.38)])
def test_of_few_micro_batches_most_weights_stand_at_gamma(k: int, share: float) -> None:
    """The layer mean has no finite expectation up to k = 3, so seeds differ; k = 3 the most."""
    at_gamma = [
        (functional.gsnr(*null_layer(k, seed), gamma=0.1, r_max=1.0) == 0.1).double().mean().item()
        for seed in range(5)
    ]
    assert pytest.approx(share, abs=0.06) == sorted(at_gamma)[2]


def test_pure_noise_keeps_half_its_r_and_most_of_its_energy() -> None:
    mean, s2 = null_layer(8)
    r = functional.gsnr(mean, s2, gamma=0.1, r_max=1.0)
    assert pytest.approx(0.49, abs=0.01) == r.mean().item()
    kept = (r * mean).square().sum() / mean.square().sum()
    assert pytest.approx(0.82, abs=0.01) == kept.item()


@pytest.mark.parametrize(("deviation", "expected"), [(None, 0.80), (0.1, 0.67), (0.01, 0.10)])
def test_one_weight_in_a_thousand_that_is_well_known_holds_the_others_down(
    deviation: float | None, expected: float
) -> None:
    """1,000 weights of mean 1/2 and deviation 1, k = 64; the clear one's deviation is given.

    Over five seeds the means scatter by .02.
    """
    g = gaussian(64, 1000, seed=0) + 0.5
    if deviation is not None:
        g[:, 0] = 1 + deviation * gaussian(64, seed=1)
    r = functional.gsnr(g.mean(0), g.var(0, correction=0), gamma=0.1, r_max=1.0)
    assert pytest.approx(expected, abs=0.03) == r[1:].mean().item()
