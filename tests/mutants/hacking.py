"""Bugs seeded in what is done against reward hacking: combinations of rewards, rules, ensembles, the laws' fit."""

from __future__ import annotations

from mutant import Mutant

COMBINE = "tests/rewards/test_combine.py"
RULES = "tests/rewards/test_rules.py"
ENSEMBLE = "tests/reward_model/test_rm_ensemble.py"
ENSEMBLE_RUN = "tests/reward_model/test_rm_ensemble_run.py"
LAWS = "tests/evaluation/test_overoptimization.py"

HACKING = [
    Mutant(
        name="abstention-counts-as-zero",
        file="rlhf/rewards/ensemble.py",
        before='            return total / count\n        case "weighted_mean"',
        after='            return total / len(weights)\n        case "weighted_mean"',
        why="a source that does not apply to a completion pulls its score to 0",
        tests=(f"{COMBINE}::test_what_does_not_apply_is_left_out_of_every_combination",),
    ),
    Mutant(
        name="weighted-mean-over-all-weights",
        file="rlhf/rewards/ensemble.py",
        before="torch.where(applies, weights[:, None], 0.0).sum(dim=0)",
        after="weights.sum()",
        why="the weight of a source that does not apply still counts",
        tests=(f"{COMBINE}::test_what_does_not_apply_is_left_out_of_every_combination",),
    ),
    Mutant(
        name="gdpo-over-the-batch",
        file="rlhf/rewards/ensemble.py",
        before="applies.unflatten(1, (-1, group_size))",
        after="applies.unflatten(1, (1, -1))",
        why="rewards are standardized over all prompts, or nothing fits: hard prompts are punished",
        tests=(f"{COMBINE}::test_gdpo_by_hand",),
    ),
    Mutant(
        name="gdpo-sums-first",
        file="rlhf/rewards/ensemble.py",
        before="torch.where(same, 0.0, centered / (std + GROUP_STD_EPS)).flatten(1)",
        after="torch.where(same, 0.0, centered).flatten(1)",
        why="a reward of large spread hides the others, which GDPO is there to prevent",
        tests=(f"{COMBINE}::test_gdpo_does_not_depend_on_the_scale_of_a_source",),
    ),
    Mutant(
        name="disagreement-unweighted",
        file="rlhf/rewards/ensemble.py",
        before="return _std(torch.where(applies, scores * weights[:, None], 0.0)",
        after="return _std(torch.where(applies, scores, 0.0)",
        why="the penalty and the metric measure different things",
        tests=(f"{COMBINE}::test_what_does_not_apply_is_left_out_of_every_combination",),
    ),
    Mutant(
        name="highest-gate-wins",
        file="rlhf/rewards/rules.py",
        before="gates.clamp(max=rule.gate)",
        after="torch.full_like(gates, rule.gate)",
        why="the order of the rules decides what breaking two of them costs",
        tests=(f"{RULES}::test_penalties_add_up_and_the_lowest_broken_gate_decides",),
    ),
    Mutant(
        name="forbidden-inside-words",
        file="rlhf/rewards/rules.py",
        before='return rf"(?<!\\w){re.escape(phrase)}(?!\\w)"',
        after="return re.escape(phrase)",
        why="start breaks a rule that forbids art",
        tests=(f"{RULES}::test_how_much_of_a_rule_is_broken",),
    ),
    Mutant(
        name="watch-shaped-score",
        file="rlhf/training/watch.py",
        before='scores.parts.get("raw", scores.values)[index]',
        after="scores.values[index]",
        why="a clip or a length penalty looks like a gap between the reward and the judge",
        tests=("tests/rewards/test_watch.py::test_it_compares_the_same_rows_before_shaping",),
    ),
    Mutant(
        name="ensemble-loss-summed",
        file="reward_model/ensemble.py",
        before="(weights * losses).mean(dim=0).sum()",
        after="(weights * losses).sum()",
        why="the backbone's gradient grows with the number of members",
        tests=(f"{ENSEMBLE}::test_the_loss_is_the_mean_of_the_members",),
    ),
    Mutant(
        name="same-bootstrap-for-all",
        file="reward_model/ensemble.py",
        before='f"{seed}|{member}|"',
        after='f"{seed}|"',
        why="all members learn from the same resample: the ensemble agrees where it should not",
        tests=(f"{ENSEMBLE}::test_bootstrap_weights_are_poisson_and_follow_the_pair_not_its_batch",),
    ),
    Mutant(
        name="members-share-a-calibration",
        file="rlhf/models/scalar_head.py",
        before="return (raw - means.to(raw)) / stds.to(raw)",
        after="return (raw - means.mean().to(raw)) / stds.mean().to(raw)",
        why="members on different scales disagree about nothing but their scale",
        tests=(f"{ENSEMBLE}::test_each_member_is_calibrated_and_the_folder_loads_with_plain_transformers",),
    ),
    Mutant(
        name="folded-critic-unscaled",
        file="rlhf/models/scalar_head.py",
        before="(old.weight.double().cpu() / stds[:, None]).mean(dim=0, keepdim=True)",
        after="old.weight.double().cpu().mean(dim=0, keepdim=True)",
        why="the critic that starts from an ensemble starts on another scale than its scores",
        tests=(f"{ENSEMBLE}::test_a_critic_starts_from_the_members_mean",),
    ),
    Mutant(
        name="auc-ignores-ties",
        file="reward_model/evaluate.py",
        before="rankdata(scores.double().numpy())",
        after='rankdata(scores.double().numpy(), method="min")',
        why="disagreement that is the same everywhere seems to predict something",
        tests=(f"{ENSEMBLE}::test_auc_by_hand",),
    ),
    Mutant(
        name="law-of-best-of-n-for-rl",
        file="benchmarks/overoptimization_laws.py",
        before="return np.stack([distance, -distance * logs], axis=-1)",
        after="return np.stack([distance, -(distance**2)], axis=-1)",
        why="PPO's beta is fitted to another law than the paper's",
        tests=(f"{LAWS}::test_the_laws_by_hand",),
    ),
    Mutant(
        name="law-interval-of-a-point",
        file="benchmarks/overoptimization_laws.py",
        before="low, high = _interval(distances, gains, law, seed)",
        after="low, high = _interval(distances.reshape(-1, 1), gains.reshape(-1, 1), law, seed)",
        why="points of one curve count as independent: intervals far too narrow",
        tests=(f"{LAWS}::test_intervals_cover_the_truth_about_as_often_as_they_say",),
    ),
    Mutant(
        name="card-of-weights-before-rounding",
        file="rlhf/factory/reward_card.py",
        before="        _load_weights(built, folder.path)  # rounded",
        after="        pass",
        why="the report card is of weights that were not exported: rounding to bfloat16 took the training away",
        tests=(f"{ENSEMBLE_RUN}::test_the_report_card_is_of_the_model_as_it_was_exported",),
    ),
]
