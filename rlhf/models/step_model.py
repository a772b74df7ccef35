"""Token-classification models that grade the steps of a solution, as TRL's PRMTrainer and `rlhf reward` make them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerBase

from rlhf.data.steps import StepEncoder
from rlhf.data.tokenizer import load_tokenizer
from rlhf.errors import DataError, ModelError, RewardError
from rlhf.models.backbone import context_length
from rlhf.models.folders import model_folder
from rlhf.models.scalar_head import ScalarHeadModel
from rlhf.references import MESSAGES, own_prompt
from rlhf.rewards.process import ModelProcess

SEPARATOR = "step_separator"  # in config.json: the text after a step in the data that the model was trained on
LABELS = {0: "wrong", 1: "right"}
LINE_BREAK = "\n"


class StepModel:
    """Gives each step the probability of a class at the last token of the separator behind it."""

    def __init__(self, model: Any, tokenizer: Any, *, label: int, separator: str) -> None:
        """Grade by `model`, whose ids are of `tokenizer`.

        Raises:
            ModelError: the model has no such class, or the separator no token.
        """
        classes = int(model.config.num_labels)
        if label >= classes:
            raise ModelError(f"reward.process.label is {label}, and the model has {classes} classes, from 0")
        try:
            self.encoder = StepEncoder(tokenizer, separator)
        except DataError as error:
            raise ModelError("reward.process.model_separator has no token of the model's tokenizer") from error
        self.model, self.label = model, label

    @torch.no_grad()
    def __call__(self, prompt: str, steps: list[str], row: Mapping[str, Any]) -> Sequence[float]:
        """Return the probability of the class for each step.

        Raises:
            RewardError: prompt and steps are longer than the model's context.
        """
        encoded = self.encoder.encode(_plain_prompt(prompt, row), steps)
        length, context = len(encoded.prompt) + len(encoded.completion), context_length(self.model)
        if context is not None and length > context:
            raise RewardError(
                f"reward.process: a prompt and its steps have {length} tokens, and the model's context is {context}: "
                "lower data.prompts.max_prompt_tokens or sampling.max_new_tokens, or take another reward.process.path"
            )
        ids = torch.tensor([encoded.prompt + encoded.completion], device=self.model.device)
        places = [len(encoded.prompt) + end for end in encoded.ends]
        logits = self.model(input_ids=ids).logits[0, places]
        probabilities: list[float] = logits.float().softmax(dim=1)[:, self.label].tolist()
        return probabilities


def _plain_prompt(prompt: str, row: Mapping[str, Any]) -> str:
    """Return the prompt without chat template, as the model's training reads it; several messages have no such text."""
    own = own_prompt(row) if MESSAGES in row else prompt
    if isinstance(own, str):
        return own
    return str(own[0]["content"]) if len(own) == 1 else prompt


def load_step_model(config: ModelProcess, *, device: torch.device) -> StepModel:
    """Load a token-classification model and its tokenizer, from a run's folder, a model's folder or the hub.

    Raises:
        ModelError: there is none, or it lacks the class that is asked for, or a head for steps.
    """
    path = model_folder(config.path)
    try:
        model, read = AutoModelForTokenClassification.from_pretrained(path, output_loading_info=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{config.path}: no token-classification model could be loaded: {error}") from error
    _check_head(model, config.path, missing=read["missing_keys"])
    separator = config.model_separator or getattr(model.config, SEPARATOR, None) or LINE_BREAK
    model = model.to(device).eval()
    return StepModel(model, load_tokenizer(path), label=config.label, separator=separator)


def _check_head(model: Any, path: str, *, missing: Iterable[str]) -> None:
    """Check that the head for tokens was read: transformers draws a missing one at random."""
    made_for = next((name for name in model.config.architectures or [] if "SequenceClassification" in name), None)
    if made_for is not None:
        fault = f"is a classifier of whole answers ({made_for}), which grades no steps"
        if model.config.num_labels == 1:
            fault += ": a reward model belongs in reward.source.path"
    elif missing:
        fault = f"is no process reward model: its weights lack {', '.join(sorted(missing))}"
    elif hasattr(model, "peft_config"):
        fault = "is an adapter, whose head transformers does not use: merge it into its base and save the whole model"
    else:
        return
    raise ModelError(
        f"reward.process.path: {path} {fault}. Name a token-classification model, as `rlhf reward` with the section "
        "process or TRL's PRMTrainer writes it"
    )


def save_step_model(
    model: ScalarHeadModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, separator: str
) -> None:
    """Save a scalar-head model as the token-classification model with the same probabilities, and its tokenizer.

    The logits of the classes wrong and right are (0, s) for the score s, so that softmax gives σ(s) for right. Weights
    are in the dtype that they have in memory.

    Raises:
        ModelError: transformers has no token classifier for this type of model.
    """
    config = copy.deepcopy(model.classifier.config)
    config.num_labels = len(LABELS)
    config.id2label, config.label2id = dict(LABELS), {name: number for number, name in LABELS.items()}
    setattr(config, SEPARATOR, separator)
    try:
        classifier = AutoModelForTokenClassification.from_config(config, dtype=model.classifier.dtype)
    except ValueError as error:
        raise ModelError(
            f"transformers has no token classifier for models of type {config.model_type}: take another model.model"
        ) from error
    head = getattr(classifier, "score", None)
    if not isinstance(head, torch.nn.Linear):
        raise ModelError(f"{type(classifier).__name__} keeps its head elsewhere than in `score`; not supported")
    classifier.base_model.load_state_dict(model.classifier.base_model.state_dict())
    with torch.no_grad():
        head.weight.zero_()
        head.weight[1] = model.head.weight[0].to(head.weight)
        if head.bias is not None:
            head.bias.zero_()
            if model.head.bias is not None:
                head.bias[1] = model.head.bias[0].to(head.bias)
    classifier.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
