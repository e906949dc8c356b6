"""Texts as character codes, cut into windows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bigbatch.errors import SettingError
from bigbatch.experiments.datasets.in_memory import InMemoryDataset

CHARACTERS = 128  # codes of ASCII; any other character is read as "?"


def codes_of(text: str) -> Tensor:
    r"""The ASCII code of each character, (characters,) uint8; 63, a question mark, for others.

    Example:
        >>> codes_of("Aa\u00e4")
        tensor([65, 97, 63], dtype=torch.uint8)
    """
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8)


def windows_of(codes: Tensor, length: int) -> InMemoryDataset:
    """Windows of `length` characters and the one that follows, which begins the next window.

    What is left at the end, less than a window, is not used.

    Args:
        codes: of a text, (characters,).
        length: characters of a window that are predicted.
    Raises:
        SettingError: there is no whole window.
    Example:
        >>> windows_of(codes_of("abcdef"), 2).tensors[0].tolist()
        [[97, 98, 99], [99, 100, 101]]
    """
    if length < 1 or len(codes) <= length:
        raise SettingError(
            f"a text of {len(codes)} characters has no window of length={length} and the next "
            "character; choose a length from 1 to what it has"
        )
    return InMemoryDataset(codes.unfold(0, length + 1, length))


def first_and_rest(documents: Sequence[str], share: float) -> tuple[Tensor, Tensor]:
    """Codes of the documents one after another: the first share of the characters, and the rest."""
    codes = codes_of("\n\n".join(documents))
    begun = int(share * len(codes))
    return codes[:begun], codes[begun:]
