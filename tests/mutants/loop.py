"""Bugs of the loop that the first real model showed: each was ours."""

from __future__ import annotations

from mutant import Mutant

ONLINE = ("tests/training/test_online.py",)
OBJECTIVE = ("tests/algo/test_objective.py",)
UPDATE_LOGPROBS = ("tests/training/test_old_logprobs_of_update.py",)

LOOP = [
    Mutant(
        name="momentum-moves-a-policy-without-a-gradient",
        file="rlhf/training/step.py",
        before="if norm == 0.0:",
        after="if norm < 0.0:",
        why="where every group ties Adam goes on by itself: KL 8 to 42 nats in four steps",
        tests=("tests/training/test_step.py",),
    ),
    Mutant(
        name="ties-by-rounding",
        file="rlhf/algo/advantages.py",
        before="return torch.where((groups == groups[:, :1]).all(dim=1, keepdim=True), 0.0, groups - baseline)",
        after="return groups - baseline",
        why="the rounding of a mean over the 1e-4 of a deviation is an advantage",
        tests=("tests/algo/test_advantages.py",),
    ),
    Mutant(
        name="ptx-at-the-sampling-temperature",
        file="rlhf/training/losses.py",
        before="self.models.policy_tokens(micro, temperature=1.0)",
        after="self.models.policy_tokens(micro)",
        why="the likelihood of demonstrations depends on how completions are drawn",
        tests=ONLINE,
    ),
    Mutant(
        name="adaptive-kl-falls-in-the-warm-up",
        file="rlhf/training/kl_control.py",
        before="if controller.adapts and not is_warming_up(run, step):",
        after="if controller.adapts:",
        why="the KL of a policy that may not move is 0: the coefficient falls at every step of the warm-up",
        tests=ONLINE,
    ),
    Mutant(
        name="nan-kl-in-the-coefficient",
        file="rlhf/algorithms/kl.py",
        before="        if math.isnan(kl):\n            return coef\n",
        after="",
        why="one NaN and every later reward is NaN",
        tests=("tests/algo/test_kl.py",),
    ),
    Mutant(
        name="ratio-without-an-end",
        file="rlhf/algo/policy_loss.py",
        before=".clamp(max=LARGEST_LOG_RATIO).exp()",
        after=".exp()",
        why="RLOO's sequence ratio overflows, and infinity times 0 is NaN",
        tests=("tests/algo/test_policy_loss.py",),
    ),
    Mutant(
        name="truncated-rows-in-the-denominator",
        file="rlhf/objective.py",
        before="return batch.completion_mask & batch.finished[:, None]",
        after="return batch.completion_mask",
        why="the critic learns from completions that were cut off, though they are to be left out",
        tests=OBJECTIVE,
    ),
    Mutant(
        name="weighed-k3-without-the-gradient-of-its-weight",
        file="rlhf/objective.py",
        before='penalty * (ratio if self.algorithm.kl.estimator == "k3" else ratio.detach())',
        after="penalty * ratio.detach()",
        why="k3's gradient is that of the reverse KL, weighed or not",
        tests=("tests/exact/test_exact_gradients.py",),
    ),
    Mutant(
        name="the-end-of-a-long-text-goes",
        file="reward_model/source.py",
        before="completion = completion[-(context - 1) :]",
        after="completion = completion[: context - 1]",
        why="the score is read at a token in the middle of the completion",
        tests=("tests/reward_model/test_rm_source.py",),
    ),
    Mutant(
        name="own-old-log-probs-have-a-gradient",
        file="rlhf/training/losses.py",
        before="replace(micro, logprobs=logprobs.detach())",
        after="replace(micro, logprobs=logprobs)",
        why="the ratio is 1 with a gradient of zero: nothing is learned in bfloat16",
        tests=UPDATE_LOGPROBS,
    ),
    Mutant(
        name="own-old-log-probs-in-every-step",
        file="rlhf/config/sections.py",
        before="self.batch.epochs == self.batch.minibatches == 1",
        after="self.batch.epochs == 1",
        why="from the second minibatch on the ratio is 1 by construction: no clip holds the policy",
        tests=UPDATE_LOGPROBS,
    ),
    Mutant(
        name="own-old-log-probs-though-rewards-read-them",
        file="rlhf/algorithms/online.py",
        before='in_reward = self.kl.placement == "reward" and self.kl.weighs',
        after="in_reward = False",
        why="the KL penalty in the reward is of the sampler's rounded log-probabilities",
        tests=UPDATE_LOGPROBS,
    ),
]
