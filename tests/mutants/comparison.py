"""Bugs seeded in the comparison: budgets, best-of-n, intervals, gaming, what continues."""

from __future__ import annotations

from mutant import Mutant

COMPARISON = [
    Mutant(
        name="best-of-n-with-replacement",
        file="rlhf/evaluation/best_of_n.py",
        before="math.comb(i - 1, n - 1) / math.comb(total, n) for i",
        after="(i**n - (i - 1) ** n) / total**n for i",
        why="the naive estimator: biased downwards, most where n is near N",
        tests=("tests/evaluation/test_best_of_n.py",),
    ),
    Mutant(
        name="best-of-n-ties-go-to-the-last",
        file="rlhf/evaluation/best_of_n.py",
        before="(golds * _shared(weights.expand_as(ordered), ordered))",
        after="(golds * weights)",
        why="among equal proxies the order of the samples decides",
        tests=("tests/evaluation/test_best_of_n.py",),
    ),
    Mutant(
        name="best-of-n-kl-is-log-n",
        file="rlhf/evaluation/best_of_n.py",
        before="return math.log(n) - (n - 1) / n",
        after="return math.log(n)",
        why="best-of-n is drawn up to a nat too far right of the frontier",
        tests=("tests/evaluation/test_best_of_n.py",),
    ),
    Mutant(
        name="picks-from-all-samples",
        file="rlhf/evaluation/best_of_n.py",
        before="proxy[:, :n].argmax(dim=1)",
        after="proxy.argmax(dim=1)",
        why="the best of N is shown as the best of n",
        tests=("tests/evaluation/test_best_of_n.py",),
    ),
    Mutant(
        name="seeds-counted-as-prompts",
        file="rlhf/evaluation/win_rate.py",
        before="by_seed = _counts(rows, seeds) @ wide / seeds",
        after="by_seed = wide.mean(dim=0).expand(RESAMPLES, prompts)",
        why="intervals leave out what a seed changes: two runs of one algorithm look significantly different",
        tests=("tests/evaluation/test_best_of_n.py",),
    ),
    Mutant(
        name="gaming-without-the-proxy",
        file="rlhf/evaluation/frontier.py",
        before="proxy[i] > proxy[best] and gold[i]",
        after="gold[i]",
        why="any fall of the gold is called gaming",
        tests=("tests/evaluation/test_best_of_n.py",),
    ),
    Mutant(
        name="pairs-count-once",
        file="rlhf/compare/costs.py",
        before='return rows if loss.type in ("sft", "kto") else 2 * rows',
        after="return rows",
        why="an offline arm reads twice the completions of the budget",
        tests=("tests/compare/test_plan.py",),
    ),
    Mutant(
        name="flops-of-one-pass",
        file="rlhf/compare/costs.py",
        before="update = passes * (FORWARD + BACKWARD)",
        after="update = (FORWARD + BACKWARD)",
        why="an arm of several epochs looks as cheap as one of one",
        tests=("tests/compare/test_compare_run.py::test_flops_by_hand",),
    ),
    Mutant(
        name="a-spent-run-goes-on",
        file="rlhf/runtime/session.py",
        before="or (self.budget is not None and self.budget.spent)",
        after="",
        why="the budget is recorded and not kept",
        tests=("tests/runtime/test_session.py",),
    ),
    Mutant(
        name="arms-set-their-own-length",
        file="rlhf/compare/plan.py",
        before='_refuse(arm, tuple(FIXED), f"arms.{name}")',
        after="pass",
        why="an arm trains from another model, on another reward, or longer, and is compared all the same",
        tests=("tests/compare/test_plan.py",),
    ),
]
