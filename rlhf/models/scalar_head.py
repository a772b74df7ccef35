"""A backbone with one scalar head, for critic and reward model alike, or with several: an ensemble in one forward pass.

Either is stored as a sequence-classification folder, which transformers loads as it is; an ensemble has one label per
member, and `ensemble_size` in its config.json tells it from a classifier with several classes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers import PreTrainedConfig as HfConfig

from rlhf.batching import place_live
from rlhf.config.sections import HeadInit, Packing
from rlhf.data.tokenizer import adapts_classifier, base_of_adapter, locate_model
from rlhf.errors import ModelError
from rlhf.models.backbone import (
    align_weights,
    check_vocabulary,
    damaged,
    load_causal_lm,
    load_model_config,
    merge_adapter,
    train_pad_embedding,
    weight_dtype,
)
from rlhf.models.dither import spread_trained
from rlhf.models.export import classifier_padding
from rlhf.models.folders import SCORE_SETTINGS
from rlhf.models.kernels.attention import PackedBatch
from rlhf.models.kernels.llama.forward import predictor_states
from rlhf.models.kernels.packing import pack_for
from rlhf.models.logprobs import Sequences
from rlhf.models.weight_files import is_split, load_split, local_folder
from rlhf.runtime.engine import Engine
from rlhf.runtime.seeding import derive_seed, generator


class ScalarHeadModel(nn.Module):
    """A score at every token: (head(hidden) - score_mean) / score_std; mean and std are kept in config.json."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.classifier = classifier
        self.packing: Packing = "auto"
        self.adapter: Any = None  # peft's settings of the adapters, if any are trained

    @property
    def head(self) -> nn.Linear:
        """Return the linear map from hidden state to score."""
        head = self.classifier.score
        assert isinstance(head, nn.Linear)
        return head

    @property
    def calibration(self) -> tuple[float, float]:
        """Return (mean, std) of raw scores on the reference completions; (0, 1) before calibration."""
        config = self.classifier.config
        return float(getattr(config, "score_mean", 0.0)), float(getattr(config, "score_std", 1.0))

    def calibrate(self, mean: float, std: float) -> None:
        """Set the mean and standard deviation of raw scores, which are saved with the weights."""
        self.classifier.config.score_mean, self.classifier.config.score_std = mean, std

    def reset_calibration(self) -> None:
        """Make the scores the raw ones."""
        self.calibrate(0.0, 1.0)

    def score_hidden(self, hidden: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape"]:
        """Compute the calibrated scores of hidden states, in float32 at least."""
        mean, std = self.calibration
        return (self.raw_scores(hidden).squeeze(-1) - mean) / std

    def raw_scores(self, hidden: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape K"]:
        """Compute the head's outputs for hidden states, before calibration, in float32 at least."""
        head = self.head
        with torch.autocast(device_type=hidden.device.type, enabled=False):
            raw: Tensor = head(hidden.to(head.weight.dtype))  # called as a module: only then ZeRO-3 gathers its weight
        return raw

    def forward(
        self, sequences: Sequences | PackedBatch, chosen: Int[Tensor, " M"] | None = None
    ) -> Float[Tensor, "B L"] | Float[Tensor, " M"]:
        """Compute scores at every position or, for rows without padding, at the chosen tokens."""
        body = self.classifier.base_model
        if isinstance(sequences, Sequences):
            return self.score_hidden(body(**sequences.inputs()).last_hidden_state)
        assert chosen is not None
        return self.score_hidden(predictor_states(body, sequences, chosen))

    def rows(
        self,
        prompt_ids: Int[Tensor, "B P"],
        prompt_mask: Bool[Tensor, "B P"],
        completion_ids: Int[Tensor, "B T"],
        completion_mask: Bool[Tensor, "B T"],
    ) -> PackedBatch | None:
        """Lay the batch out without padding; return None if the model or a row needs padding."""
        if self.packing == "off":
            return None
        return pack_for(self.classifier.base_model, prompt_ids, prompt_mask, completion_ids, completion_mask)

    def save(self, tokenizer: PreTrainedTokenizerBase, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        """Save an ordinary `save_pretrained` folder that AutoModelForSequenceClassification loads.

        `state` holds the classifier's whole weights if this process has only a part of them.
        """
        self.classifier.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)

    def save_settings(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Save the same as `save`, without the weights."""
        self.classifier.save_pretrained(folder, state_dict={"score.weight": torch.zeros(1)})
        (folder / "model.safetensors").unlink()
        tokenizer.save_pretrained(folder)


def completion_values(
    model: ScalarHeadModel,
    prompt_ids: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Compute the value of the state before each completion token, one position earlier; zero outside the mask."""
    rows = model.rows(prompt_ids, prompt_mask, completion_ids, completion_mask)
    if rows is not None:
        chosen: Tensor = model(rows, rows.predictor_index)  # called as a module, so that its hooks (ZeRO-3) run
        return place_live(chosen, completion_mask)
    values = model(Sequences.join(prompt_ids, prompt_mask, completion_ids, completion_mask))
    length = completion_ids.shape[1]
    return torch.where(completion_mask, values[:, -length - 1 : -1], 0.0)


def sequence_scores(
    model: ScalarHeadModel,
    prompt_ids: Int[Tensor, "B P"],
    prompt_mask: Bool[Tensor, "B P"],
    completion_ids: Int[Tensor, "B T"],
    completion_mask: Bool[Tensor, "B T"],
) -> Float[Tensor, " B"]:
    """Compute the score at the last live token of prompt + completion, with padding on either side."""
    rows = model.rows(prompt_ids, prompt_mask, completion_ids, completion_mask)
    if rows is not None:
        scores: Tensor = model(rows, rows.last)
        return scores
    sequences = Sequences.join(prompt_ids, prompt_mask, completion_ids, completion_mask)
    return last_live_value(model(sequences), sequences.attention_mask.bool())


def last_live_value(values: Float[Tensor, "B L"], mask: Bool[Tensor, "B L"]) -> Float[Tensor, " B"]:
    """Return each row's entry at its last live position."""
    return values.gather(1, _last_live(mask)[:, None]).squeeze(1)


def _last_live(mask: Bool[Tensor, "B L"]) -> Int[Tensor, " B"]:
    positions = torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask, positions, -1).amax(dim=1).clamp(min=0)


def load_scalar_head(
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    new_head: HeadInit | None,
    dtype: str = "float32",
    seed: int = 0,
    trust_remote_code: bool = False,
    engine: Engine | None = None,
    is_checkpoint: bool = False,
) -> ScalarHeadModel:
    """Load a scalar-head model from a reward model, or from a causal LM with a new head.

    Args:
        path: folder, GGUF file or hub id; an adapter's folder is merged into its base.
        tokenizer: the tokenizer of the texts to score; the model must have an embedding for each of its tokens.
        new_head: "zero"; "normal": N(0, 1 / (d + 1)), std 1/sqrt(d+1) (Stiennon et al. 2020); "orthogonal": a random
            direction of length 1; None: `path` has one.
        dtype: the dtype of the arithmetic; see backbone.autocast.
        engine: if it splits weights over the ranks, each loads its own part only; a new head is whole in all.
        is_checkpoint: load the weights as they are; else those that bfloat16 arithmetic would round back to the model
            that they were trained from are changed by less than its steps (see `spread_trained`).

    Raises:
        ModelError: the model cannot be loaded, or lacks the scalar head that is expected.
    """
    location = locate_model(path)
    if location.gguf is not None or (location.is_adapter and not adapts_classifier(Path(location.name))):
        if new_head is None:
            raise no_reward_model(path)
        causal = load_causal_lm(path, dtype=dtype, trust_remote_code=trust_remote_code)
        classifier = _on_backbone_of(causal, path)
    elif location.is_adapter:
        classifier = _load_adapter(Path(location.name), dtype=dtype, trust_remote_code=trust_remote_code)
    else:
        if new_head is None and not is_reward_model(load_model_config(path, trust_remote_code=trust_remote_code)):
            raise no_reward_model(path)
        classifier = _load_classifier(
            path, dtype=dtype, trust_remote_code=trust_remote_code, engine=engine, new_head=new_head
        )
    _check_head(classifier, path)
    check_vocabulary(classifier, tokenizer, path)
    classifier.config.pad_token_id = classifier_padding(classifier, tokenizer).number
    if dtype == "bfloat16" and not is_checkpoint:
        spread_trained(classifier, engine if is_split(classifier) else None)
    model = ScalarHeadModel(train_pad_embedding(align_weights(classifier)))
    if new_head is not None:
        initialize_head(model.head, new_head, seed)
    return model


def _load_classifier(
    path: str,
    *,
    dtype: str,
    trust_remote_code: bool,
    engine: Engine | None = None,
    new_head: HeadInit | None = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> PreTrainedModel:
    config = load_model_config(path, trust_remote_code=trust_remote_code)
    for name, value in settings.items():
        setattr(config, name, value)
    config.num_labels = ensemble_size(config) if new_head is None else 1
    try:
        if engine is not None and engine.splits_weights:
            make = partial(
                AutoModelForSequenceClassification.from_config,
                config,
                dtype=weight_dtype(dtype),
                trust_remote_code=trust_remote_code,
            )
            folder = local_folder(locate_model(path))
            split = load_split(make, folder, engine, new=["score.weight"] if new_head is not None else [])
            if split is not None:
                return split
        classifier: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
            locate_model(path).name, config=config, dtype=weight_dtype(dtype), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise cannot_load(path, config, error) from error
    return classifier


def _load_adapter(folder: Path, **how: Any) -> PreTrainedModel:
    """Load a classifier's adapter merged into its base, which may be another adapter; its head is in the folder."""
    path, settings = base_of_adapter(folder), adapter_settings(folder)
    base = locate_model(path)
    if base.gguf is None and not base.is_adapter:
        return merge_adapter(_load_classifier(path, **how, settings=settings), folder)
    is_classifier = base.is_adapter and adapts_classifier(Path(base.name))
    below = _load_adapter(Path(base.name), **how) if is_classifier else load_causal_lm(path, **how)
    return merge_adapter(_on_backbone_of(below, path, settings), folder)


def cannot_load(path: str, config: HfConfig, error: Exception) -> ModelError:
    """Build the error of a classifier that cannot be loaded; transformers lists every class that it has."""
    if not str(error).startswith("Unrecognized configuration class"):
        return ModelError(f"cannot load a scalar-head model from {path!r}: {error}{damaged(path)}")
    return ModelError(
        f"{path!r}: transformers has no sequence classifier for models of type {config.model_type}, so that it can be "
        "neither a critic nor a reward model. Take another model (critic.init, model.model), critic.shared=true, or an "
        "algorithm without a critic (algorithm.preset=grpo)"
    )


def _on_backbone_of(
    model: PreTrainedModel, path: str, settings: Mapping[str, Any] = MappingProxyType({})
) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    for name, value in settings.items():
        setattr(config, name, value)
    config.num_labels = ensemble_size(config)
    try:
        classifier: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=model.dtype)
    except ValueError as error:
        raise cannot_load(path, config, error) from error
    classifier.base_model.load_state_dict(model.base_model.state_dict(), assign=True)
    return classifier


def _check_head(classifier: PreTrainedModel, path: str) -> None:
    if not isinstance(getattr(classifier, "score", None), nn.Linear):
        raise ModelError(
            f"{path!r}: {type(classifier).__name__} keeps its head elsewhere than in `score`; not supported"
        )


def adapter_settings(folder: Path) -> dict[str, Any]:
    """Read the calibration and the number of heads that an adapter's folder has beside it; empty if it has none."""
    file = folder / "config.json"
    if not file.is_file():
        return {}
    settings = json.loads(file.read_text(encoding="utf-8"))
    return {name: settings[name] for name in SCORE_SETTINGS if name in settings}


def no_reward_model(path: str) -> ModelError:
    """Build the error of a model without a scalar head."""
    return ModelError(f"{path!r} is not a reward model (no sequence-classification head with one label)")


def has_scalar_head(path: str) -> bool:
    """Return whether the folder or hub id `path` is a reward model."""
    return is_reward_model(load_model_config(path))


def is_reward_model(config: object) -> bool:
    """Return whether the model of a configuration is a reward model."""
    architectures = getattr(config, "architectures", None) or []
    is_classifier = any("SequenceClassification" in name for name in architectures)
    return is_classifier and getattr(config, "num_labels", 0) == ensemble_size(config)


def ensemble_size(config: object) -> int:
    """Return the number of members of a reward model on one backbone (rlhf.models.scalar_head); 1 for a single."""
    return int(getattr(config, "ensemble_size", None) or 1)


def initialize_head(head: nn.Linear, how: HeadInit, seed: int) -> None:
    """Initialize a head in place, as load_scalar_head describes."""
    noise = torch.randn(head.weight.shape, generator=generator(seed, "head"), dtype=torch.float64)
    scale = {"zero": 0.0, "normal": (head.in_features + 1) ** -0.5, "orthogonal": 1.0 / float(noise.norm())}
    with torch.no_grad():
        head.weight.copy_(noise * scale[how])
        if head.bias is not None:
            head.bias.zero_()


ENSEMBLE_SIZE = "ensemble_size"


class EnsembleHeadModel(ScalarHeadModel):
    """Scores of K members, each (head_k(hidden) - mean_k) / std_k; as a single model it gives their mean."""

    @property
    def size(self) -> int:
        """Return the number of members."""
        return self.head.out_features

    @property
    def calibration(self) -> tuple[float, float]:
        """Return the mean and std of raw scores, averaged over members; approximate for their use, gaps."""
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

    def reset_calibration(self) -> None:
        """Make every member's scores the raw ones."""
        self.calibrate_members([0.0] * self.size, [1.0] * self.size)

    def member_scores(self, hidden: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape K"]:
        """Compute the calibrated scores of every member, in float32 at least."""
        raw = self.raw_scores(hidden)
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
            last = _last_live(sequences.attention_mask.bool())
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
    """Put `size` new heads on the backbone of a model, each initialized like a new head of load_scalar_head.

    Args:
        model: the model whose backbone is used; its head is dropped.
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
    ensemble.packing, ensemble.adapter = model.packing, model.adapter
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
    classifier.score = head
    classifier.config.num_labels = 1
    if hasattr(classifier.config, ENSEMBLE_SIZE):
        delattr(classifier.config, ENSEMBLE_SIZE)
    folded = ScalarHeadModel(classifier)
    folded.calibrate(float(((means - biases) / stds).mean()), 1.0)
    folded.packing = model.packing
    return folded
