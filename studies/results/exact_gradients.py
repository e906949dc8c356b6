"""Signal and noise of a network's gradient over a whole data set, from every sample's gradient."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bigbatch.errors import SettingError
from bigbatch.statistics.noise_scale import GradientStatistics

_PARTS = 16  # of the data set, for the standard error


def exact_statistics(
    network: nn.Sequential, inputs: Tensor, labels: Tensor
) -> tuple[GradientStatistics, float]:
    """Signal and noise at the present weights, and the standard error of ln B_simple.

    With g_i the gradient of sample i of M, and S = sum g_i:

        |mu|^2 = (|S|^2 - sum |g_i|^2) / (M (M - 1))
        tr(Sigma) = (sum |g_i|^2 - |S|^2 / M) / (M - 1)

    That is exactly the mean of what a step measures whose samples are drawn from these M without
    replacement, whatever its size and number of micro-batches. For a larger population that the M
    samples are drawn from it is an unbiased estimate; the standard error is for that case, by the
    jackknife over 16 parts. |g_i|^2 of a linear layer is |delta_i|^2 (|a_i|^2 + 1), with a_i its
    input and delta_i the gradient of its output, so no sample's gradient is stored.

    Args:
        network: linear layers with bias and functions without parameters; used in float64.
        inputs: (M, features), float64.
        labels: (M,), classes.
    Returns:
        Statistics with samples = micro_batches = M, and the standard error; nan where |mu|^2 is not
        positive without one of the parts.
    Raises:
        SettingError: another layer with parameters, or another type than float64.
    Source:
        The U-statistic of |mu|^2; docs/theory.md (2) with k = N = M.
    """
    _require_known(network, inputs)
    sums, squares, sizes = [], [], []
    for rows, classes in zip(inputs.chunk(_PARTS), labels.chunk(_PARTS), strict=True):
        gradient_sum, sqnorm_sum = _sums(network, rows, classes)
        sums.append(gradient_sum)
        squares.append(sqnorm_sum)
        sizes.append(len(rows))
    stacked = torch.stack(sums)
    products = stacked @ stacked.T  # of the parts' sums
    whole, square, count = float(products.sum()), math.fsum(squares), sum(sizes)
    others = [
        _statistics(
            whole - 2 * float(products[part].sum()) + float(products[part, part]),
            square - squares[part],
            count - sizes[part],
        )
        for part in range(len(sizes))
    ]
    return _statistics(whole, square, count), _jackknife([one.noise_scale for one in others])


def _require_known(network: nn.Sequential, inputs: Tensor) -> None:
    for layer in network:
        if not isinstance(layer, nn.Linear) and next(layer.parameters(), None) is not None:
            raise SettingError(
                f"exact gradients of {type(layer).__name__} are not known; use nn.Linear layers"
            )
    types = {inputs.dtype, *(parameter.dtype for parameter in network.parameters())}
    if types != {torch.float64}:
        raise SettingError("exact gradients need inputs and parameters in float64")


def _sums(network: nn.Sequential, rows: Tensor, classes: Tensor) -> tuple[Tensor, float]:
    """sum g_i as one vector, and sum |g_i|^2, over some samples."""
    layer_inputs, layer_outputs = [], []
    hidden = rows
    for layer in network:
        if isinstance(layer, nn.Linear):
            layer_inputs.append(hidden.detach())
            hidden = layer(hidden)
            layer_outputs.append(hidden)
        else:
            hidden = layer(hidden)
    deltas = torch.autograd.grad(cross_entropy(hidden, classes, reduction="sum"), layer_outputs)
    sqnorms, gradients = torch.zeros((), dtype=rows.dtype), []
    for delta, layer_input in zip(deltas, layer_inputs, strict=True):
        sqnorms = sqnorms + (delta.square().sum(1) * (layer_input.square().sum(1) + 1)).sum()
        gradients += [(delta.T @ layer_input).flatten(), delta.sum(0)]
    return torch.cat(gradients), float(sqnorms)


def _statistics(sum_sqnorm: float, sqnorm_sum: float, count: int) -> GradientStatistics:
    signal = (sum_sqnorm - sqnorm_sum) / (count * (count - 1))
    noise = (sqnorm_sum - sum_sqnorm / count) / (count - 1)
    return GradientStatistics(signal, noise, samples=count, micro_batches=count)


def _jackknife(noise_scales: list[float]) -> float:
    """Standard error of ln B_simple from its values without one part."""
    if not all(0 < scale < math.inf for scale in noise_scales):
        return math.nan
    logs = torch.tensor([math.log(scale) for scale in noise_scales], dtype=torch.float64)
    return math.sqrt((len(logs) - 1) * float(logs.var(correction=0)))
