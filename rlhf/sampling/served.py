"""The sampler that asks servers: the same completions as in this process, drawn by another."""

from __future__ import annotations

from dataclasses import asdict

import torch
from jaxtyping import UInt8
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf.batching import extend
from rlhf.config.sections import SamplingConfig
from rlhf.data.tokenizer import right_pad
from rlhf.errors import SamplingError
from rlhf.models.backbone import weight_dtype
from rlhf.models.policy_models import Models
from rlhf.models.text_config import text_config
from rlhf.sampling.canary import live_prompts
from rlhf.sampling.generate import repeat_rows
from rlhf.sampling.pool import ServerPool
from rlhf.sampling.push import PushedPolicy
from rlhf.sampling.support import from_text, limits_of
from rlhf.serving.routes import Answer, Ask
from rlhf.types import Completions, Prompts


class ServedSampler:
    """Deals prompts to servers that have the policy's current weights; see `ServerPool` for what happens if they die.

    The parts that prompts are dealt in depend on the number of addresses alone, so that a dead server changes nothing.
    """

    def __init__(
        self, pool: ServerPool, models: Models, config: SamplingConfig, *, eos_ids: tuple[int, ...], pad_id: int
    ) -> None:
        """Create a sampler of the policy in `models`."""
        self.pool, self.config = pool, config
        self.policy = PushedPolicy(models)
        self.eos_ids, self.pad_id = eos_ids, pad_id

    def sample(self, prompts: Prompts, *, key: int, group_size: int, greedy: bool = False) -> Completions:
        """Sample completions; see Sampler.sample. The main rank asks, and hands the completions to the others.

        Raises:
            SamplingError: no server answers, a push breaks, or the canary finds a difference.
        """
        engine = self.policy.models.engine
        return engine.ranks.on_main(lambda: self._sample(prompts, key, group_size, greedy))

    def _sample(self, prompts: Prompts, key: int, group_size: int, greedy: bool) -> Completions:
        live = live_prompts(prompts)
        size = -(-len(live) // len(self.pool.remotes))
        asks = [self._ask(prompts, live, range(start, min(start + size, len(live))), key, group_size, greedy)
                for start in range(0, len(live), size)]  # fmt: skip
        with self.pool.sampling_from(self.policy, live):
            answers = self.pool.generate(asks, self.policy)
        return self._assemble(prompts, live, answers, group_size)

    def _ask(
        self, prompts: Prompts, live: list[list[int]], part: range, key: int, group_size: int, greedy: bool
    ) -> Ask:
        config = self.config
        return Ask(
            prompts=[live[number] for number in part],
            rows=prompts.row_ids[part.start : part.stop].tolist(),
            width=prompts.prompt_ids.shape[1],
            group_size=group_size,
            key=key,
            greedy=greedy,
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            stop_ids=self.eos_ids,
            pad_id=self.pad_id,
            batch_size=config.batch_size,
            frozen=self.policy.is_frozen,
            adapted=self.policy.is_adapter,
            limits=asdict(limits_of(config)) if limits_of(config).are_on else {},
        )

    def _assemble(self, prompts: Prompts, live: list[list[int]], answers: list[Answer], group_size: int) -> Completions:
        ids = [row for answer in answers for row in answer.ids]
        logprobs = [row for answer in answers for row in answer.logprobs]
        read = [row for answer in answers for row in answer.prompts]
        if read != [row for row in live for _ in range(group_size)]:
            raise SamplingError("a sampling server read other prompts than were sent: its template or tokens differ")
        cut = [self._until_end(row) for row in ids]
        if min(map(len, cut)) == 0:
            raise SamplingError("a sampling server returned an empty completion")
        vocabulary = int(text_config(self.policy.model).vocab_size)
        if (largest := max(map(max, cut))) >= vocabulary:
            raise SamplingError(f"a sampling server returned the token id {largest}: the policy has {vocabulary:,} ids")
        completion_ids, mask = right_pad(cut, self.pad_id)
        dtype = weight_dtype(self.pool.dtype)
        values = torch.zeros(mask.shape, dtype=torch.promote_types(dtype, torch.float32))
        for place, (row, tokens) in enumerate(zip(logprobs, cut, strict=True)):
            values[place, : len(tokens)] = torch.tensor(row[: len(tokens)], dtype=values.dtype)
        return extend(
            Completions,
            repeat_rows(prompts, group_size),
            completion_ids=completion_ids,
            completion_mask=mask,
            sampler_logprobs=values,
            finished=self._finished(cut),
            group_size=group_size,
            sampler_support=_supports(answers, ids, cut) if limits_of(self.config).are_on else None,
        )

    def _until_end(self, ids: list[int]) -> list[int]:
        """Return the tokens up to and including the first that ends a completion."""
        ends = [place for place, token in enumerate(ids) if token in self.eos_ids]
        return ids[: ends[0] + 1] if ends else ids[: self.config.max_new_tokens]

    def _finished(self, rows: list[list[int]]) -> Tensor:
        return torch.tensor([row[-1] in self.eos_ids for row in rows], dtype=torch.bool)


def _supports(answers: list[Answer], ids: list[list[int]], cut: list[list[int]]) -> UInt8[Tensor, "B T W"]:
    """Return which tokens could be drawn, zero behind the end of each completion."""
    texts = [text for answer in answers for text in answer.supports or ()]
    rows = [from_text(text, len(row))[: len(kept)] for text, row, kept in zip(texts, ids, cut, strict=True)]
    return pad_sequence(rows, batch_first=True)
