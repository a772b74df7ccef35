"""Bugs seeded in what is done at the same time, in micro-batches by tokens, and in what is measured or saved of it."""

from __future__ import annotations

from mutant import Mutant

OVERLAP = ("tests/training/test_overlap.py",)
SAME_RUN = "tests/equivalence/test_same_run.py::test_a_resumed_run_is_the_uninterrupted_run_bitwise"

OVERLAPPING = [
    Mutant(
        name="importance-upside-down",
        file="rlhf/algo/policy_loss.py",
        before="return (torch.where(mask, logprobs - sampler_logprobs, 0.0)).exp().clamp(max=cap)",
        after="return (torch.where(mask, sampler_logprobs - logprobs, 0.0)).exp().clamp(max=cap)",
        why="what the older policy drew too often counts twice instead of half",
        tests=("tests/algo/test_policy_loss.py",),
    ),
    Mutant(
        name="importance-left-out",
        file="rlhf/experience.py",
        before="    if ratio_cap is not None:",
        after="    if ratio_cap is not None and ratio_cap < 0:",
        why="completions of an older policy are learned from as if the present one had drawn them",
        tests=("tests/algo/test_objective.py",),
    ),
    Mutant(
        name="ahead-never-refreshed",
        file="rlhf/training/overlap.py",
        before="        self._refresh()",
        after="        pass",
        why="completions fall behind by ever more steps, and only the mismatch metric shows it",
        tests=OVERLAP,
    ),
    Mutant(
        name="ahead-not-saved",
        file="rlhf/training/checkpoints.py",
        before='extra["ahead"] = self.ahead.saved(self.state)',
        after='extra["ahead"] = {}',
        why="a resumed run draws the next step by other weights than the uninterrupted one did",
        tests=(f"{SAME_RUN}[drawn ahead]",),
    ),
    Mutant(
        name="ahead-forgets-the-step-at-hand",
        file="rlhf/training/overlap.py",
        before="        self._drawn = {step: self._drawn[step]}",
        after="        self._drawn = {}",
        why="a run that its reward stopped draws the step again, by later weights",
        tests=OVERLAP,
    ),
    Mutant(
        name="portions-one-short",
        file="rlhf/batching.py",
        before="if rows and filled + size > limit:",
        after="if rows and filled + size >= limit:",
        why="passes are smaller than asked for",
        tests=("tests/test_types.py",),
    ),
    Mutant(
        name="portions-too-large",
        file="rlhf/batching.py",
        before="        filled += size",
        after="        filled = size",
        why="a pass takes more tokens than fit: out of memory",
        tests=("tests/test_types.py",),
    ),
    Mutant(
        name="outer-phase-without-inner-peak",
        file="rlhf/runtime/memory.py",
        before="        for name in self._open:",
        after="        for name in self._open[-1:]:",
        why="the peak of a phase leaves out what it calls",
        tests=("tests/runtime/test_memory.py",),
    ),
    Mutant(
        name="eightbit-scales-not-saved",
        file="rlhf/runtime/optimizers.py",
        before='QUANTIZED = ("state1", "state2", "absmax1", "absmax2")',
        after='QUANTIZED = ("state1", "state2", "absmax1")',
        why="a resumed run starts with second moments of another scale",
        tests=("tests/runtime/test_optimizers.py",),
    ),
    Mutant(
        name="silent-process-does-not-wait",
        file="rlhf/cli.py",
        before="        time.sleep(SILENT_WAIT_S)",
        after="        pass",
        why="the launcher ends the first process before it has said what is wrong",
        tests=(
            "tests/distributed/test_launchers.py::test_only_the_first_process_speaks_and_a_mistake_is_said_once_even_where_it_comes_last",
        ),
    ),
    Mutant(
        name="cells-outlive-the-comparison",
        file="rlhf/process.py",
        before="        os.kill(os.getpid(), signal.SIGTERM)",
        after="        pass",
        why="a comparison that was killed leaves runs behind, which hold the machine and the folders",
        tests=("tests/test_process.py::test_a_process_stops_when_the_one_that_started_it_is_killed",),
    ),
]
