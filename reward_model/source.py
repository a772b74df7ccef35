"""A trained reward model as a RewardSource, the only part of this package that an online algorithm uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from reward_model.model import score_rows
from rlhf.config.data import ChatFormat
from rlhf.data.conversation import tools_of
from rlhf.data.rows import BadRow
from rlhf.data.templates import Rendered, Tools
from rlhf.data.tokenizer import Encoder, left_pad, load_tokenizer, make_encoder, right_pad, shares_vocabulary
from rlhf.errors import NonFiniteScores, RewardError
from rlhf.models.backbone import context_length, freeze
from rlhf.models.scalar_adapters import load_adapted
from rlhf.models.scalar_head import ScalarHeadModel, load_reward_heads
from rlhf.references import MESSAGES
from rlhf.rewards.source import decode
from rlhf.runtime.engine import Engine
from rlhf.types import Completions, Scores

OWN_TEMPLATE = ChatFormat()  # the chat template of the reward model's tokenizer


class RewardModelSource:
    """A RewardSource that scores completions with a reward model.

    If the policy's token ids mean the same to the reward model, they are used as they are. Otherwise a prompt that is
    a conversation is rendered, with its answer, by the reward model's own chat template; any other prompt, or one for
    a reward model without a template, is decoded without special tokens and encoded again, with the reward model's own
    BOS and EOS in their place.
    """

    def __init__(
        self,
        model: ScalarHeadModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        policy_tokenizer: PreTrainedTokenizerBase,
        micro_batch_size: int,
        dtype: str = "float32",
        chat: ChatFormat = OWN_TEMPLATE,
    ) -> None:
        """Freeze the model, which stays on its device; `tokenizer` is the reward model's own.

        `chat` is the format of the conversations that it was trained on.
        """
        freeze(model)
        self.model = model
        self.policy_tokenizer = policy_tokenizer
        self.micro_batch_size = micro_batch_size
        self.dtype = dtype
        self.same_ids = shares_vocabulary(policy_tokenizer, tokenizer)
        self.encoder: Encoder = make_encoder(tokenizer, OWN_TEMPLATE if self.same_ids else chat)
        pad = policy_tokenizer.pad_token
        self.unknown_pad = -1 if pad is None or pad in tokenizer.get_vocab() else policy_tokenizer.pad_token_id
        self.context = context_length(model.classifier)

    @classmethod
    def load(
        cls,
        path: str,
        policy_tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        micro_batch_size: int,
        dtype: str = "float32",
        engine: Engine | None = None,
        chat: ChatFormat = OWN_TEMPLATE,
        weights: str = "auto",
    ) -> RewardModelSource:
        """Load the reward model in a folder or under a hub id; if `engine` splits weights, its part of it.

        `chat` is the format of the conversations that it was trained on. With `weights` other than auto an adapter is
        not merged, and its base is shared with other models of the run.

        Raises:
            ModelError: the path is not a sequence-classification model with one label, or has no tokenizer.
        """
        tokenizer = load_tokenizer(path)
        if weights == "auto":
            model = load_reward_heads(path, tokenizer, dtype=dtype, engine=engine)
        else:
            engine = engine or Engine(device)
            model = load_adapted(path, tokenizer, None, weights=weights, new_head=None, dtype=dtype, engine=engine)
        if engine is None or not engine.splits_weights:
            model.to(device)
        return cls(
            model,
            tokenizer,
            policy_tokenizer=policy_tokenizer,
            micro_batch_size=micro_batch_size,
            dtype=dtype,
            chat=chat,
        )

    @property
    def note(self) -> str:
        """Return one line on how the reward model reads the policy's texts; empty if it reads the same token ids."""
        if self.same_ids:
            return ""
        if self.encoder.template.source is None:
            return "The reward model reads text, not token ids: plain text, for it has no chat template"
        return "The reward model reads text, not token ids: conversations by its own chat template"

    def __call__(self, completions: Completions) -> Scores:
        """Score completions; see RewardSource."""
        batch, parts = self.prepare(completions)
        values = score_rows(
            self.model,
            batch.prompt_ids,
            batch.prompt_mask,
            batch.completion_ids,
            batch.completion_mask,
            micro_batch_size=self.micro_batch_size,
            dtype=self.dtype,
        ).float()
        check_finite(values)
        return Scores(values=values, parts=parts)

    def prepare(self, completions: Completions) -> tuple[Completions, dict[str, Float[Tensor, " B"]]]:
        """Return the rows as the reward model reads them, and the parts that record changes to them."""
        batch = self._replace_pads(completions) if self.same_ids else self._reencode(completions)
        return self._cut_to_context(batch)

    def _replace_pads(self, batch: Completions) -> Completions:
        """Replace masked tokens, and a pad token that only the policy has, by the reward model's pad token."""

        def replaced(ids: Int[Tensor, "B L"], live: Bool[Tensor, "B L"]) -> Int[Tensor, "B L"]:
            return torch.where(live & (ids != self.unknown_pad), ids, self.encoder.pad_id)

        return replace(
            batch,
            prompt_ids=replaced(batch.prompt_ids, batch.prompt_mask),
            completion_ids=replaced(batch.completion_ids, batch.completion_mask),
        )

    def _reencode(self, batch: Completions) -> Completions:
        answers = decode(batch, self.policy_tokenizer).completions
        rendered = [
            render_for_reward_model(
                self.encoder, self._decode(ids[live].tolist()), answer, reference.get(MESSAGES), tools_of(reference)
            )
            for ids, live, answer, reference in zip(
                batch.prompt_ids, batch.prompt_mask, answers, batch.references, strict=True
            )
        ]
        prompts, completions = encode_rows(self.encoder, rendered, batch.finished.tolist())
        return self._with_rows(batch, prompts, completions)

    def _decode(self, ids: list[int]) -> str:
        text = self.policy_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _cut_to_context(self, batch: Completions) -> tuple[Completions, dict[str, Float[Tensor, " B"]]]:
        """Cut the beginning off rows longer than the model's context (see last_tokens); the part "cut" marks them.

        Every batch of a model with a context has this part, so that the parts of a run's scores are always the same.
        """
        if self.context is None:
            return batch, {}
        cut = batch.prompt_mask.sum(dim=1) + batch.completion_mask.sum(dim=1) > self.context
        parts = {"cut": cut.float()}
        if not cut.any():
            return batch, parts
        bos = self.encoder.tokenizer.bos_token_id
        rows = [
            truncate_row(prompt[prompt_mask].tolist(), completion[mask].tolist(), self.context, bos=bos)
            for prompt, prompt_mask, completion, mask in zip(
                batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask, strict=True
            )
        ]
        return self._with_rows(batch, [prompt for prompt, _ in rows], [completion for _, completion in rows]), parts

    def _with_rows(self, batch: Completions, prompts: list[list[int]], completions: list[list[int]]) -> Completions:
        prompt_ids, prompt_mask = left_pad(prompts, self.encoder.pad_id)
        completion_ids, completion_mask = right_pad(completions, self.encoder.pad_id)
        return replace(
            batch,
            prompt_ids=prompt_ids,
            prompt_mask=prompt_mask,
            completion_ids=completion_ids,
            completion_mask=completion_mask,
            sampler_logprobs=torch.zeros(completion_ids.shape),
        )


def check_finite(values: Tensor) -> None:
    """Check the scores of a reward model [B], or of the members of an ensemble [B, K].

    Raises:
        NonFiniteScores: a score is NaN or infinite.
    """
    bad = ~values.isfinite().view(len(values), -1).all(dim=1)
    rows = bad.nonzero().flatten().tolist()
    if rows:
        raise NonFiniteScores(
            f"the reward model gave {len(rows)} of {len(values)} completions a score that is NaN or infinite "
            f"(the first: row {rows[0]}): its weights or its calibration are broken; train it again"
        )


def truncate_row(
    prompt: list[int], completion: list[int], context: int, *, bos: int | None
) -> tuple[list[int], list[int]]:
    """Shorten a row to `context` tokens by dropping the oldest tokens of the prompt, except a BOS in front.

    At least one token of the prompt stays. A completion that is too long by itself keeps its end, since the score is
    read at its last token.
    """
    completion = completion[-(context - 1) :]
    room = context - len(completion)
    if len(prompt) <= room:
        return prompt, completion
    first = prompt[:1] if prompt[0] == bos else []
    keep = room - len(first)
    return first + (prompt[-keep:] if keep else []), completion


def render_for_reward_model(
    encoder: Encoder, prompt: str, completion: str, messages: object, tools: Tools = ()
) -> Rendered:
    """Render a prompt and its completion for a reward model, by its chat template if the prompt is a conversation.

    A text that is the user's one message as well stays as it is if the template's turns are written out in it.

    Raises:
        RewardError: the template refuses the conversation.
    """
    is_written_out = messages == [{"role": "user", "content": prompt}] and encoder.is_written_out(prompt)
    if encoder.template.source is None or not isinstance(messages, list) or is_written_out:
        return Rendered(prompt, (completion,), templated=False)
    try:
        return encoder.render(messages, [completion], tools=tools)
    except BadRow as bad:
        raise RewardError(
            f"{bad} (the reward model's template): give prompts that it takes, such as some without a system prompt"
        ) from bad


def encode_rows(
    encoder: Encoder, rendered: Sequence[Rendered], finished: Sequence[bool]
) -> tuple[list[list[int]], list[list[int]]]:
    """Encode prompts and completions into token ids; a completion that did not end by itself gets no EOS."""
    prompts, completions = encoder.prompts(rendered), encoder.completions(rendered, 0)
    for ids, ended in zip(completions, finished, strict=True):
        if not ended:
            ids.pop()
    return prompts, completions
