"""Bugs seeded in the online arms: CISPO, ReMax, REINFORCE, A2C, the refilling of groups."""

from __future__ import annotations

from mutant import Mutant

POLICY_LOSS = ("tests/algo/test_policy_loss.py",)
COLLECT = ("tests/training/test_collect.py",)

ONLINE_ARMS = [
    Mutant(
        name="cispo-weight-has-a-gradient",
        file="rlhf/algorithms/cispo.py",
        before="ratio = tokens.ratio.detach()",
        after="ratio = tokens.ratio",
        why="without the stop-gradient a token's weight is learned too: another loss altogether",
        tests=POLICY_LOSS,
    ),
    Mutant(
        name="cispo-silences-like-ppo",
        file="rlhf/algorithms/cispo.py",
        before="per_token=-weight * tokens.advantages * tokens.logprobs,",
        after=("per_token=-weight * tokens.advantages * tokens.logprobs * (~clipped),"),
        why="clipped tokens get no gradient: what CISPO was made to avoid",
        tests=POLICY_LOSS,
    ),
    Mutant(
        name="cispo-on-the-ratio",
        file="rlhf/algorithms/cispo.py",
        before="per_token=-weight * tokens.advantages * tokens.logprobs,",
        after="per_token=-weight * tokens.advantages + 0 * tokens.logprobs,",
        why="the clipped ratio itself is the loss: detached, it teaches nothing",
        tests=("tests/exact/test_exact_gradients.py::test_cispo_away_from_the_old_policy",),
    ),
    Mutant(
        name="cispo-bounds-swapped",
        file="rlhf/algorithms/cispo.py",
        before="ratio.clamp(1.0 - self.clip_eps_low, 1.0 + self.clip_eps_high)",
        after="ratio.clamp(1.0 - self.clip_eps_high, 1.0 + self.clip_eps_low)",
        why="the lower bound is used as the upper one",
        tests=("tests/algo/test_objective.py::test_losses_of_log_probabilities_by_hand",),
    ),
    Mutant(
        name="plain-gradient-sign",
        file="rlhf/algorithms/reinforce.py",
        before="per_token=-tokens.advantages * tokens.logprobs)",
        after="per_token=tokens.advantages * tokens.logprobs)",
        why="A2C, REINFORCE and ReMax climb down",
        tests=POLICY_LOSS,
    ),
    Mutant(
        name="remax-baseline-forgotten",
        file="rlhf/algorithms/remax.py",
        before="returns - rollout.baselines[:, None], 0.0)",
        after="returns + 0 * rollout.baselines[:, None], 0.0)",
        why="ReMax without its baseline is REINFORCE at twice the price: it learns, so no curve tells",
        tests=("tests/algo/test_objective.py::test_credit_by_hand_with_greedy_baselines",),
    ),
    Mutant(
        name="remax-baseline-is-sampled",
        file="rlhf/training/collect.py",
        before='draw(prompts, "greedy", group_size=1, greedy=True)',
        after='draw(prompts, "greedy", group_size=1)',
        why="the baseline is a random completion's score: unbiased still, and noisy",
        tests=COLLECT,
    ),
    Mutant(
        name="remax-baselines-of-other-prompts",
        file="rlhf/training/collect.py",
        before="best_scores.values.repeat_interleave(group_size)",
        after="best_scores.values.repeat(group_size)",
        why="with groups, a completion is compared with another prompt's greedy completion",
        tests=COLLECT,
    ),
    Mutant(
        name="greedy-completions-are-free",
        file="rlhf/training/finish.py",
        before="run.session.state.completions += len(rollout) + collected.extra",
        after="run.session.state.completions += len(rollout)",
        why="a budget in completions favors the arms that sample what they do not learn from",
        tests=("tests/learning/test_learns.py::test_greedy_baselines_are_counted",),
    ),
    Mutant(
        name="refill-takes-uniform-groups",
        file="rlhf/training/collect.py",
        before="varied = ~uniform_groups(drawn[1].values, size)",
        after="varied = torch.ones_like(uniform_groups(drawn[1].values, size))",
        why="a uniform group is replaced by another uniform one, and the search ends there",
        tests=COLLECT,
    ),
    Mutant(
        name="refill-under-a-number-of-its-own",
        file="rlhf/training/collect.py",
        before=", row_ids=batch[0].row_ids[slots] // size)",
        after=", row_ids=torch.arange(len(slots)))",
        why="two rows of a step have one id: their random numbers are no longer their own",
        tests=COLLECT,
    ),
    Mutant(
        name="refill-counts-what-it-kept",
        file="rlhf/training/collect.py",
        before="        discarded[rows] = False\n",
        after="        discarded[: len(uniform)] = False\n",
        why="the completions thrown away are taken for those that were kept: the token count is off",
        tests=COLLECT,
    ),
    Mutant(
        name="a-second-step-without-a-ratio",
        file="rlhf/algorithms/reinforce.py",
        before="if sizes.updates > 1 and",
        after="if sizes.updates > 4 and",
        why="A2C takes stale completions for fresh ones, and nothing says so",
        tests=("tests/config/test_load.py",),
    ),
]
