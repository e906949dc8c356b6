"""The last lines of a test run: one for each folder of tests, with what it proves."""

from collections import Counter

AREAS = {
    "gradients": "micro-batch gradients under DDP, FSDP2 and HSDP are those of one process",
    "statistics": "noise scale, similarity, intervals and second moment equal float64 oracles",
    "policies": "policies, schedules, plans and the controller keep their rules and bounds",
    "data": "every sample is used once an epoch, with any loader, plan and restart",
    "optim": "VR-SGD, -Momentum, -Adam, -LARS, -LAMB, LARS and LAMB equal float64 oracles",
    "training": "gradients, learning rates, schedules and resumed runs are exact on any ranks",
    "integrations": "DeepSpeed, Lightning, the HF Trainer and Accelerate train as a plain loop",
    "log": "every loop's log is complete after faults; report, compare and replay are right",
    "advisor": "unmodified scripts are measured as by hand, or refused, and train as without it",
    "recipes": "every experiment reads its data, builds its models, trains and evaluates",
    "studies": "every study runs, and computes what its page says",
    "cli": "every command accepts its documented options, and refuses others in one line",
    "outside": "third-party scripts train as before, after an edit of a few lines",
    "project": "README, documents and examples are right; imports follow the data",
}


def report_areas(terminal) -> None:
    """Prints how many tests of each folder passed, failed and were skipped."""
    counts = {area: Counter() for area in AREAS}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminal.stats.get(outcome, ()):
            folders = report.nodeid.split("/")
            area = folders[1] if folders[0] == "tests" else "doctests"
            counts.setdefault(area, Counter())[outcome] += 1
    terminal.write_line("")
    for area, outcomes in counts.items():
        if outcomes:
            numbers = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
            promise = AREAS.get(area, "the examples in docstrings run")
            terminal.write_line(f"{area:12} {numbers:36} {promise}")
