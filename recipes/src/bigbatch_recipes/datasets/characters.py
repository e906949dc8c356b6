"""Texts as character codes, cut into windows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bigbatch.errors import SettingError
from bigbatch_recipes.datasets.in_memory import InMemoryDataset

CHARACTERS = 128  # codes of ASCII; any other character is read as "?"


def codes_of(text: str) -> Tensor:
    r"""The ASCII code of each character, (characters,) uint8; 63, a question mark, for others."""
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)


def windows_of(codes: Tensor, length: int) -> InMemoryDataset:
    """Windows of `length` characters and the next one, which is also the first of the next window.

    An incomplete window at the end is dropped.

    Raises:
        SettingError: the text is shorter than a window.
    Example:
        >>> windows_of(codes_of("abcdef"), 2).tensors[0].tolist()
        [[97, 98, 99], [99, 100, 101]]
    """
    if length < 1 or len(codes) <= length:
        raise SettingError(
            f"a text of {len(codes)} characters has no window of length={length} and the next "
            "character; choose a length from 1 to the text's length - 1"
        )
    return InMemoryDataset(codes.unfold(0, length + 1, length))


def split_codes(documents: Sequence[str], share: float) -> tuple[Tensor, Tensor]:
    """Codes of the documents one after another: the first share of the characters, and the rest."""
    codes = codes_of("\n\n".join(documents))
    size = int(share * len(codes))
    return codes[:size], codes[size:]
