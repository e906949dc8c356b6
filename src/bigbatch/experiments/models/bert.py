"""BERT as three recipes build it from their settings: network, vocabulary, rows.

All of it needs `transformers` and `tokenizers`, which are imported where something is built.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bigbatch.errors import RunError, SettingError
from bigbatch.experiments.datasets.files import text_of
from bigbatch.experiments.datasets.sequence_pair import SequencePair
from bigbatch.experiments.datasets.text import VOCAB
from bigbatch.experiments.process_group import run_on_rank_zero
from bigbatch.experiments.settings import Settings

if TYPE_CHECKING:
    from bigbatch.experiments.models.hf_bert import WordPieceTokenizer


def bert(settings: Settings, head: str) -> nn.Module:
    """The network with a head of `hf_bert`, as `size`, `vocabulary`, `dropout` say.

    Raises:
        MissingPackageError: `transformers` is not installed.
        SettingError: there is no such size.
    """
    from bigbatch.experiments.models import hf_bert as networks

    task = settings.task
    made: nn.Module = getattr(networks, head)(task["size"], task["vocabulary"], task["dropout"])
    return made


def load_tokenizer(
    settings: Settings, texts: Callable[[], Iterable[str]]
) -> tuple["WordPieceTokenizer", SequencePair]:
    """The vocabulary of a training, and its rows: the first vocabulary that there is of these four.

    The file that the setting `vocab` names, which is the run's own where it resumes; the one in
    the run that this begins from; the one next to the data; one of at most `vocabulary` tokens,
    trained on the texts. Collective.

    Raises:
        RunError: `vocab` names no file.
        SettingError: there are more tokens than the network has room for, BERT has fewer positions
            than `length`, or a pair does not fit.
    """
    from bigbatch.experiments.models.hf_bert import WordPieceTokenizer, train_wordpiece

    room, length = int(settings.task["vocabulary"]), _length(settings)

    def read() -> tuple[str, ...]:
        file = _file(settings)
        if file is None:
            return train_wordpiece(texts, room).vocabulary
        vocabulary = tuple(text_of(file).splitlines())
        if len(vocabulary) > room:
            raise SettingError(
                f"{file} has {len(vocabulary)} tokens and the network room for vocabulary={room}; "
                f"set vocabulary={len(vocabulary)}"
            )
        return vocabulary

    tokenizer = WordPieceTokenizer(run_on_rank_zero(read))
    return tokenizer, SequencePair(tokenizer.begin, tokenizer.end, tokenizer.pad, length)


def _file(settings: Settings) -> Path | None:
    """The vocabulary that is given, if one is."""
    given = Path(str(settings.task["vocab"]))
    if settings.task["vocab"]:
        if not given.is_file():
            raise RunError(f"there is no vocabulary {given}; name a vocab.txt that exists")
        return given
    places = [Path(folder) / VOCAB for folder in (settings.init_from, settings.data) if folder]
    return next((place for place in places if place.is_file()), None)


def kept(tokenizer: "WordPieceTokenizer") -> dict[str, str]:
    """The vocabulary as a run keeps it, for another that begins from it."""
    return {VOCAB: "\n".join(tokenizer.vocabulary) + "\n"}


SAVED_AS = {"vocab": VOCAB}  # of each recipe with tokens


def example_rows(settings: Settings, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, segments, real) on the meta device.

    Raises:
        SettingError: BERT has fewer positions, or a pair does not fit.
    """
    shape = (samples, _length(settings))
    number = torch.empty(shape, dtype=torch.int32, device="meta")
    return number, number, torch.empty(shape, dtype=torch.bool, device="meta")


def _length(settings: Settings) -> int:
    """Tokens of a row."""
    length = int(settings.task["length"])
    if not _SHORTEST <= length <= _POSITIONS:
        raise SettingError(f"length={length} must be from {_SHORTEST} to {_POSITIONS} tokens")
    return length


_SHORTEST, _POSITIONS = 16, 512
