"""Bugs of the measurement: KL over the vocabulary, repetition, win rates at equal length, judges of pairs."""

from __future__ import annotations

from mutant import Mutant

KL = ("tests/exact/test_exact_kl.py",)
LENGTH = ("tests/evaluation/test_length_control.py",)
PAIRS = ("tests/evaluation/test_pairwise.py",)
CHAT = ("tests/rewards/test_judge.py",)
EVALUATE = ("tests/evaluation/test_evaluate.py",)

MEASUREMENT = [
    Mutant(
        name="exact-kl-reversed",
        file="rlhf/algo/kl.py",
        before="pi = log_pi.exp()",
        after="pi = log_ref.exp()",
        why="the mean of the log-ratio under the reference: no KL at all, and never positive",
        tests=KL,
    ),
    Mutant(
        name="exact-kl-reference-at-another-temperature",
        file="rlhf/models/policy_models.py",
        before="(at_least_float32(raw) / self.temperature).log_softmax(dim=-1) for raw in (logits, ref_logits)",
        after="(at_least_float32(raw) / t).log_softmax(dim=-1) "
        "for raw, t in ((logits, self.temperature), (ref_logits, 1.0))",
        why="a KL to a policy that nobody sampled from: not zero before training",
        tests=EVALUATE,
    ),
    Mutant(
        name="exact-kl-nan-where-never-chosen",
        file="rlhf/algo/kl.py",
        before="torch.where(pi > 0, pi * (log_pi - log_ref), 0.0).sum(dim=-1)",
        after="(pi * (log_pi - log_ref)).sum(dim=-1)",
        why="one forbidden token makes the KL NaN",
        tests=KL,
    ),
    Mutant(
        name="exact-kl-a-token-late",
        file="rlhf/models/policy_models.py",
        before="ref_states = predictor_hidden_states(self.reference, batch, self.packing)",
        after="ref_states = predictor_hidden_states(self.reference, batch, self.packing).roll(1, dims=0)",
        why="the reference's distribution is that of another position",
        tests=EVALUATE,
    ),
    Mutant(
        name="repetition-across-completions",
        file="rlhf/evaluation/evaluate.py",
        before="repeated = sum(len(row) - len(set(row)) for row in grams)",
        after="repeated = sum(map(len, grams)) - len({gram for row in grams for gram in row})",
        why="a phrase that all completions share looks like a loop in each",
        tests=EVALUATE,
    ),
    Mutant(
        name="perplexity-is-a-mean-of-perplexities",
        file="rlhf/evaluation/evaluate.py",
        before="mean = Mean.of(-logprobs, mask).value",
        after="mean = Mean.of((-logprobs * mask).sum(1) / mask.sum(1)).value",
        why="short completions count as much as long ones",
        tests=EVALUATE,
    ),
    Mutant(
        name="length-difference-centered",
        file="rlhf/evaluation/win_rate.py",
        before="torch.tanh(longer / scale) if",
        after="torch.tanh((longer - longer.mean()) / scale) if",
        why="the win rate at the mean length difference, not at none: length is not controlled",
        tests=LENGTH,
    ),
    Mutant(
        name="ties-are-losses-at-equal-length",
        file="rlhf/evaluation/win_rate.py",
        before="return (a > b).double() + 0.5 * (a == b).double()",
        after="return (a > b).double()",
        why="a model that ties with itself loses to itself",
        tests=("tests/cli/test_eval_against.py", *LENGTH),
    ),
    Mutant(
        name="length-effect-not-fitted",
        file="rlhf/evaluation/win_rate.py",
        before="design = torch.stack([torch.ones_like(features), features], dim=1)",
        after="design = torch.stack([torch.ones_like(features), 0 * features], dim=1)",
        why="the raw win rate under another name",
        tests=LENGTH,
    ),
    Mutant(
        name="seeds-share-one-row-of-lengths",
        file="rlhf/evaluation/win_rate.py",
        before="weights.index_add_(1, cell_index, by_seed[:, row, None] * by_prompt)",
        after="weights.index_add_(1, cell_index, by_prompt)",
        why="seeds are not resampled: two runs of one algorithm look significantly different",
        tests=LENGTH,
    ),
    Mutant(
        name="swap-forgotten",
        file="rlhf/evaluation/win_rate.py",
        before='_SWAPPED: dict[Verdict, Verdict] = {"A": "B", "B": "A", "tie": "tie"}',
        after='_SWAPPED: dict[Verdict, Verdict] = {"A": "A", "B": "B", "tie": "tie"}',
        why="a judge that goes by position looks consistent, a fair one does not",
        tests=PAIRS,
    ),
    Mutant(
        name="disagreement-goes-to-the-first",
        file="rlhf/evaluation/win_rate.py",
        before="straight is None or swapped is None or straight != _SWAPPED[swapped]:",
        after="straight is None or swapped is None:",
        why="the order in which the sides are first shown decides",
        tests=PAIRS,
    ),
    Mutant(
        name="asked-in-one-order-twice",
        file="rlhf/evaluation/win_rate.py",
        before="for a, b in ((text, other), (other, text))",
        after="for a, b in ((text, other), (text, other))",
        why="the swap is not a swap",
        tests=PAIRS,
    ),
    Mutant(
        name="answers-by-question-alone",
        file="rlhf/rewards/chat.py",
        before='{VERSION} {self.poster.url} ".encode() + body',
        after='{VERSION} {self.poster.url} ".encode() + body[body.index(b"messages"):body.index(b"model")]',
        why="other settings of a request get the answers of the old ones",
        tests=CHAT,
    ),
    Mutant(
        name="the-key-is-in-the-error",
        file="rlhf/rewards/http.py",
        before="text.replace(self.secret, '***') if self.secret else text",
        after="text",
        why="a server that repeats the key puts it into the log",
        tests=CHAT,
    ),
    Mutant(
        name="too-many-requests-is-final",
        file="rlhf/rewards/http.py",
        before="return code == 429 or server_error(code)",
        after="return server_error(code)",
        why="a long evaluation ends at the first rate limit",
        tests=CHAT,
    ),
]
