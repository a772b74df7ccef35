"""Token-classification models that grade the steps of a solution, as TRL's PRMTrainer makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForTokenClassification

from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import ModelError
from rlhf.rewards.process import ModelProcess


class StepModel:
    """Gives each step the probability of a class at the last token of the separator behind it."""

    def __init__(self, model: Any, tokenizer: Any, *, label: int, separator: str) -> None:
        """Grade by `model`, whose ids are those of `tokenizer`.

        Raises:
            ModelError: the model has no such class, or the separator no token.
        """
        classes = int(model.config.num_labels)
        if label >= classes:
            raise ModelError(f"reward.process.label is {label}, and the model has {classes} classes, from 0")
        self.model, self.tokenizer, self.label = model, tokenizer, label
        self.separator = self._encode(separator)
        if not self.separator:
            raise ModelError("reward.process.model_separator has no token of the model's tokenizer")

    @torch.no_grad()
    def __call__(self, prompt: str, steps: list[str], row: Mapping[str, Any]) -> Sequence[float]:
        """Return the probability of the class for each step."""
        start = self.tokenizer.bos_token_id
        ids = [*([] if start is None else [start]), *self._encode(prompt)]
        places = []
        for step in steps:
            ids += [*self._encode(step), *self.separator]
            places.append(len(ids) - 1)
        logits = self.model(input_ids=torch.tensor([ids], device=self.model.device)).logits[0, places]
        probabilities: list[float] = logits.float().softmax(dim=1)[:, self.label].tolist()
        return probabilities

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def load_step_model(config: ModelProcess, *, device: torch.device) -> StepModel:
    """Load a token-classification model and its tokenizer.

    Raises:
        ModelError: there is none, or it has not the class that is asked for.
    """
    try:
        model = AutoModelForTokenClassification.from_pretrained(config.path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{config.path}: no token-classification model could be loaded: {error}") from error
    model = model.to(device).eval()
    return StepModel(model, load_tokenizer(config.path), label=config.label, separator=config.model_separator)
