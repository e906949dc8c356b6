"""What `make test` proved, a line for each folder of tests: its last lines."""

from collections import Counter

AREAS = {
    "gradients": "micro-batch gradients under DDP, FSDP2 and HSDP are those of one process",
    "statistics": "noise scale, similarity, intervals and second moment equal float64 oracles",
    "policies": "each policy, schedule, plan and the controller keep their rule and bounds",
    "data": "each sample comes once an epoch, whatever the loader, the plans, the restarts",
    "optim": "VR-SGD, -Momentum, -Adam, -LARS, -LAMB, LARS and LAMB equal float64 oracles",
    "training": "the loop's gradients, rates, schedules and resumed runs are exact on any ranks",
    "integrations": "DeepSpeed, Lightning, the HF Trainer, Accelerate train as the loop by hand",
    "runs": "run directories, reports and replay say what happened, after faults too",
    "experiments": "every experiment reads its data, builds its models, trains and is scored",
    "bench": "what the benchmarks count and draw is what they say",
    "cli": "every command takes what it says it takes, and refuses the rest in one line",
    "outside": "scripts of others train as they did, with the few lines of a user's edit",
    "project": "README, documents and examples hold; imports follow the data",
}


def report_areas(terminal) -> None:
    """Writes how many tests of each folder passed, failed and were skipped."""
    counts = {area: Counter() for area in AREAS}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminal.stats.get(outcome, ()):
            folders = report.nodeid.split("/")
            area = folders[1] if folders[0] == "tests" else "doctests"
            counts.setdefault(area, Counter())[outcome] += 1
    terminal.write_line("")
    for area, counted in counts.items():
        if counted:
            numbers = ", ".join(f"{number} {outcome}" for outcome, number in counted.items())
            proved = AREAS.get(area, "the examples in docstrings run")
            terminal.write_line(f"{area:12} {numbers:36} {proved}")
