"""Bugs seeded in the configuration: which of two settings counts, which sections are left out, what is refused."""

from __future__ import annotations

from mutant import Mutant

LOADING = ("tests/config/test_load.py",)

SETTINGS = [
    Mutant(
        name="alternatives-do-not-exclude",
        file="rlhf/config/presets.py",
        before="return drop_keys(keep_last_alternative(tree, over), excluded)",
        after="return drop_keys(tree, excluded)",
        why="schedule.steps on the command line is refused where the file says epochs",
        tests=LOADING,
    ),
    Mutant(
        name="exclusions-ignore-the-choice",
        file="rlhf/config/presets.py",
        before="is not None and exclusion.is_chosen(get_setting(over, exclusion.key))",
        after="is not None",
        why="sharding=zero3 on the command line silently drops the DeepSpeed keys of the file",
        tests=LOADING,
    ),
    Mutant(
        name="command-line-section-dropped",
        file="rlhf/config/load.py",
        before="[key for key in unread_keys(config) if get_setting(given, key) is None]",
        after="unread_keys(config)",
        why="a critic section that the user gave on the command line vanishes without the warning",
        tests=LOADING,
    ),
    Mutant(
        name="unread-sections-stay",
        file="rlhf/config/load.py",
        before="    if not _names_another_algorithm(file, given):\n        return tree",
        after="    if True:\n        return tree",
        why="configs/ppo.yaml algorithm.preset=grpo warns of the critic section that the file has for PPO",
        tests=LOADING,
    ),
    Mutant(
        name="preset-keeps-its-value-loss",
        file="rlhf/config/load.py",
        before='    if advantage is None or "loss" in preset:',
        after="    if True:",
        why="algorithm.advantage.type=group over PPO is refused for a value loss that only the preset named",
        tests=LOADING,
    ),
    Mutant(
        name="unread-data-must-be-there",
        file="rlhf/data/paths.py",
        before='if isinstance(dataset, TrainableDataConfig) and f"data.{name}" not in unread:',
        after="if isinstance(dataset, TrainableDataConfig):",
        why="a run is refused for a data file that it would never read",
        tests=("tests/cli/test_early_mistakes.py::test_only_what_a_run_reads_must_be_there",),
    ),
    Mutant(
        name="a-line-for-every-step",
        file="rlhf/tracking/progress.py",
        before="if has_evaluation or step >= self.total_steps or self._is_line_due():",
        after="if True:",
        why="a run of 1,500 steps without a terminal writes as many lines",
        tests=("tests/tracking/test_progress.py",),
    ),
]
