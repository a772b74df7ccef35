"""Bugs seeded where a choice of the samples is learned from: online DPO, rejection sampling, presets with sizes."""

from __future__ import annotations

from mutant import Mutant

SELECTION = "rlhf/algo/selection.py"
OF_SELECTION = ("tests/algo/test_selection.py",)
SAME_STEP = ("tests/equivalence/test_same_offline_loss.py",)

CHOOSING = [
    Mutant(
        name="online-pairs-keep-ties",
        file=SELECTION,
        before="differs = (gap > 0) & (gap >= min_gap)",
        after="differs = (gap >= 0) & (gap >= min_gap)",
        why="a tie makes a pair of a completion with itself: no gradient, but it is in the norm and in every mean",
        tests=OF_SELECTION,
    ),
    Mutant(
        name="online-pairs-turned-around",
        file=SELECTION,
        before='for side, rows in (("chosen", chosen), ("rejected", rejected)):',
        after='for side, rows in (("rejected", chosen), ("chosen", rejected)):',
        why="the worst completion is chosen: the policy climbs down, as fast as it should climb up",
        tests=OF_SELECTION,
    ),
    Mutant(
        name="online-pairs-against-the-old-policy",
        file=SELECTION,
        before="rows.ref_logprobs.double().sum(dim=1)",
        after="rows.logprobs.double().sum(dim=1)",
        why="the pull is to the policy of the step before, so nothing holds it near the reference",
        tests=OF_SELECTION,
    ),
    Mutant(
        name="online-pairs-across-prompts",
        file=SELECTION,
        before="return (first + best.flatten())[differs], (first + worst.flatten())[differs]",
        after="return (first + best.flatten())[differs], (first + worst.flatten())[differs].flip(0)",
        why="a pair has its sides from two prompts, and the rejected one is read under the wrong prompt",
        tests=OF_SELECTION,
    ),
    Mutant(
        name="pair-ratio-to-the-other-side",
        file="rlhf/training/losses.py",
        before="torch.cat([micro.chosen_old_logprobs, micro.rejected_old_logprobs])",
        after="torch.cat([micro.rejected_old_logprobs, micro.chosen_old_logprobs])",
        why="kl/old and the first ratio compare two different texts: target_kl stops every step",
        tests=SAME_STEP,
    ),
    Mutant(
        name="rejection-keeps-the-worst",
        file=SELECTION,
        before="groups.argsort(dim=1, descending=True, stable=True)",
        after="groups.argsort(dim=1, descending=False, stable=True)",
        why="the policy imitates what scored lowest",
        tests=OF_SELECTION,
    ),
    Mutant(
        name="rejection-threshold-forgotten",
        file=SELECTION,
        before="chosen if min_score is None else chosen & (groups >= min_score)",
        after="chosen if min_score is None else chosen | (groups >= min_score)",
        why="the threshold adds completions where it should take them away",
        tests=OF_SELECTION,
    ),
    Mutant(
        name="narrow-pairs-kept",
        file=SELECTION,
        before="differs = (gap > 0) & (gap >= min_gap)",
        after="differs = gap > 0",
        why="pairs that differ by noise are learned from, whatever min_gap says",
        tests=OF_SELECTION,
    ),
    Mutant(
        name="rejection-learns-from-all",
        file="rlhf/algorithms/rejection_sampling.py",
        before="    chooses_rows: ClassVar[bool] = True\n",
        after="    chooses_rows: ClassVar[bool] = False\n",
        why="the loss is divided by the tokens of the rejected completions too: a step n times too small",
        tests=SAME_STEP,
    ),
    Mutant(
        name="rejected-completions-cost-a-pass",
        file="rlhf/training/update_record.py",
        before="tokens += count_tokens(minibatch)",
        after="tokens += count_tokens(experience)",
        why="an arm is billed for passes over completions that it threw away: unequal budgets",
        tests=SAME_STEP,
    ),
    Mutant(
        name="preset-sizes-below-another-presets-file",
        file="rlhf/config/files.py",
        before="return merge(merge(drop_overruled(base, over), _sizes_of_new_preset(base, over)), over)",
        after="return merge(merge(_sizes_of_new_preset(base, over), drop_overruled(base, over)), over)",
        why="an arm named over a PPO base keeps PPO's epochs: refused, or stale where nothing refuses it",
        tests=("tests/config/test_load.py",),
    ),
]
