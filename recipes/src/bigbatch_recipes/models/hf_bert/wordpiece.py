"""WordPiece tokens: an existing vocabulary, or one trained on a corpus."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import numpy
from tokenizers.implementations import BertWordPieceTokenizer

from bigbatch.errors import SettingError
from bigbatch_recipes.datasets.sequence_pair import Numbers

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_BATCH_TEXTS = 1_000  # texts that are encoded at once
_MAX_LETTERS = 1_000  # in a trained vocabulary: the most frequent ones


class WordPieceTokenizer:
    """Encodes lower-cased texts with a WordPiece vocabulary.

    Raises:
        SettingError: one of BERT's special tokens is missing.
    Example:
        >>> tokenizer = WordPieceTokenizer([*SPECIAL, "play", "##ing", "the"])
        >>> [row.tolist() for row in tokenizer.encode(["The playing play", "[UNK]"])]
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

    def encode(self, texts: Iterable[str]) -> Iterator[Numbers]:
        """The tokens of each text, without special tokens around them."""
        return (tokens for tokens, _ in self.encode_with_offsets(texts))

    def encode_with_offsets(self, texts: Iterable[str]) -> Iterator[tuple[Numbers, Numbers]]:
        """The tokens of each text, and where in it each begins and ends, (tokens, 2)."""
        iterator = iter(texts)
        while batch := list(islice(iterator, _BATCH_TEXTS)):
            for encoding in self._tokenizer.encode_batch(batch, add_special_tokens=False):
                offsets = numpy.array(encoding.offsets, dtype=numpy.int32).reshape(-1, 2)
                yield numpy.array(encoding.ids, dtype=numpy.int32), offsets


def train_wordpiece(texts: Callable[[], Iterable[str]], size: int) -> WordPieceTokenizer:
    """A vocabulary of at most `size` tokens, trained on the texts; the same for the same texts.

    The trainer numbers the letters inside words in an order that differs from run to run, and
    breaks ties by it. So the texts are read twice: for their letters, and with sorted letters.

    Raises:
        SettingError: the letters alone are more.
    """
    letters = [token for token in _train(texts(), 1, SPECIAL) if token not in SPECIAL]
    if len(letters) + len(SPECIAL) > size:
        raise SettingError(
            f"vocabulary={size} is too small for the {len(letters)} letters of these texts; raise "
            "it"
        )
    inner = sorted(token for token in letters if token.startswith("##") and len(token) > 2)
    return WordPieceTokenizer(_train(texts(), size, (*SPECIAL, *inner)))


def _train(texts: Iterable[str], size: int, special_tokens: Sequence[str]) -> list[str]:
    """The tokens in the order of their numbers."""
    tokenizer = BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(
        texts,
        vocab_size=size,
        min_frequency=2,
        limit_alphabet=_MAX_LETTERS,
        special_tokens=list(special_tokens),
        show_progress=False,
    )
    number_of: dict[str, int] = tokenizer.get_vocab()
    return sorted(number_of, key=number_of.__getitem__)
