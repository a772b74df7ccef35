"""Bugs seeded where prompts that fail are sampled with hints, weighted and replayed."""

from __future__ import annotations

from mutant import Mutant

ALGO = "rlhf/algo/selection.py"
COLLECT = "rlhf/training/collect.py"
REPLAY = "rlhf/training/prompt_queue.py"
WEIGHTS = ("tests/algo/test_rescue_weights.py",)
MACHINERY = ("tests/training/test_rescue.py",)

RESCUING = [
    Mutant(
        name="rescue-threshold-counts-as-solved",
        file=ALGO,
        before="(scores.view(-1, group_size) <= solved_above)",
        after="(scores.view(-1, group_size) < solved_above)",
        why="a score of exactly the threshold, the failure of a 0/1 reward, counts as a success: nothing is rescued",
        tests=WEIGHTS,
    ),
    Mutant(
        name="rescue-needs-all-to-succeed",
        file=ALGO,
        before="<= solved_above).all(dim=1)",
        after="<= solved_above).any(dim=1)",
        why="groups with a success are sampled again",
        tests=WEIGHTS,
    ),
    Mutant(
        name="sequence-weight-upside-down",
        file=ALGO,
        before="total = widen(torch.where(mask, logprobs - sampler_logprobs, 0.0))",
        after="total = widen(torch.where(mask, sampler_logprobs - logprobs, 0.0))",
        why="what only the hint made likely counts the most",
        tests=WEIGHTS,
    ),
    Mutant(
        name="shaped-weight-without-its-ratio",
        file=ALGO,
        before="gamma * ratio / (ratio + gamma) ** 2",
        after="gamma / (ratio + gamma) ** 2",
        why="f' without r is the gradient by the probability, not by its logarithm: rare tokens get 1 / gamma",
        tests=WEIGHTS,
    ),
    Mutant(
        name="all-rows-weighted",
        file="rlhf/experience.py",
        before="hinted = mask & rollout.hinted[:, None]",
        after="hinted = mask",
        why="completions of the plain prompt are corrected too: for rounding, and by the shaping",
        tests=WEIGHTS,
    ),
    Mutant(
        name="effective-size-of-padding",
        file=ALGO,
        before="live = widen(weights[mask])",
        after="live = widen(weights.flatten())",
        why="padding, of weight 1, makes the effective sample size look large",
        tests=WEIGHTS,
    ),
    Mutant(
        name="hint-weights-not-applied",
        file="rlhf/experience.py",
        before="        advantages = advantages * weights\n",
        after="",
        why="completions with a hint are learned from as if the plain prompt had given them",
        tests=WEIGHTS,
    ),
    Mutant(
        name="kl-of-hinted-tokens-unweighted",
        file="rlhf/objective.py",
        before="penalty = micro.hint_weights * kl_estimate(",
        after="penalty = kl_estimate(",
        why="the KL loss is estimated from tokens that another distribution drew",
        tests=WEIGHTS,
    ),
    Mutant(
        name="hint-stays-in-the-prompt",
        file="rlhf/training/collect.py",
        before="answers = under_prompts(sample(asked), prompts)",
        after="answers = sample(asked)",
        why="the prompt with the hint is trained, which nobody asks later; the reward reads the hint, too",
        tests=MACHINERY,
    ),
    Mutant(
        name="sampler-log-probabilities-of-the-hint",
        file="rlhf/training/annotate.py",
        before="is_off_policy = run.ahead is not None or bool(collected.hinted.any())",
        after="is_off_policy = run.ahead is not None",
        why="log-probabilities with the hint could serve as those without it: every weight is 1",
        tests=("tests/training/test_rescue.py::test_log_probabilities_are_those_of_the_plain_prompt",),
    ),
    Mutant(
        name="unhelpful-hints-replace-failures",
        file=COLLECT,
        before="is_used = solved.repeat_interleave(per_group)",
        after="is_used = torch.ones_like(solved).repeat_interleave(per_group)",
        why="failures with a hint take the place of the policy's own",
        tests=MACHINERY,
    ),
    Mutant(
        name="hint-tokens-not-counted",
        file=COLLECT,
        before="tokens = sum(live_tokens(rows) for rows in unused) + rescue.hint_tokens",
        after="tokens = sum(live_tokens(rows) for rows in unused)",
        why="a rescued arm looks cheaper than it is",
        tests=MACHINERY,
    ),
    Mutant(
        name="solved-with-a-hint-is-sampled-again",
        file=COLLECT,
        before="groups = (failed & (rescued_by == 0) & has_hint)",
        after="groups = (failed & has_hint)",
        why="a stronger hint replaces what the weaker one already gave",
        tests=MACHINERY,
    ),
    Mutant(
        name="replays-never-end",
        file=REPLAY,
        before="            if tries < self.config.limit:",
        after="            if tries <= self.config.limit + 1000:",
        why="prompts that cannot be solved fill the steps for ever",
        tests=MACHINERY,
    ),
    Mutant(
        name="replays-lose-fresh-prompts",
        file=REPLAY,
        before="        return self.state.fresh + self.prompts_per_step - len(self._replays())",
        after="        return self.state.fresh + self.prompts_per_step",
        why="prompts that replays displace are never seen in this epoch",
        tests=MACHINERY,
    ),
    Mutant(
        name="queue-not-saved",
        file="rlhf/training/checkpoints.py",
        before='extra["queue"] = self.queue.saved()',
        after='extra["queue"] = None',
        why="a resumed run has other prompts than the uninterrupted one",
        tests=("tests/training/test_rescue.py::test_a_resumed_run_replays_what_the_uninterrupted_one_does",),
    ),
]
