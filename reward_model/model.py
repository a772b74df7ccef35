"""Score rows with a scalar-head model: both sides of pairs in one forward pass, or many rows without gradient.

The loss is Bradley-Terry with margin and centering. A calibration gives scores mean 0 and standard deviation 1 on
reference completions, so that training runs compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from rlhf.algo.masked import Mean
from rlhf.batching import to_device
from rlhf.config.reward import CalibrationConfig, RewardModelLoss
from rlhf.data.datasets import RowSet
from rlhf.errors import RewardError
from rlhf.models.backbone import autocast, evaluation_mode
from rlhf.models.scalar_head import ScalarHeadModel, sequence_scores
from rlhf.types import PreferencePairs

SequenceScorer = Callable[..., Tensor]
"""`sequence_scores`, a score for each row; or `sequence_member_scores`, one for each row and member of an ensemble."""
CHUNK = 256  # pairs padded into one rectangle at a time; bounds the memory for padding, not for the model


def pair_scores(
    model: ScalarHeadModel, pairs: PreferencePairs, *, scorer: SequenceScorer = sequence_scores
) -> tuple[Float[Tensor, "B ..."], Float[Tensor, "B ..."]]:
    """Score both sides of each pair, at their last live token, in one forward pass over 2B rows."""
    width = max(pairs.chosen_ids.shape[1], pairs.rejected_ids.shape[1])
    scores = score(
        model,
        torch.cat([pairs.prompt_ids, pairs.prompt_ids]),
        torch.cat([pairs.prompt_mask, pairs.prompt_mask]),
        torch.cat([_widen(pairs.chosen_ids, width), _widen(pairs.rejected_ids, width)]),
        torch.cat([_widen(pairs.chosen_mask, width), _widen(pairs.rejected_mask, width)]),
        scorer=scorer,
    )
    chosen, rejected = scores.chunk(2)
    return chosen, rejected


def score(
    model: ScalarHeadModel,
    prompt_ids: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
    *,
    scorer: SequenceScorer = sequence_scores,
) -> Float[Tensor, "B ..."]:
    """Score each row, with gradient, on the model's device; columns in which no row is live are not computed."""
    prompt, completion = (
        drop_padding_columns(prompt_ids, prompt_mask),
        drop_padding_columns(completion_ids, completion_mask),
    )
    return scorer(model, *to_device([*prompt, *completion], model.head.weight.device))


@torch.no_grad()
def score_rows(
    model: ScalarHeadModel,
    prompt_ids: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
    *,
    micro_batch_size: int,
    dtype: str,
    scorer: SequenceScorer = sequence_scores,
) -> Float[Tensor, "B ..."]:
    """Score many rows without gradient and return the scores in their order, on the CPU.

    Rows of similar length share a forward pass, so that little of it is padding. The model is restored to its mode
    (train or eval) afterwards.
    """
    device = model.head.weight.device
    lengths = prompt_mask.sum(dim=1) + completion_mask.sum(dim=1)
    order = torch.argsort(lengths, descending=True, stable=True)
    parts: list[Tensor] = []
    rows = (prompt_ids, prompt_mask, completion_ids, completion_mask)
    with evaluation_mode(model), autocast(dtype, device):
        for part in torch.split(order, micro_batch_size):
            parts.append(score(model, *(tensor[part] for tensor in rows), scorer=scorer))
    in_order = torch.cat(parts).cpu()
    return torch.empty_like(in_order).index_copy_(0, order, in_order)


def score_pairs(
    model: ScalarHeadModel,
    pairs: RowSet[PreferencePairs],
    indices: Sequence[int],
    *,
    micro_batch_size: int,
    dtype: str,
    scorer: SequenceScorer = sequence_scores,
) -> tuple[Float[Tensor, "B ..."], Float[Tensor, "B ..."]]:
    """Score both sides of the pairs at `indices` without gradient and return the scores on the CPU."""
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for start in range(0, len(indices), CHUNK):
        part = pairs.collate(list(indices[start : start + CHUNK]))
        prompt = part.prompt_ids, part.prompt_mask
        for scores, completion in zip(
            sides, ((part.chosen_ids, part.chosen_mask), (part.rejected_ids, part.rejected_mask)), strict=True
        ):
            scores.append(
                score_rows(model, *prompt, *completion, micro_batch_size=micro_batch_size, dtype=dtype, scorer=scorer)
            )
    return torch.cat(sides[0]), torch.cat(sides[1])


def drop_padding_columns(
    ids: Int[Tensor, "B L"], mask: Bool[Tensor, "B L"]
) -> tuple[Int[Tensor, "B K"], Bool[Tensor, "B K"]]:
    """Remove the columns in which no row is live; positions count live tokens only, so nothing else changes."""
    live = mask.any(dim=0)
    return ids[:, live], mask[:, live]


def _widen(tensor: Tensor, width: int) -> Tensor:
    return pad(tensor, (0, width - tensor.shape[1]))


DEGENERATE = 1e-6  # least std relative to max(1, |mean|): below it the scores are one number up to rounding


def calibrate(
    model: ScalarHeadModel,
    pairs: RowSet[PreferencePairs],
    config: CalibrationConfig,
    *,
    micro_batch_size: int,
    dtype: str,
) -> tuple[float, float]:
    """Store in the model the mean and (population) std of its raw scores on completions of `pairs`.

        score = (raw - mean) / std

    The reference completions are spread evenly over `pairs`, at most `config.limit` of them. With data "none" the
    model keeps its present calibration: (0, 1) after a training.

    Returns:
        The (mean, std) stored in the model.

    Raises:
        RewardError: the scores are not finite, or are all the same.
    """
    if config.data == "none":
        return model.calibration
    model.reset_calibration()
    picked = spread_indices(pairs, config)
    chosen, rejected = score_pairs(model, pairs, picked, micro_batch_size=micro_batch_size, dtype=dtype)
    mean, std = reference_statistics(chosen, rejected, config)
    model.calibrate(mean, std)
    return mean, std


def spread_indices(pairs: RowSet[PreferencePairs], config: CalibrationConfig) -> list[int]:
    """Return the pairs to calibrate on, spread evenly; both of their sides count towards `config.limit`, or one."""
    sides = 2 if config.data == "both" else 1
    return _spread(len(pairs), math.ceil(config.limit / sides))


def reference_statistics(
    chosen: Float[Tensor, " B"], rejected: Float[Tensor, " B"], config: CalibrationConfig
) -> tuple[float, float]:
    """Compute the mean and (population) std of raw scores on the reference completions.

    Raises:
        RewardError: the scores are not finite, or are all the same.
    """
    both = torch.stack([chosen, rejected], dim=1).flatten()
    raw = (both if config.data == "both" else chosen)[: config.limit].double()
    mean, std = raw.mean().item(), raw.std(correction=0).item()
    if not (math.isfinite(mean) and math.isfinite(std)) or std <= DEGENERATE * max(1.0, abs(mean)):
        raise RewardError(
            f"the reward model cannot be calibrated: its scores on {len(raw)} reference completions have mean "
            f"{mean:.4g} and standard deviation {std:.4g}; it has learned nothing, or training diverged "
            "(look at loss/rm, lower model.lr), or calibration.limit leaves too few completions"
        )
    return mean, std


def _spread(n: int, limit: int) -> list[int]:
    """Return at most `limit` of the numbers below n, evenly spaced."""
    count = min(n, limit)
    return [i * n // count for i in range(count)]


def bradley_terry(
    chosen_scores: Float[Tensor, " B"],
    rejected_scores: Float[Tensor, " B"],
    margins: Float[Tensor, " B"],
    *,
    centering: float,
) -> Float[Tensor, " B"]:
    """Compute the negative log-likelihood of each preference, plus a pull of the two scores towards a zero sum.

        L = -log σ(r_c - r_r - m) + c · (r_c + r_r)²

    The first term is Bradley & Terry's (1952) as in Stiennon et al. (2020) and Ouyang et al. (2022, eq. 1);
    the margin m is from Touvron et al. (2023, eq. 2). Preferences determine scores only up to a constant: the second
    term, with c = `centering` (0.01 is usual), removes that freedom (Eisenstein et al. 2023). Losses are not averaged
    over the pairs of a prompt: every pair counts once.
    """
    return -logsigmoid(chosen_scores - rejected_scores - margins) + centering * (chosen_scores + rejected_scores) ** 2


def win_indicator(gaps: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return 1 if the chosen side scores higher (gap > 0), ½ at a tie, else 0, so a constant score wins half."""
    return torch.heaviside(gaps, torch.full_like(gaps, 0.5))


class BradleyTerryLoss:
    """The Bradley-Terry loss over pairs: one term, `rm`, its sum divided by the number of pairs in the minibatch.

    `weigh` gives each pair a weight in the loss, but not in its metrics; None: 1 each.
    """

    def __init__(
        self,
        model: ScalarHeadModel,
        config: RewardModelLoss,
        *,
        dtype: str,
        weigh: Callable[[PreferencePairs], Float[Tensor, " B"]] | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.dtype = dtype
        self.weigh = weigh
        self.row_values: dict[str, Tensor] = {}  # of each pair of the latest call of `terms`

    def denominators(self, batch: PreferencePairs) -> dict[str, float]:
        """Return the number of pairs, by which the loss is divided."""
        return {"rm": float(len(batch))}

    def terms(self, micro: PreferencePairs) -> tuple[dict[str, Tensor], dict[str, Mean]]:
        """Compute the loss summed over the pairs of `micro`, and the metrics loss, accuracy, margin and mean score."""
        device = self.model.head.weight.device
        with autocast(self.dtype, device):
            chosen, rejected = pair_scores(self.model, micro)
        (margins,) = (
            to_device([micro.margins.to(chosen.dtype)], device)
            if self.config.use_margin
            else (torch.zeros_like(chosen),)
        )
        losses = bradley_terry(chosen, rejected, margins, centering=self.config.centering)
        gaps = (chosen - rejected).detach()
        self.row_values = {"loss": losses.detach(), "accuracy": win_indicator(gaps)}
        metrics = {
            "loss/rm": Mean.of(losses),
            "rm/accuracy": Mean.of(win_indicator(gaps)),
            "rm/margin": Mean.of(gaps),
            "rm/score_mean": Mean.of(chosen) + Mean.of(rejected),
        }
        weighted = losses if self.weigh is None else losses * self.weigh(micro).to(losses)
        return {"rm": weighted.sum()}, metrics
