"""`bb.advise`: advice about the batch size, from inside a program."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from torch import nn
from torch.optim import Optimizer

from bigbatch.advisor.batch_advice import BatchAdvice
from bigbatch.advisor.cluster_time import Network
from bigbatch.advisor.html_page import html_page
from bigbatch.advisor.observations import Limits
from bigbatch.advisor.sample_count import parse_samples
from bigbatch.advisor.text_page import text_page
from bigbatch.advisor.training_observer import TrainingObserver
from bigbatch.errors import SettingError
from bigbatch.setting_types import CHECKED_ELSEWHERE, Count, Groups, checked

_PAGES: dict[str, Callable[[BatchAdvice], str]] = {
    ".html": html_page,
    ".json": lambda advice: json.dumps(advice.as_dict(), indent=1, allow_nan=False) + "\n",
    ".txt": text_page,
}
_SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}
_DURATION = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_SECONDS)})")


class Advice(BatchAdvice):
    """What was found about the batch size of a training; `print` shows it as a page."""

    def __str__(self) -> str:
        return text_page(self)

    def write(self, path: str | Path) -> None:
        """Writes the page as one HTML file without links, as text, or everything as JSON.

        Args:
            path: ends in .html, .txt or .json.
        Raises:
            SettingError: another ending.
        """
        require_ending(path)
        Path(path).write_text(_PAGES[Path(path).suffix](self), encoding="utf-8")


@contextmanager
@checked
def advise(
    model: Annotated[nn.Module, CHECKED_ELSEWHERE],
    optimizer: Annotated[Optimizer, CHECKED_ELSEWHERE],
    *,
    steps: Count | None = None,
    budget: str | None = None,
    groups: Groups = 8,
    micro_batch: Annotated[int | str | None, CHECKED_ELSEWHERE] = None,
    network: Network | None = None,
) -> Iterator[Advice]:
    """Observes the training inside a `with` block, and advises a batch size for it.

        B = the size of the least (seconds of a step of B) (1 + B_noise / B)

    The loop stays as it is, and trains as it would without this. One step in n is measured, where n
    is timed so that measuring takes 4 % of the time: by the backwards of all ranks if there are
    four or more, else by groups of samples of one backward, else (BatchNorm) by micro-batches that
    it is cut into, else by consecutive steps, whose noise scale is biased. Afterwards the time of
    other sizes is measured, by backwards of the last batch. A training that cannot be measured
    gives no number, but the reason.

    Args:
        model: the model, wrapped as it is trained.
        optimizer: its optimizer; other optimizers of the program are ignored.
        steps: optimizer steps to observe; None for all in the block.
        budget: a time to observe, "5min" or "90s"; None for no limit.
        groups: k, groups of one backward.
        micro_batch: samples of a backward and rank, if they are not those of the DataLoader or
            dimension 0 of the model's first tensor; "20@1" for 20 in dimension 1; None to find
            them.
        network: what an all-reduce between devices is assumed to take.
    Yields:
        The advice, which is empty until the block or the observation ends.
    Raises:
        SettingError: a setting is out of range.
    Source:
        docs/advise.md.
    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with advise(model, optimizer) as advice:
        ...     for x in torch.randn(3, 16, 4, generator=torch.manual_seed(0)):
        ...         optimizer.zero_grad()
        ...         model(x).square().mean().backward()
        ...         optimizer.step()
        >>> print(advice)
        No advice: the program ended after 3 optimizer steps; at least 6 are needed
        <BLANKLINE>
    """
    seconds = None if budget is None else parse_seconds(budget)
    limits = Limits(steps, seconds, groups, micro_batch=parse_samples(micro_batch))
    observer = TrainingObserver(limits, model=model, optimizer=optimizer)
    with observer:
        yield Advice(observer.observations, network or Network())


def parse_seconds(text: str) -> float:
    """Seconds of "90s", "5min" or "1.5h"."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or not float(match[1]):
        raise SettingError(f'{text!r} is no time such as "90s", "5min" or "1h"')
    return float(match[1]) * _SECONDS[match[2]]


def require_ending(path: str | Path) -> None:
    """Raises SettingError for a page of another kind."""
    if Path(path).suffix not in _PAGES:
        raise SettingError(f"{path} must end in {', '.join(_PAGES)}")
