"""Published and analytic numbers against what the library computes: a table that can fail."""

from collections.abc import Iterator
from pathlib import Path

from studies import known_decisions, known_gradients, known_steps, shakespeare_gpt
from studies.known_answer import KnownAnswer
from studies.shakespeare_gpt import Phase


def run(
    seed: int = 0, data: Path | None = None, phases: tuple[Phase, ...] = shakespeare_gpt.SHORT
) -> Iterator[KnownAnswer]:
    """All rows.

    Args:
        seed: the seed of everything drawn.
        data: folder with fashion-mnist/ and tinyshakespeare/; rows that need one that is missing
            are skipped, with the reason.
        phases: steps of the GPT's training.
    """
    yield from known_decisions.run()
    yield from known_steps.run(seed)
    yield from known_gradients.run(seed, data)
    yield from shakespeare_gpt.run(data, phases, seed)
