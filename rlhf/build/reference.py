"""The reference of an offline run: which model it is, and its cached log-probabilities of a data set."""

from __future__ import annotations

import os

import torch
from jaxtyping import Float
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.build.context import Context
from rlhf.build.models import build_reference
from rlhf.config.algorithm import KtoLoss, ReferencedLoss
from rlhf.config.sections import TrainConfig, judged, offline, reads_reference
from rlhf.data.annotated import AnnotatedLabelledSet, AnnotatedPairSet, CompletionRows, labels_of, rows_of
from rlhf.data.pairs import LabelledSet, PairSet
from rlhf.data.reference_cache import ReferenceCache, cache_folder, cache_key, rows_fingerprint
from rlhf.models.bundle import Models
from rlhf.models.fingerprint import weights_fingerprint
from rlhf.runtime.seeding import new_weights
from rlhf.trainers.online import ROWS_PER_PASS
from rlhf.trainers.preference import completion_logprobs


def attach_reference(config: TrainConfig, context: Context, tokenizer: PreTrainedTokenizerBase, models: Models) -> None:
    """Load the reference into `models` if this run needs one as a separate model.

    It needs none if the reference is the policy with its adapter disabled, nor if the reference is only read before
    the first step, when it equals the policy.
    """
    if not reads_reference(config):
        return
    if config.policy.lora is not None and config.reference.model is None:
        models.adapter_off_is_reference = True
    elif keeps_reference(config) or context.resume is not None or config.reference.model is not None:
        with new_weights(context.seed):
            reference = build_reference(config, tokenizer)
        assert reference is not None
        models.reference = context.engine.freeze("reference", reference)


def keeps_reference(config: TrainConfig) -> bool:
    """Return whether the reference is read during training: for KTO's z0 or the KL of held-out completions."""
    return isinstance(offline(config).loss, KtoLoss) or (judged(config) and reads_reference(config))


def rows_per_pass(config: TrainConfig) -> int:
    """Return the rows of a forward pass without gradient; they affect memory only, no result."""
    return config.batch.micro_batch_size * ROWS_PER_PASS


class Annotator:
    """Annotates data sets with the reference's log-probability of each completion, from a cache where possible."""

    def __init__(self, config: TrainConfig, context: Context, models: Models) -> None:
        self.config, self.context, self.models = config, context, models
        self.cache = ReferenceCache(cache_folder(config.run.cache_dir, os.environ))
        self._weights: str | None = None

    def pairs(self, pairs: PairSet) -> AnnotatedPairSet:
        """Annotate pairs: both completions of each."""
        chosen, rejected = self._logprobs(rows_of(pairs)).chunk(2)
        return AnnotatedPairSet(pairs, chosen, rejected)

    def labelled(self, data: PairSet | LabelledSet) -> AnnotatedLabelledSet:
        """Annotate single labelled completions; pairs are split into two rows."""
        rows = rows_of(data)
        return AnnotatedLabelledSet(rows, labels_of(data), self._logprobs(rows))

    def _logprobs(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        if not isinstance(offline(self.config).loss, ReferencedLoss):
            return torch.zeros(len(rows), dtype=torch.float64)
        key = cache_key(
            weights=self._fingerprint(),
            rows=rows_fingerprint(rows.prompts, rows.completions, rows.learned),
            dtype=self.models.dtype,
            temperature=self.models.temperature,
        )
        ranks = self.context.engine.ranks
        values = ranks.on_main(lambda: self.cache.read(key, count=len(rows)))
        if values is None:
            values = computed = self._compute(rows)
            ranks.on_main(lambda: self.cache.write(key, computed))
        else:
            self.context.notes.append(f"reference log-probs of {len(rows):,} completions: from {self.cache.path(key)}")
        self.context.notes += self.cache.notes
        self.cache.notes.clear()
        return values

    def _compute(self, rows: CompletionRows) -> Float[Tensor, " N"]:
        text = f"reference log-probs of {len(rows):,} completions: computed once, kept in {self.cache.folder}"
        if self.context.console is not None:
            self.context.console.print(Text(text), soft_wrap=True)  # at once: a large data set takes time
        models = self.models
        assert models.has_reference or self.context.resume is None, "the policy is its own reference at step 0 only"
        logprobs = (
            models.reference_logprobs if models.has_reference else lambda batch: models.policy_tokens(batch).logprobs
        )
        return completion_logprobs(
            rows, logprobs, rows_per_pass=rows_per_pass(self.config), device=models.device, ranks=models.engine.ranks
        )

    def _fingerprint(self) -> str:
        if self._weights is None:
            model, engine = self.models.reference or self.models.policy, self.context.engine
            state = engine.full_state(model)
            self._weights = engine.ranks.on_main(lambda: weights_fingerprint(model, state))
        return self._weights
