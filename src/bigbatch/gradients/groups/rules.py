"""How each function of torch uses a parameter: the operands it saved, and where its samples are."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from bigbatch.gradients.dtypes import full_precision
from bigbatch.gradients.groups.backward_graph import (
    Node,
    gradients_of_operands,
    saved_tensor,
    shape_of,
    written_in_python,
)
from bigbatch.gradients.groups.contributions import (
    Contribution,
    Convolutions,
    EmbeddingRows,
    GroupSums,
    OuterProducts,
    Rows,
    group_sums,
)
from bigbatch.gradients.groups.grouping import Grouping


@dataclass(frozen=True)
class Place:
    """Where the samples are in the gradient of a function's output."""

    dim: int | None  # the dimension of size B; None if samples are flattened with others into rows
    is_minor: bool = False  # whether these rows are one of every sample first, not all of one
    is_certain: bool = True  # whether a shape shows it; otherwise it is the usual order

    def rows(self, tensor: Tensor, samples: int) -> Tensor:
        """The flattened rows, (B n, ...), all of the first sample first."""
        rows = _rows_of(tensor)
        if not self.is_minor:
            return rows
        return rows.reshape(-1, samples, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    def by_sample(self, tensor: Tensor, samples: int) -> Tensor:
        """The tensor with the samples first, (B, ...)."""
        if self.dim is None:
            rows = self.rows(tensor, samples)
            return rows.reshape(samples, -1, *rows.shape[1:])
        return tensor if self.dim == 0 else tensor.movedim(self.dim, 0)

    def mask(self, members: Tensor, tensor: Tensor) -> Tensor:
        """Flags of samples (B,), for the elements of the tensor with which it broadcasts."""
        dim = self.dim
        if dim is None:
            dim = tensor.dim() - _rows_of(tensor).dim()
            repeats = tensor.shape[dim] // len(members)
            members = (
                members.repeat(repeats) if self.is_minor else members.repeat_interleave(repeats)
            )
        return members.reshape(-1, *(1,) * (tensor.dim() - 1 - dim))


class Call(NamedTuple):
    """A function's node in a backward, and the gradient of its output."""

    node: Node
    gradient: Tensor  # D, in full precision
    place: Place  # where the samples are in D
    grouping: Grouping
    operands: Collection[int]  # the numbers of the operands whose gradients are wanted

    def saved(self, name: str) -> Tensor:
        """What the forward saved, in full precision."""
        return full_precision(saved_tensor(self.node, name))

    def rows(self, tensor: Tensor, trailing: int = 1) -> Tensor:
        """(..., trailing dimensions) -> (B n, trailing dimensions), sample by sample."""
        dim, samples = self.place.dim, self.grouping.samples
        rows = self.place.rows(tensor, samples) if dim is None else tensor.movedim(dim, 0)
        return rows.reshape(-1, *tensor.shape[tensor.dim() - trailing :])

    def sums(self, tensor: Tensor, operand: int) -> Contribution:
        """A contribution to an operand that is broadcast over the samples."""
        following, number = self.node.next_functions[operand]
        shape = shape_of(following, number)
        by_sample = self.place.by_sample(tensor, self.grouping.samples)
        return GroupSums(group_sums(by_sample, self.grouping, shape))


def _rows_of(tensor: Tensor) -> Tensor:
    """The flattened rows, in dimension 0, or of the one matrix of a batch."""
    return tensor[0] if tensor.dim() == 3 and len(tensor) == 1 else tensor


_OPTIONS = "stride", "padding", "dilation", "transposed", "output_padding", "groups"
_CONVOLUTION = attrgetter(*(f"_saved_{option}" for option in _OPTIONS))
Contributions = Mapping[int, Contribution]
Rule = Callable[[Call], Contributions]


def _mm(call: Call, factor: str = "self", weight: int = 1) -> Contributions:
    """A factor times a weight, the operand of this number; the one before both is a bias."""
    gradients: dict[int, Contribution] = {}
    rows = Rows(call.rows(call.gradient), call.grouping)
    if weight - 2 in call.operands:
        gradients[weight - 2] = OuterProducts(rows)
    if weight in call.operands:
        factors = Rows(call.rows(call.saved(factor)), call.grouping)
        gradients[weight] = OuterProducts(factors, rows)
    return gradients


def _embedding(call: Call) -> Contributions:
    indices, rows = call.rows(saved_tensor(call.node, "indices"), 0), call.rows(call.gradient)
    padding = call.node._saved_padding_idx
    if padding < 2**63:  # -1, unsigned, is for none
        rows = rows.masked_fill((indices == padding)[..., None], 0)
    table_rows = int(call.node._saved_weight_sym_argsize_0)
    return {0: EmbeddingRows(indices, Rows(rows, call.grouping), table_rows)}


def _convolution(call: Call) -> Contributions:
    gradients: dict[int, Contribution] = {}
    if 1 in call.operands:
        of_weight = partial(_of_weight, call.node, call.saved("weight"))  # cast once for all groups
        gradients[1] = Convolutions(call.gradient, call.saved("input"), call.grouping, of_weight)
    if 2 in call.operands:
        gradients[2] = call.sums(call.gradient.flatten(2).sum(2), 2)
    return gradients


def _of_weight(node: Node, weight: Tensor, gradient: Tensor, inputs: Tensor) -> Tensor:
    """The weight's gradient, of the convolution or of a projected one with fewer channels."""
    channels = gradient.shape[1], inputs.shape[1]
    has_all = weight.shape[:2] == channels or node._saved_groups > 1 or node._saved_transposed
    if not has_all:
        weight = weight[:1, :1].expand(*channels, *weight.shape[2:])
    needed = False, True, False  # of the input, the weight, the bias
    result: Tensor = torch.ops.aten.convolution_backward(
        gradient, inputs, weight, [0], *_CONVOLUTION(node), needed
    )[1]
    return result


def _layer_norm(call: Call, *, has_mean: bool = True) -> Contributions:
    """Sums over rows of D, and of D (x - mean) / std, or D x / rms."""
    dims, gradients = len(call.node._saved_normalized_shape), dict[int, Contribution]()
    d = call.rows(call.gradient, dims)
    if 2 in call.operands:
        gradients[2] = OuterProducts(Rows(d, call.grouping))
    if 1 in call.operands:
        names = ("input", "result1", "result2") if has_mean else ("input", "result1")
        x, *mean, inverse = (call.rows(call.saved(name), dims) for name in names)
        products = ((x - mean[0] if has_mean else x) * inverse).mul_(d)
        gradients[1] = OuterProducts(Rows(products, call.grouping))
    return gradients


def _group_norm(call: Call) -> Contributions:
    """Per sample and channel: sum D (x - mean) v = v (sum D x - mean sum D), v = 1 / std."""
    node, gradients = call.node, dict[int, Contribution]()
    d = call.gradient.reshape(*call.gradient.shape[:2], -1)  # (B, C, n)
    sums = d.sum(2)
    if 2 in call.operands:
        gradients[2] = call.sums(sums, 2)
    if 1 in call.operands:
        products = torch.einsum("bcx,bcx->bc", d, call.saved("input").reshape(d.shape))
        channels = node._saved_C // node._saved_group  # of a group that is normalized together
        mean, inverse = (
            call.saved(name).repeat_interleave(channels, 1) for name in ("result1", "result2")
        )
        gradients[1] = call.sums((products - mean * sums) * inverse, 1)
    return gradients


def _multiply(call: Call) -> Contributions:
    others = {0: "other", 1: "self"}
    return {
        operand: call.sums(call.gradient * call.saved(others[operand]), operand)
        for operand in call.operands
    }


def _add(call: Call, sign: int = 1) -> Contributions:
    factors = {0: 1, 1: sign * call.node._saved_alpha}
    return {
        operand: GroupSums(factors[operand] * call.sums(call.gradient, operand).exact())
        for operand in call.operands
    }


def _bmm(call: Call) -> Contributions:
    """A batch of one matrix: torch.einsum."""
    return {1: GroupSums(_mm(call)[1].exact()[:, None])}


def _of_each_group(call: Call) -> Contributions:
    """Any function: its own gradient, of the samples of one group after the other."""
    by_group, others = [], [None] * (len(call.node._input_metadata) - 1)
    for members in call.grouping.members(call.gradient.device):
        gradient = torch.where(call.place.mask(members, call.gradient), call.gradient, 0)
        by_group.append(gradients_of_operands(call.node, [gradient, *others]))
    sums: dict[int, Contribution] = {}
    for operand in call.operands:
        stacked = torch.stack([g for groups in by_group if (g := groups[operand]) is not None])
        sums[operand] = GroupSums(full_precision(stacked))
    return sums


def refusal_of(node: Node) -> str:
    """Why no rule covers a function; empty if one does."""
    name = node.name()
    if name == "EmbeddingBackward0" and node._saved_scale_grad_by_freq:
        return "used in an embedding with scale_grad_by_freq"
    if len(node._input_metadata) > 1 and name not in RULES:
        return f"used in {name}"
    return refusal_of_path(node, "used in")


def refusal_of_path(node: Node, relation: str = "computed by") -> str:
    """Why no backward of a function alone can be computed; empty if it can."""
    name = node.name()
    if written_in_python([node]):
        return f"{relation} {name}, a function written in Python"
    if any(output.dtype.is_complex for output in node._input_metadata):
        return f"{relation} {name}, whose values are complex numbers"
    return ""


def rule_of(node: Node, place: Place, operands: Collection[int]) -> Rule:
    """The rule for these operands of a function, where the samples are in this place."""
    name = node.name()
    rule, covered = RULES.get(name, (_of_each_group, ()))
    if (
        not set(operands) <= set(covered)
        or (name == "ConvolutionBackward0" and place.dim != 0)
        or (name == "AddmmBackward0" and not _is_linear_layer(node, operands))
        or (name == "BmmBackward0" and len(saved_tensor(node, "self")) != 1)
    ):
        return _of_each_group
    return rule


def _is_linear_layer(node: Node, operands: Collection[int]) -> bool:
    """Whether an addmm adds one bias to each row, without factors."""
    has_factors = (node._saved_alpha, node._saved_beta) != (1, 1)
    has_bias = 0 not in operands or shape_of(*node.next_functions[0]) == shape_of(node)[1:]
    return has_bias and not has_factors


def can_project(node: Node, operand: int) -> bool:
    """Whether the operand's gradient can be projected without being computed."""
    if node.name() == "ConvolutionBackward0":
        return operand == 1 and node._saved_groups == 1 and not node._saved_transposed
    return operand in _PROJECTED.get(node.name(), ())


_PROJECTED = {"AddmmBackward0": (0, 2), "MmBackward0": (1,), "EmbeddingBackward0": (0,)}

RULES: Mapping[str, tuple[Rule, tuple[int, ...]]] = {
    "AddmmBackward0": (partial(_mm, factor="mat1", weight=2), (0, 2)),
    "MmBackward0": (_mm, (1,)),
    "BmmBackward0": (_bmm, (1,)),
    "EmbeddingBackward0": (_embedding, (0,)),
    "ConvolutionBackward0": (_convolution, (1, 2)),
    "FusedRmsNormBackward0": (partial(_layer_norm, has_mean=False), (1,)),
    "NativeLayerNormBackward0": (_layer_norm, (1, 2)),
    "NativeGroupNormBackward0": (_group_norm, (1, 2)),
    "MulBackward0": (_multiply, (0, 1)),
    "AddBackward0": (_add, (0, 1)),
    "SubBackward0": (partial(_add, sign=-1), (0, 1)),
    "ExpandBackward0": (lambda call: {0: call.sums(call.gradient, 0)}, (0,)),
}
"""The function of each rule, and the operands that may be parameters."""
