"""Bugs of the guard: an alarm that never ends, a best checkpoint that is luck, a state that does not survive."""

from __future__ import annotations

from mutant import Mutant

ALARMS = ("tests/guard/test_alarms.py",)
PAIRED = ("tests/guard/test_paired.py",)
RUNS = ("tests/guard/test_guarded_runs.py",)

GUARDING = [
    Mutant(
        name="alarm-without-patience",
        file="rlhf/training/health.py",
        before="if not state.is_on and state.bad >= alarm.patience:",
        after="if not state.is_on and state.bad >= 1:",
        why="one odd batch is an alarm, and nobody reads alarms any more",
        tests=ALARMS,
    ),
    Mutant(
        name="alarm-counts-bad-steps-not-in-a-row",
        file="rlhf/training/health.py",
        before="state.bad, state.good = 0, state.good + 1",
        after="state.good = state.good + 1",
        why="three bad steps in a thousand are an alarm",
        tests=ALARMS,
    ),
    Mutant(
        name="alarm-at-every-step",
        file="rlhf/training/health.py",
        before="            state.is_on = True\n",
        after="",
        why="the same alarm is said at every step",
        tests=ALARMS,
    ),
    Mutant(
        name="nan-in-the-history",
        file="rlhf/guard/alarms.py",
        before="if value is not None and math.isfinite(value)",
        after="if value is not None",
        why="NaN compares as good: one of them resets every alarm, and a resumed run, which reads null, differs",
        tests=ALARMS,
    ),
    Mutant(
        name="spike-against-itself",
        file="rlhf/guard/alarms.py",
        before="return values[:-1] if name in self._latest else values",
        after="return values",
        why="a value is compared with a past that holds it: counts never rise and the best is always the latest",
        tests=ALARMS,
    ),
    Mutant(
        name="best-without-pairs",
        file="rlhf/guard/best.py",
        before="stdev(differences) / len(differences) ** 0.5",
        after="(stdev(new) ** 2 + stdev(old) ** 2) ** 0.5 / len(differences) ** 0.5",
        why="the spread between prompts hides every gain",
        tests=PAIRED,
    ),
    Mutant(
        name="best-by-the-mean-alone",
        file="rlhf/guard/best.py",
        before="return self.low > 0",
        after="return self.mean > 0",
        why="half of all evaluations of the same model are a new best: noise chooses the checkpoint",
        tests=PAIRED,
    ),
    Mutant(
        name="interval-of-the-normal-distribution",
        file="rlhf/guard/best.py",
        before="stdtrit(len(differences) - 1, 0.5 + confidence / 2)",
        after="stdtrit(1e9, 0.5 + confidence / 2)",
        why="with few rows the interval is too narrow",
        tests=PAIRED,
    ),
    Mutant(
        name="lower-loss-is-worse",
        file="rlhf/training/health.py",
        before="sign = -1.0 if wanted[0] in _LOWER_IS_BETTER else 1.0",
        after="sign = 1.0",
        why="the worst held-out loss is the best checkpoint",
        tests=RUNS,
    ),
    Mutant(
        name="best-exported-whatever-was-asked",
        file="rlhf/training/health.py",
        before="if best is None or not self.config.restore:",
        after="if best is None:",
        why="restore: false exports the best all the same",
        tests=RUNS,
    ),
    Mutant(
        name="resume-without-replay",
        file="rlhf/training/health.py",
        before="        for row in rows:\n            self.watch",
        after="        for row in ():\n            self.watch",
        why="after a restart an alarm that is on goes off again, and where a metric started is forgotten",
        tests=RUNS,
    ),
    Mutant(
        name="lowered-rate-forgotten",
        file="rlhf/training/online_run.py",
        before="return factor * run.session.state.lr_scale",
        after="return factor",
        why="lower_lr says that it acts, and does nothing",
        tests=RUNS,
    ),
    Mutant(
        name="allowed-rules-still-refuse",
        file="rlhf/guard/lint.py",
        before="if rule.name not in config.guard.allow and (value :=",
        after="if (value :=",
        why="what was broken on purpose cannot be run",
        tests=("tests/guard/test_lint.py::test_a_refusal_names_rule_key_value_source_fix_and_the_way_around",),
    ),
]
