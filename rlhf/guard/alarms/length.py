"""Alarms on the length and the end of completions."""

from __future__ import annotations

from rlhf.guard.alarms.alarm import Below, Grown, Shrunk


class LengthGrows(Grown):
    """Completions are more than twice as long as at the start."""

    name = "length-grows"
    metrics = ("completion/length",)
    factor = 2.0
    patience = 5
    causes = "the reward favors length, or unfinished completions are not penalized"
    cure = "reward.shaping.missing_eos_penalty=1, reward.shaping.overlong_buffer, a length-controlled reward"
    source = "Singhal et al. 2023 (A Long Way to Go); Yu et al. 2025 (DAPO), sec. 3.4"


class LengthShrinks(Shrunk):
    """Completions are shorter than 40 % of their initial length."""

    name = "length-shrinks"
    metrics = ("completion/length",)
    share = 0.4
    patience = 5
    causes = "stopping early is the safest way to score, or the KL penalty charges every token"
    cure = "read samples.jsonl; score short answers lower; lower algorithm.kl.coef"
    source = "docs/troubleshooting.md"


class CutOff(Below):
    """Less than 10 % of the completions end by themselves: sampling.max_new_tokens cuts the others."""

    name = "cut-off"
    metrics = ("completion/finished",)
    limit = 0.1
    patience = 3
    causes = "the limit is too low, or the start model has not learned to emit EOS"
    cure = "raise sampling.max_new_tokens; SFT on whole rows; reward.shaping.missing_eos_penalty=1"
    source = "Huang et al. 2024 (N+), the EOS trick"


class FewerFinish(Shrunk):
    """Less than half as many completions end with EOS as at the start."""

    name = "fewer-finish"
    metrics = ("completion/finished",)
    share = 0.5
    patience = 5
    causes = "length is rewarded, or unfinished completions are not penalized"
    cure = "reward.shaping.missing_eos_penalty=1, reward.shaping.overlong_buffer"
    source = "Huang et al. 2024 (N+), the EOS trick"
