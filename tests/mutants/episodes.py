"""Bugs of episodes: the tokens that are learned, and the environment's tokens."""

from __future__ import annotations

from mutant import Mutant

EXACT = ("tests/environments/test_exact_episodes.py",)
PLAYED = ("tests/environments/test_episodes.py",)
MASKS = ("tests/environments/test_masks.py",)

EPISODES = [
    Mutant(
        name="observations-in-the-loss",
        file="rlhf/experience.py",
        before="    mask = rollout.action_mask\n",
        after="    mask = rollout.completion_mask\n",
        why="the policy is trained to write what the environment wrote (RAGEN 71, verl 2337)",
        tests=EXACT,
    ),
    Mutant(
        name="observations-in-gae",
        file="rlhf/algorithms/gae.py",
        before="partial(gae, rewards, rollout.values, mask,",
        after="partial(gae, rewards, rollout.values, rollout.completion_mask,",
        why="values of observations are steps of the recursion (verl 7278)",
        tests=EXACT,
    ),
    Mutant(
        name="rewards-of-turns-at-the-end",
        file="rlhf/experience.py",
        before="token_rewards(rollout.scores, penalty, mask, turn_rewards)",
        after="token_rewards(rollout.scores, penalty, mask)",
        why="a turn is paid at the end of the episode: with lambda below 1 its actions learn less of it (miles 1827)",
        tests=EXACT,
    ),
    Mutant(
        name="turn-lambda-within-turns",
        file="rlhf/algo/advantages.py",
        before="torch.where(turns[:, t] == next_turn, gamma * gae_lambda, gamma * turn_lambda)",
        after="torch.where(turns[:, t] == next_turn, gamma * turn_lambda, gamma * gae_lambda)",
        why="lambda between turns is that of tokens, and the other way round",
        tests=EXACT,
    ),
    Mutant(
        name="critic-learns-observations",
        file="rlhf/objective.py",
        before="            return batch.action_mask\n",
        after="            return batch.completion_mask\n",
        why="the critic is fitted to returns of 0 at tokens of the environment",
        tests=PLAYED,
    ),
    Mutant(
        name="turns-draw-the-same",
        file="rlhf/sampling/episodes.py",
        before='turn_key = key if turn == 0 else derive_seed(key, "turn", turn)',
        after="turn_key = key",
        why="every turn draws with the first turn's random numbers",
        tests=PLAYED,
    ),
    Mutant(
        name="members-meet-other-tasks",
        file="rlhf/sampling/episodes.py",
        before='derive_seed(key, "environment", row // group_size)',
        after='derive_seed(key, "environment", row)',
        why="the episodes of a group have different instances: the baseline compares tasks",
        tests=PLAYED,
    ),
    Mutant(
        name="gae-whitens-observations",
        file="rlhf/algorithms/gae.py",
        before="whiten(advantages, rollout.action_mask, weights=",
        after="whiten(advantages, rollout.completion_mask, weights=",
        why="zeros at observations move the mean and the deviation of the advantages",
        tests=MASKS,
    ),
    Mutant(
        name="minibatch-whitens-observations",
        file="rlhf/algorithms/gae.py",
        before="whiten(minibatch.advantages, minibatch.loss_mask)",
        after="whiten(minibatch.advantages, minibatch.completion_mask)",
        why="the same in each minibatch (whiten_over=minibatch)",
        tests=MASKS,
    ),
    Mutant(
        name="reinforce-whitens-observations",
        file="rlhf/algorithms/reinforce.py",
        before="whiten(returns, rollout.action_mask)",
        after="whiten(returns, rollout.completion_mask)",
        why="the same without a critic",
        tests=MASKS,
    ),
    Mutant(
        name="turn-lambda-is-not-passed",
        file="rlhf/algorithms/gae.py",
        before="turn_lambda=self.turn_lambda",
        after="turn_lambda=None",
        why="the setting has no effect",
        tests=MASKS,
    ),
    Mutant(
        name="pairs-learn-observations",
        file="rlhf/algo/selection.py",
        before='_learned"] = rows.action_mask',
        after='_learned"] = rows.completion_mask',
        why="online DPO learns to write what the environment wrote in the better episode",
        tests=MASKS,
    ),
    Mutant(
        name="evaluated-kl-of-observations",
        file="rlhf/evaluation/evaluate.py",
        before="torch.where(completions.action_mask, tensor, 0.0)",
        after="torch.where(completions.completion_mask, tensor, 0.0)",
        why="the KL of an agent grows with the length of what its tools answer",
        tests=MASKS,
    ),
    Mutant(
        name="answers-of-a-replay-are-not-compared",
        file="rlhf/environments/pool.py",
        before="if answer == expected:",
        after="if not isinstance(answer, Fault):",
        why="an environment that is no function of its seed goes on as another one than the policy has read",
        tests=("tests/environments/test_replayed_episodes.py",),
    ),
]
