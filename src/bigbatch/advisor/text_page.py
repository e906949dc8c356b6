"""The advice as a page of text."""

import math
from collections.abc import Iterator

from bigbatch.advisor.batch_advice import FARTHEST, BatchAdvice, DeviceAdvice
from bigbatch.advisor.lines_to_add import ADAPTIVE, lines_to_add
from bigbatch.advisor.trial_result import sentences

_BARS = "▁▂▃▄▅▆▇█"
_LAYERS = 3


def text_page(advice: BatchAdvice) -> str:
    """The page."""
    if advice.refusal:
        return f"No advice: {advice.refusal}\n"
    tried = [] if advice.trial is None else [*sentences(advice.trial)]
    paragraphs = [[conclusion(advice)], tried, [*noise(advice)], [*_devices(advice)]]
    for title, lines in sections(advice):
        paragraphs.append([f"{title}:", *(f"  - {line}" for line in lines)])
    paragraphs.append([*_lines(advice)])
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines) + "\n"


def sections(advice: BatchAdvice) -> list[tuple[str, list[str]]]:
    """What every page says in sentences: titles and lines."""
    unseen = [f"not seen: {unseen}" for unseen in advice.observations.unseen]
    return [
        ("Seen", [*_training(advice)]),
        ("With the batch", [*_rate(advice), *_memory(advice)]),
        ("How sure", [*advice.doubts, *unseen]),
    ]


def conclusion(advice: BatchAdvice) -> str:
    """The answer in one or two sentences."""
    present, row, fastest = advice.found.batch_size, advice.this_machine, advice.fastest_row
    if row is None or fastest is None:
        return unknown(advice)
    saved = f"{1 - fastest.time:.0%} less time to the same progress"
    if advice.leaves_batch and fastest.batch_size == present:
        return f"Leave it: no batch trains more than 5% faster than the present one, {present}."
    if advice.leaves_batch:
        return (
            f"Leave it at {present}: the fastest batch, {fastest.batch_size}, takes {saved}, and "
            "less than 10% is within the errors."
        )
    if advice.is_undecided:
        return (
            f"Leave it for now: the fastest batch on this machine is {_interval(row)}, and the "
            f"present one, {present:,}, is among these. {more_steps(advice)}"
        )
    word = "Grow" if row.batch_size > present else "Shrink"
    return (
        f"{word} the batch from {present} to {row.batch_size}: {saved}, for "
        f"{row.samples:.3g} times the samples."
    )


def unknown(advice: BatchAdvice) -> str:
    """Why there is no batch size."""
    trend, present, bound = advice.trend, advice.found.batch_size, advice.bound
    if bound is not None:
        if math.isinf(trend.high):
            which = (
                f"At least {bound}, where the present batch is {present}; no size is advised"
                if bound > present
                else f"No batch size: the fastest one may be any from {bound} on"
            )
            reason = "since the noise scale's interval has no upper end"
            return f"{which}, {reason}. {more_steps(advice)}"
        side = "At least" if bound > present else "At most"
        return (
            f"{side} {bound}; no size is advised, since the fastest one is more than a factor of "
            f"{FARTHEST} from the present {present}, farther than this advice was ever tested. "
            f"Train with {bound}, and observe that run."
        )
    if math.isinf(trend.noise_scale):
        lower = f" The noise scale is at least {number(trend.low)}." * (0 < trend.low < math.inf)
        return (
            "No batch size: the gradient's signal was not distinguished from noise."
            f"{lower} {more_steps(advice)}"
        )
    return (
        "No fastest batch size, since the time of other sizes is unknown. Near the noise scale of "
        f"{number(trend.noise_scale)} samples, doubling the batch saves a quarter of the steps "
        "and costs half as many samples more."
    )


def more_steps(advice: BatchAdvice) -> str:
    """What would show the noise better."""
    limit, steps = advice.observations.ended_by, advice.observations.steps
    if limit:
        return f"Observe for longer: a larger --{limit} ({limit}= of bb.advise)."
    return f"The program ended after {steps} steps: let it train for longer."


def _training(advice: BatchAdvice) -> Iterator[str]:
    found, observations = advice.found, advice.observations
    precision = f", autocast {found.autocast}" if found.autocast else ""
    precision += ", GradScaler" if found.scaler else ""
    yield (
        f"{found.model}, {found.parameters:,} parameters, {found.optimizer}, {found.engine} "
        f"on {found.ranks} x {found.device}{precision}"
    )
    yield (
        f"a batch of {found.batch_size}: ranks x backwards x samples = {found.ranks} x "
        f"{found.accumulation} x {found.micro_batch}, {found.counted}"
    )
    yield (
        f"{observations.steps} steps in {observations.seconds:.1f} s, "
        f"{1e3 * observations.step_seconds:.3g} ms each; {len(observations.measurements)} "
        f"measured by {observations.way}"
    )


def noise(advice: BatchAdvice) -> Iterator[str]:
    """The noise scale, how it moved, and the layers with the most noise."""
    trend = advice.trend
    yield (
        f"Noise scale: {number(trend.noise_scale)} samples "
        f"(90 % interval {number(trend.low)} to {number(trend.high)})"
    )
    if len(trend.segments) > 1:
        scales = [segment.noise_scale for segment in trend.segments]
        yield (
            f"  {bars(scales)}  from {number(scales[0])} in steps {trend.segments[0].first} to "
            f"{trend.segments[0].last} to {number(scales[-1])} in steps "
            f"{trend.segments[-1].first} to {trend.segments[-1].last}"
        )
    for layer in trend.layers[:_LAYERS]:
        yield (
            f"  {layer.share:4.0%} of the noise is in {layer.name or 'the model itself'}, whose "
            f"own noise scale is {number(layer.noise_scale)}"
        )


def _devices(advice: BatchAdvice) -> Iterator[str]:
    if not advice.devices:
        return
    yield "Fastest batch by devices like this one:"
    for cells in (DEVICE_COLUMNS, *map(device_cells, advice.devices)):
        yield "  " + "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    yield from (f"  {line}" for line in device_notes(advice))


DEVICE_COLUMNS = ("devices", "batch", "interval", "s/step", "time", "samples", "speed-up")
_WIDTHS = (7, 10, 19, 10, 7, 9, 10)


def device_cells(row: DeviceAdvice) -> tuple[str, ...]:
    """A row of the table of devices."""
    return (
        f"{row.devices}",
        f"{row.batch_size:,}",
        _interval(row),
        f"{row.seconds:.3g}",
        "-" if math.isnan(row.time) else f"{row.time:.2f}",
        f"{row.samples:.2f}",
        f"{row.speedup:.1f}",
    )


def _interval(row: DeviceAdvice) -> str:
    return f"{row.low:,} or more" if row.high is None else f"{row.low:,} to {row.high:,}"


def device_notes(advice: BatchAdvice) -> Iterator[str]:
    """What the columns mean, and what is assumed."""
    yield "time, samples: to the same progress, relative to the present batch on as many devices"
    if any(math.isnan(row.time) for row in advice.devices):
        yield f"-: the present batch of {advice.found.batch_size} has no sample for some devices"
    yield "speed-up: over the present batch on one device"
    network = advice.network
    yield (
        f"assumed: {network.gigabytes_per_second:g} GB/s and {network.microseconds:g} us between "
        "devices, nothing overlaps"
    )


def _rate(advice: BatchAdvice) -> Iterator[str]:
    batch, present = advice.batch_size or advice.bound, advice.found.batch_size
    if batch is None or (math.isinf(advice.trend.high) and batch <= present):
        return
    if batch == present:
        yield "learning rate as it is"
        return
    for name in advice.found.optimizers:
        factor, known = advice.lr_factor(batch, name), advice.found.lr.get(name, ())
        rates = ", ".join(f"{lr:.3g} to {lr * factor:.3g}" for lr in known) or "unknown"
        rule = "1 / (1 + noise scale / batch)" if name == "SGD" else "sqrt(batch)"
        of = f" of {name}" * (len(advice.found.optimizers) > 1)
        yield f"learning rate{of} for {batch}: x {factor:.3g} ({rates}), proportional to {rule}"
    found, same = advice.found, "of the same half-life in samples"
    pairs = zip(found.betas, advice.betas(batch), strict=False)  # empty beyond a factor of 4
    if betas := "; ".join(f"{_decays(old)} to {_decays(new)}" for old, new in pairs):
        yield f"betas {same}: {betas} (worth a try; not always better)"
    if momentum := advice.momentum(batch):
        yield (
            f"momentum {same}: {_decays(found.momentum)} to {_decays(momentum)} (worth a try; SGD "
            "adds gradients up, so multiply its rate by (1 - the new) / (1 - the old momentum))"
        )


def _decays(decays: tuple[float, ...]) -> str:
    return ", ".join(f"{decay:.4g}" for decay in decays)


def _memory(advice: BatchAdvice) -> Iterator[str]:
    time = advice.observations.time
    if time is None or time.largest is None:
        yield "largest micro-batch: unknown"
        return
    yield (
        f"largest micro-batch: about {two_digits(time.largest):,} samples, estimated from "
        f"{time.sample_bytes / 1e6:.3g} MB that a backward keeps for each; not tried"
    )


def _lines(advice: BatchAdvice) -> Iterator[str]:
    found = lines_to_add(advice)
    if not found:
        return
    yield "Lines to add:"
    trainer, *others = found
    shown = [trainer] + [ADAPTIVE] * (trainer == "PyTorch" and ADAPTIVE in found)
    for name in shown:
        first, *rest = found[name].splitlines()
        yield f"  {name + ':':<22} {first}"
        yield from (f"  {'':<22} {line}" for line in rest)
    others = [name for name in others if name not in shown]
    yield f"  -o advice.html shows those of {', '.join(others)}"


def bars(scales: list[float]) -> str:
    """A line of bars of the logarithms; a space where there is no signal."""
    logs = [math.log(scale) if 0 < scale < math.inf else math.nan for scale in scales]
    known = [value for value in logs if not math.isnan(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    steps = (len(_BARS) - 1) / ((high - low) or 1)
    return "".join(" " if math.isnan(x) else _BARS[round((x - low) * steps)] for x in logs)


def number(value: float) -> str:
    """Two or three digits that say something."""
    if math.isinf(value):
        return "inf"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def two_digits(value: float) -> int:
    """Rounded down to two digits."""
    unit: int = 10 ** max(0, len(str(int(value))) - 2)
    return int(value) // unit * unit
