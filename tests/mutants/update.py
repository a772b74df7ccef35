"""Bugs of the sums over micro-batches and processes that make one update."""

from __future__ import annotations

from mutant import Mutant

UPDATE = [
    Mutant(
        name="critic-without-a-loss",
        file="rlhf/training/losses.py",
        before="return (policy,) if models.critic is None else (policy, CriticLoss(models, objective))",
        after="return (policy,)",
        why="a critic of its own never learns: advantages stay those of its first values",
        tests=("tests/training/test_losses.py",),
    ),
    Mutant(
        name="pair-ratio-to-the-other-side",
        file="rlhf/training/losses.py",
        before="torch.cat([micro.chosen_old_logprobs, micro.rejected_old_logprobs])",
        after="torch.cat([micro.rejected_old_logprobs, micro.chosen_old_logprobs])",
        why="kl/old and the first ratio compare two different texts: target_kl stops every step",
        tests=("tests/equivalence/test_same_offline_loss.py",),
    ),
    Mutant(
        name="ptx-at-the-sampling-temperature",
        file="rlhf/training/losses.py",
        before="self.models.policy_tokens(micro, temperature=1.0, compare=compare)",
        after="self.models.policy_tokens(micro, compare=compare)",
        why="the likelihood of demonstrations depends on how completions are drawn",
        tests=("tests/training/test_online.py",),
    ),
    Mutant(
        name="own-old-log-probs-have-a-gradient",
        file="rlhf/training/losses.py",
        before="replace(micro, logprobs=logprobs.detach())",
        after="replace(micro, logprobs=logprobs)",
        why="the ratio is 1 with a gradient of zero: nothing is learned in bfloat16",
        tests=("tests/training/test_old_logprobs_of_update.py",),
    ),
    Mutant(
        name="micro-batch-norms",
        file="rlhf/training/step.py",
        before="terms = divide_by_denominators(sums, denominators)",
        after="terms = divide_by_denominators(sums, part.loss.denominators(micro.rows))",
        why="each micro-batch is averaged by itself: gradient accumulation changes the step",
        tests=("tests/training/test_step.py",),
    ),
    Mutant(
        name="nan-step-taken",
        file="rlhf/training/step.py",
        before="if not (math.isfinite(total) and all(math.isfinite(norm) for norm in norms)):",
        after="if False:",
        why="one NaN and the weights are gone",
        tests=("tests/training/test_step.py",),
    ),
    Mutant(
        name="a-filler-pass-counts",
        file="rlhf/training/micro_batches.py",
        before="return passes + [MicroBatch(batch.rows(share.rows[-1:]), False)] * missing",
        after="return passes + [MicroBatch(batch.rows(share.rows[-1:]), True)] * missing",
        why="the row that a process repeats to keep step with the others is trained on twice",
        tests=("tests/runtime/test_many_ranks.py",),
    ),
    Mutant(
        name="the-loss-of-one-rank-is-the-total",
        file="rlhf/training/micro_batches.py",
        before="*(totals for _, totals in gathered)",
        after="*(totals for _, totals in gathered[:1])",
        why="ranks differ in what they think of the step: one drops it for a NaN, another takes it",
        tests=("tests/runtime/test_many_ranks.py",),
    ),
    Mutant(
        name="momentum-moves-a-policy-without-a-gradient",
        file="rlhf/training/step.py",
        before="if norm == 0.0:",
        after="if norm < 0.0:",
        why="where every group ties Adam goes on by itself: KL 8 to 42 nats in four steps",
        tests=("tests/training/test_step.py",),
    ),
    Mutant(
        name="clip-forgotten",
        file="rlhf/runtime/engine.py",
        before="torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, torch.tensor(norm))",
        after="pass",
        why="max_grad_norm has no effect",
        tests=("tests/training/test_step.py",),
    ),
]
