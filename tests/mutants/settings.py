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
        name="exponents-are-text",
        file="rlhf/config/files.py",
        before='_EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$")',
        after='_EXPONENT = re.compile(r"never$")',
        why="kwargs={scale: 1e-3} gives a reward function the text 1e-3",
        tests=LOADING,
    ),
    Mutant(
        name="a-tag-is-a-key",
        file="rlhf/config/load.py",
        before="            is_tag_next = len(models) > 1",
        after="            is_tag_next = False",
        why="a missing reward.source.path is called reward.source.model.path",
        tests=LOADING,
    ),
    Mutant(
        name="out-dir-is-not-the-folder",
        file="rlhf/api/runs.py",
        before="Path(folder or out_dir or get_setting",
        after="Path(folder or get_setting",
        why="rlhf.train(run={'out_dir': ...}) does not go where it was told",
        tests=("tests/api/test_api_runs.py::test_a_second_call_is_a_new_run_and_resume_continues",),
    ),
    Mutant(
        name="the-system-column-of-a-question-is-lost",
        file="rlhf/data/formats.py",
        before='return with_system([_user_message(question)], values) if turns else question + "\\n"',
        after='return [_user_message(question)] if turns else question + "\\n"',
        why="Orca's pairs are trained on without their system prompts",
        tests=("tests/data/test_formats.py",),
    ),
    Mutant(
        name="earlier-turns-of-a-prompt-are-lost",
        file="rlhf/data/formats.py",
        before="for start in range(len(prompt)):",
        after="for start in range(1):",
        why="a pair whose sides repeat only the last turn is trained on without its history",
        tests=("tests/data/test_formats.py",),
    ),
    Mutant(
        name="the-scale-is-the-score",
        file="rlhf/rewards/judge.py",
        before='_NUMBER.search(_SCALE.sub("", lines[-1]))',
        after="_NUMBER.search(lines[-1])",
        why="a judge's 3 out of 10 counts as 10",
        tests=("tests/rewards/test_judge.py",),
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
