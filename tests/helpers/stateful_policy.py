"""A policy with a state to save."""

import bigbatch as bb


class Patient:
    """Counts its decisions, and grows the batch after every second one."""

    decisions = 0

    def decide(self, statistics, now):
        self.decisions += 1
        return bb.Decision(8 * (1 + self.decisions // 2), "patient")

    def state_dict(self):
        return {"decisions": self.decisions}

    def load_state_dict(self, state):
        self.decisions = state["decisions"]
