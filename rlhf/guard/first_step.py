"""Say at the first step of an online run that its reward is flat, and what makes it flat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlhf.guard.alarms.history import RunFacts

FLAT = 1e-6  # a standard deviation of scores below this is none
MOSTLY = 0.9  # a share of groups, or of completions


def flat_reward_note(metrics: Mapping[str, float], facts: RunFacts) -> str | None:
    """Return why nothing can be learned from the scores of the first step, with the keys to change; None if it can.

    Args:
        metrics: the metrics of the step: score/std, group/uniform (algorithms with groups), completion/finished.
        facts: whether a chat template was left out, and whether the scores are the only signal.
    """
    spread, uniform = metrics.get("score/std"), metrics.get("group/uniform", 0.0)
    if facts.has_other_signal or spread is None or (spread > FLAT and uniform < MOSTLY):
        return None
    if spread <= FLAT:
        seen = f"every completion of the first step scored {metrics.get('score/mean', 0.0):.3g}"
    else:
        seen = f"in {uniform:.0%} of the groups of the first step all completions scored alike"
    return f"the reward is flat: {seen}, so there is nothing to learn. {' '.join(_causes(metrics, facts, spread))}"


def _causes(metrics: Mapping[str, float], facts: RunFacts, spread: float) -> Iterator[str]:
    """Yield the causes that the metrics show; if they show none, the general ones."""
    cut = 1.0 - metrics.get("completion/finished", 1.0)
    is_known = False
    if cut >= MOSTLY:
        yield f"{cut:.0%} of the completions were cut off: raise sampling.max_new_tokens."
        is_known = True
    if facts.leaves_out_template:
        yield "The model has a chat template and data.chat_template=none leaves it out: set data.chat_template=auto."
        is_known = True
    if spread > FLAT:
        yield "Raise sampling.temperature or sampling.completions_per_prompt, or give partial credit in the reward."
    elif not is_known:
        yield "The reward may ignore the completion: read samples.jsonl, and call it with two different texts."
