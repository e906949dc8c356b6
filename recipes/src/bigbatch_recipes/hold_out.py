"""Holds training samples out, so that settings are tuned on other samples than the test data."""

from bigbatch.errors import SettingError
from bigbatch_recipes.datasets.subset import Subset, chosen_indices
from bigbatch_recipes.recipe import Data
from bigbatch_recipes.settings import Settings


def hold_out(data: Data, settings: Settings) -> Data:
    """The data without `held_out` random training samples, the same for all seeds; scores of those.

    Raises:
        SettingError: they are all training samples or more, or the recipe cannot score them.
    """
    if not settings.held_out:
        return data
    samples = len(data.train)  # type: ignore[arg-type]
    if settings.held_out >= samples:
        raise SettingError(
            f"held_out={settings.held_out} leaves none of the {samples} training samples; lower it"
        )
    if data.scores_on is None:
        raise SettingError(
            f"recipe {settings.recipe!r} cannot score samples of its training data; leave held_out "
            "out"
        )
    held_out = chosen_indices(samples, settings.held_out)
    trained = sorted(set(range(samples)) - set(held_out))
    return Data(
        Subset(data.train, trained),
        data.scores_on(Subset(data.train, held_out)),
        run_files=data.run_files,
    )
