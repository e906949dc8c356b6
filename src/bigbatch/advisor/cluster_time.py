"""The time of a step of any batch size on any number of devices like this one."""

import math
from dataclasses import dataclass

from bigbatch.advisor.observations import Found, MachineTime
from bigbatch.setting_types import NotNegative, Positive, checked

_ALIKE = 1.05  # times are not known better, and the smaller batch needs fewer samples


@checked
@dataclass(frozen=True)
class Network:
    """What an all-reduce is assumed to take.

        2 (W - 1) / W bytes / bandwidth + 2 ceil(log2 W) latency

    Args:
        gigabytes_per_second: bandwidth of a device to the others.
        microseconds: latency of a message.
    Source:
        Bytes of a ring, messages of a tree (Thakur et al. 2005).
    Example:
        >>> round(Network(10, 20).all_reduce_seconds(400_000_000, devices=8), 4)
        0.0701
    """

    gigabytes_per_second: Positive = 12.5
    microseconds: NotNegative = 30.0

    def all_reduce_seconds(self, size: int, devices: int) -> float:
        """Seconds of an all-reduce of so many bytes."""
        if devices == 1:
            return 0.0
        sent = 2 * (devices - 1) / devices * size
        messages = 2 * math.ceil(math.log2(devices))
        return sent / (1e9 * self.gigabytes_per_second) + messages * self.microseconds / 1e6


@dataclass(frozen=True)
class ClusterTime:
    """Seconds of a step on so many devices.

        optimizer + rest + all-reduce + m fixed + n (per_sample + data)
        n = B / W,   m = ceil(n / M)

    m is the number of backwards that memory needs (M). `data` is the time of a sample's data, if a
    DataLoader gets it in the same process; `rest` is what is left of an observed step. On several
    observed ranks it holds their all-reduce: the network is not used for as many devices, and
    `rest` not for others. Nothing overlaps.
    """

    time: MachineTime  # of the observed machine
    found: Found  # the observed training
    network: Network
    devices: int  # W
    least_backwards: int = 1  # of a step and device

    def seconds(self, batch_size: float) -> float:
        """Seconds of a step of this batch size."""
        time, found = self.time, self.found
        samples = batch_size / self.devices
        needed = math.ceil(samples / time.largest) if time.largest else 1
        backwards = max(needed, self.least_backwards)
        data = time.data * found.ranks / found.batch_size
        seconds = time.optimizer + backwards * time.backward.fixed
        seconds += samples * (time.backward.per_sample + data)
        if self.devices == found.ranks > 1:
            return seconds + time.rest
        seconds += time.rest if found.ranks == 1 else 0.0
        return seconds + self.network.all_reduce_seconds(found.gradient_bytes, self.devices)

    def relative_seconds(self, batch_size: float, noise_scale: float) -> float:
        """Seconds of the progress of one step without noise: (seconds of a step) (1 + B_n / B)."""
        return self.seconds(batch_size) * (1 + noise_scale / batch_size)

    def fastest(self, noise_scale: float, most: float) -> int:
        """The smallest batch size whose time is at most 5 % above the least.

        Of 2^i and 3 2^i samples a device, at most `most`.
        """
        return min(self.fast_sizes(noise_scale, most))

    def fast_sizes(self, noise_scale: float, most: float, *more: int) -> list[int]:
        """Those of these sizes, and of some more, whose time is at most 5 % above the least."""
        sizes = [self.devices * (base << i) for i in range(40) for base in (1, 3)]
        fitting = [*more, *(n for n in sizes if n <= max(most, self.devices))]
        seconds = {size: self.relative_seconds(size, noise_scale) for size in fitting}
        least = min(seconds.values())
        return [size for size in fitting if seconds[size] <= _ALIKE * least]
