"""BERT as two recipes build it from their settings: network, vocabulary, rows.

Trainings need `transformers` and `tokenizers`, which are imported where something is built.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bigbatch.errors import RunError, SettingError
from bigbatch_recipes.datasets.files import text_of
from bigbatch_recipes.datasets.locations import VOCAB
from bigbatch_recipes.datasets.sequence_pair import SequencePair
from bigbatch_recipes.process_group import run_on_rank_zero
from bigbatch_recipes.settings import Settings, require_choice

if TYPE_CHECKING:
    from bigbatch_recipes.models.hf_bert.wordpiece import WordPieceTokenizer

POSITIONS = 512  # of every published BERT, so that weights fit at any length
HEAD_WIDTH = 64
FEED_FORWARD = 4  # widths
SIZES = {  # (layers, width)
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}
_MIN_LENGTH = 16  # tokens of a row


def size_of(name: str) -> tuple[int, int]:
    """Layers and width of a size of `SIZES`."""
    require_choice("BERT of size", name, SIZES)
    return SIZES[name]


def network(settings: Settings, head: str) -> nn.Module:
    """The network with a head of `bert_heads`, as `size`, `vocabulary` and `dropout` set it."""
    from bigbatch_recipes.models.hf_bert import bert_heads

    task = settings.task
    model: nn.Module = getattr(bert_heads, head)(task["size"], task["vocabulary"], task["dropout"])
    return model


def outline(settings: Settings, head: str) -> nn.Module:
    """Layers of torch with as many weights as `network` has; a dry run needs no `transformers`."""
    vocabulary, dropout = int(settings.task["vocabulary"]), float(settings.task["dropout"])
    layers, width = size_of(str(settings.task["size"]))
    tokens = nn.Embedding(vocabulary, width)
    shape = (width, width // HEAD_WIDTH, FEED_FORWARD * width, dropout)
    body: list[nn.Module] = [
        tokens,
        nn.Embedding(POSITIONS, width),
        nn.Embedding(2, width),
        nn.LayerNorm(width),
    ]
    body += [nn.TransformerEncoderLayer(*shape) for _ in range(layers)]
    body += [nn.Linear(width, 2)]
    if head == "Pretraining":
        decoder = nn.Linear(width, vocabulary)
        decoder.weight = tokens.weight
        pooler, transform = nn.Linear(width, width), nn.Linear(width, width)
        body += [pooler, transform, nn.LayerNorm(width), decoder]
    return nn.Sequential(*body)


def load_tokenizer(
    settings: Settings, texts: Callable[[], Iterable[str]]
) -> tuple["WordPieceTokenizer", SequencePair]:
    """The tokenizer of a training, and the frame of its rows.

    Takes the first vocabulary that exists: the file of the setting `vocab`, which is the run's own
    if it resumes; that of the run in `init_from`; that in the folder of the data; one of at most
    `vocabulary` tokens, trained on the texts. Collective.

    Raises:
        RunError: `vocab` names no file.
        SettingError: the vocabulary is larger than the network's, `length` exceeds BERT's
            positions, or a pair does not fit.
    """
    from bigbatch_recipes.models.hf_bert.wordpiece import WordPieceTokenizer, train_wordpiece

    size, length = int(settings.task["vocabulary"]), _length(settings)

    def read() -> tuple[str, ...]:
        file = _vocabulary_path(settings)
        if file is None:
            return train_wordpiece(texts, size).vocabulary
        vocabulary = tuple(text_of(file).splitlines())
        if len(vocabulary) > size:
            raise SettingError(
                f"{file} has {len(vocabulary)} tokens and the network room for vocabulary={size}; "
                f"set vocabulary={len(vocabulary)}"
            )
        return vocabulary

    tokenizer = WordPieceTokenizer(run_on_rank_zero(read))
    return tokenizer, SequencePair(tokenizer.begin, tokenizer.end, tokenizer.pad, length)


def _vocabulary_path(settings: Settings) -> Path | None:
    if settings.task["vocab"]:
        path = Path(str(settings.task["vocab"]))
        if not path.is_file():
            raise RunError(f"there is no vocabulary {path}; name a vocab.txt that exists")
        return path
    paths = [Path(folder) / VOCAB for folder in (settings.init_from, settings.data) if folder]
    return next((path for path in paths if path.is_file()), None)


def vocabulary_file(tokenizer: "WordPieceTokenizer") -> dict[str, str]:
    """The vocabulary as a run stores it, for another run that begins from it."""
    return {VOCAB: "\n".join(tokenizer.vocabulary) + "\n"}


def example_rows(settings: Settings, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, segments, is_token) on the meta device."""
    shape = (samples, _length(settings))
    number = torch.empty(shape, dtype=torch.int32, device="meta")
    return number, number, torch.empty(shape, dtype=torch.bool, device="meta")


def _length(settings: Settings) -> int:
    length = int(settings.task["length"])
    if not _MIN_LENGTH <= length <= POSITIONS:
        raise SettingError(f"length={length} must be from {_MIN_LENGTH} to {POSITIONS} tokens")
    return length
