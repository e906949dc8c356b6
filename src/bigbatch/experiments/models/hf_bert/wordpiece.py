"""WordPieces: a vocabulary that is given, or trained on a corpus; words to numbers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy
from numpy.typing import NDArray
from tokenizers.implementations import BertWordPieceTokenizer

from bigbatch.errors import SettingError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_AT_ONCE = 1_000  # texts
_LETTERS = 1_000  # most kinds of character in a trained vocabulary, the most frequent ones

Numbers = NDArray[numpy.int32]


class WordPieceTokenizer:
    """A vocabulary of lower-case WordPieces, and what it makes of texts.

    Args:
        vocabulary: the tokens; the number of one is its place.
    Raises:
        SettingError: one of BERT's special tokens is missing.
    Example:
        >>> tokenizer = WordPieceTokenizer([*SPECIAL, "play", "##ing", "the"])
        >>> [row.tolist() for row in tokenizer.numbers(["The playing play", "[UNK]"])]
        [[7, 5, 6, 5], [1]]
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        number_of = {token: number for number, token in enumerate(vocabulary)}
        if missing := [token for token in SPECIAL if token not in number_of]:
            raise SettingError(
                f"the vocabulary of {len(vocabulary)} tokens lacks {', '.join(missing)}; a "
                "vocab.txt has one token a line, these among them"
            )
        self.vocabulary = tuple(vocabulary)
        self.special = tuple(number_of[token] for token in SPECIAL)
        self.pad, self.unknown, self.begin, self.end, self.mask = self.special
        self.ordinary = numpy.setdiff1d(numpy.arange(len(vocabulary)), self.special)
        self._tokenizer = BertWordPieceTokenizer(vocab=number_of, lowercase=True)

    def __len__(self) -> int:
        return len(self.vocabulary)

    def numbers(self, texts: Iterable[str]) -> Iterator[Numbers]:
        """The tokens of each text, without special ones around them."""
        for found in self._encoded(texts):
            yield numpy.array(found.ids, dtype=numpy.int32)

    def located(self, texts: Iterable[str]) -> Iterator[tuple[Numbers, Numbers]]:
        """As `numbers`, and where in the text each token begins and ends, (tokens, 2)."""
        for found in self._encoded(texts):
            places = numpy.array(found.offsets, dtype=numpy.int32).reshape(-1, 2)
            yield numpy.array(found.ids, dtype=numpy.int32), places

    def _encoded(self, texts: Iterable[str]) -> Iterator[Any]:
        rest = iter(texts)
        while some := list(islice(rest, _AT_ONCE)):
            yield from self._tokenizer.encode_batch(some, add_special_tokens=False)


def train_wordpiece(texts: Callable[[], Iterable[str]], size: int) -> WordPieceTokenizer:
    """A vocabulary of at most `size` tokens, trained on the texts; the same for the same texts.

    The trainer numbers the letters inside words in an order that differs from run to run, and
    breaks ties by it. So the texts are read twice: for their letters, and with these in order.

    Args:
        texts: gives all of them on each call.
        size: most tokens, special ones and letters included.
    Raises:
        SettingError: the letters alone are more.
    """
    letters = [token for token in _trained(texts(), 1, SPECIAL) if token not in SPECIAL]
    if len(letters) + len(SPECIAL) > size:
        raise SettingError(
            f"vocabulary={size} is too small for the {len(letters)} letters of these texts; raise "
            "it"
        )
    inner = sorted(token for token in letters if token.startswith("##") and len(token) > 2)
    return WordPieceTokenizer(_trained(texts(), size, (*SPECIAL, *inner)))


def _trained(texts: Iterable[str], size: int, first: Sequence[str]) -> list[str]:
    """A vocabulary in its order."""
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(
        texts,
        vocab_size=size,
        min_frequency=2,
        limit_alphabet=_LETTERS,
        special_tokens=list(first),
        show_progress=False,
    )
    number_of: dict[str, int] = tokenizer.get_vocab()
    return sorted(number_of, key=number_of.__getitem__)
