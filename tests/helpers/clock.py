"""A clock that only the forwards of a model move."""


class Clock:
    """Takes the place of time.perf_counter.

    Args:
        backward: seconds of a backward.
        sample: seconds of each of its samples.
    """

    def __init__(self, backward: float, sample: float) -> None:
        self.now, self.backward, self.sample = 0.0, backward, sample

    def __call__(self) -> float:
        return self.now

    def spend(self, _, arguments):
        """A forward pre-hook."""
        self.now += self.backward + self.sample * len(arguments[0])
