"""Several scalar heads on one backbone: an ensemble of reward models in one forward pass.

It is stored as a sequence-classification folder with one label per member, which transformers loads as it is;
`ensemble_size` in its config.json tells it from a classifier with several classes.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.models.kernels.attention import PackedBatch
from rlhf.models.kernels.llama.forward import predictor_states
from rlhf.models.logprobs import Sequences
from rlhf.models.scalar_head import ScalarHeadModel, ensemble_size, initialize_head, load_scalar_head
from rlhf.runtime.seeding import derive_seed

ENSEMBLE_SIZE = "ensemble_size"


class EnsembleHeadModel(ScalarHeadModel):
    """Scores of K members, each (head_k(hidden) - mean_k) / std_k; as a single model it gives their mean."""

    @property
    def size(self) -> int:
        """Return the number of members."""
        return self.head.out_features

    @property
    def calibration(self) -> tuple[float, float]:
        """Return the mean and std of raw scores, averaged over members; approximate for what it is used for, gaps."""
        means, stds = self.member_calibration
        return float(means.mean()), float(stds.mean())

    @property
    def member_calibration(self) -> tuple[Float[Tensor, " K"], Float[Tensor, " K"]]:
        """Return each member's mean and std of raw scores; 0 and 1 before calibration."""
        config = self.classifier.config
        means = getattr(config, "score_mean", None) or [0.0] * self.size
        stds = getattr(config, "score_std", None) or [1.0] * self.size
        return torch.tensor(means, dtype=torch.float64), torch.tensor(stds, dtype=torch.float64)

    def calibrate_members(self, means: list[float], stds: list[float]) -> None:
        """Set each member's mean and standard deviation of raw scores, which are saved with the weights."""
        assert len(means) == len(stds) == self.size
        self.classifier.config.score_mean, self.classifier.config.score_std = means, stds

    def member_scores(self, hidden: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape K"]:
        """Compute the calibrated scores of every member, in float32 at least."""
        head = self.head
        dtype = head.weight.dtype
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            raw: Tensor = head(hidden.to(dtype))  # called as a module: ZeRO-3 gathers its weight only then
        means, stds = self.member_calibration
        return (raw - means.to(raw)) / stds.to(raw)

    def score_hidden(self, hidden: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape"]:
        """Compute the mean of the members' calibrated scores."""
        return self.member_scores(hidden).mean(dim=-1)

    def forward(  # with members, a score for each of them
        self, sequences: Sequences | PackedBatch, chosen: Int[Tensor, " M"] | None = None, *, members: bool = False
    ) -> Tensor:
        """Compute scores at every position or, for rows without padding, at the chosen tokens.

        With `members`, one score per member in a last dimension K, and of padded rows only at the last live token.
        """
        if not members:
            return super().forward(sequences, chosen)
        body = self.classifier.base_model
        if isinstance(sequences, Sequences):
            hidden = body(**sequences.inputs()).last_hidden_state
            mask = sequences.attention_mask.bool()
            positions = torch.arange(mask.shape[1], device=mask.device)
            last = torch.where(mask, positions, -1).amax(dim=1).clamp(min=0)
            return self.member_scores(hidden[torch.arange(len(last), device=last.device), last])
        assert chosen is not None
        return self.member_scores(predictor_states(body, sequences, chosen))


def sequence_member_scores(
    model: EnsembleHeadModel,
    prompt_ids: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B K"]:
    """Compute every member's score at the last live token of prompt + completion, in one forward pass."""
    rows = model.rows(prompt_ids, prompt_mask, completion_ids, completion_mask)
    if rows is not None:
        scores: Tensor = model(rows, rows.last, members=True)
    else:
        scores = model(Sequences.join(prompt_ids, prompt_mask, completion_ids, completion_mask), members=True)
    return scores


def load_reward_heads(path: str, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> ScalarHeadModel:
    """Load a reward model, or an ensemble on one backbone as an EnsembleHeadModel; see load_scalar_head."""
    model = load_scalar_head(path, tokenizer, new_head=None, **settings)
    return EnsembleHeadModel(model.classifier) if ensemble_size(model.classifier.config) > 1 else model


def as_ensemble(model: ScalarHeadModel, *, size: int, seed: int, same_head: bool) -> EnsembleHeadModel:
    """Put `size` new heads on the backbone of a model, each initialized as load_scalar_head does a new one.

    Args:
        model: the model whose backbone is used; its head is dropped.
        size: the number of members.
        seed: the seed of the first head, and of all with `same_head`; the others are derived from it.
        same_head: whether all heads start from the same weights.
    """
    classifier, old = model.classifier, model.head
    head = nn.Linear(old.in_features, size, bias=old.bias is not None).to(old.weight)
    for member in range(size):
        row = nn.Linear(old.in_features, 1, bias=False).to(old.weight)
        initialize_head(row, "normal", seed if same_head or member == 0 else derive_seed(seed, "member", member))
        with torch.no_grad():
            head.weight[member] = row.weight[0]
    if head.bias is not None:
        nn.init.zeros_(head.bias)
    classifier.score = head
    classifier.config.num_labels = size
    setattr(classifier.config, ENSEMBLE_SIZE, size)
    ensemble = EnsembleHeadModel(classifier)
    ensemble.packing = model.packing
    return ensemble


def single_head(model: ScalarHeadModel) -> ScalarHeadModel:
    """Replace an ensemble's heads by one that gives the mean of their calibrated scores; a single one stays as it is.

        mean_k (w_k·h + b_k - m_k) / s_k  =  (mean_k w_k/s_k)·h - mean_k (m_k - b_k)/s_k

    A critic that starts from an ensemble has this one head to train. The model is changed in place.
    """
    if not isinstance(model, EnsembleHeadModel):
        return model
    means, stds = model.member_calibration
    old, classifier = model.head, model.classifier
    head = nn.Linear(old.in_features, 1, bias=False).to(old.weight)
    biases = torch.zeros(model.size, dtype=torch.float64) if old.bias is None else old.bias.detach().double().cpu()
    with torch.no_grad():
        head.weight.copy_((old.weight.double().cpu() / stds[:, None]).mean(dim=0, keepdim=True))
    folded = _with_head(classifier, head)
    folded.calibrate(float(((means - biases) / stds).mean()), 1.0)
    folded.packing = model.packing
    return folded


def _with_head(classifier: PreTrainedModel, head: nn.Linear) -> ScalarHeadModel:
    """Replace the heads of a classifier by one."""
    classifier.score = head
    classifier.config.num_labels = 1
    if hasattr(classifier.config, ENSEMBLE_SIZE):
        delattr(classifier.config, ENSEMBLE_SIZE)
    return ScalarHeadModel(classifier)
