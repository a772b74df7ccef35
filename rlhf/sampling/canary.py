"""The canary: after a push the trainer computes some of the server's tokens again, and names the cause if they differ.

A server that answers 200 OK to every request may still sample from a mixture of old and new weights. Two things are
compared: completions of fixed prompts, which a stale cache of prefixes would change, and a forced text that ends with
the last ids of the vocabulary, which a vocabulary that is cut off would not have.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rlhf.data.tokenizer import as_completions
from rlhf.models.adapters import base_model, is_adapted
from rlhf.models.backbone import CausalLM, autocast
from rlhf.models.policy_models import Models
from rlhf.runtime.device import exact_products
from rlhf.sampling.push import pushed_tensors
from rlhf.serving.routes import Answer
from rlhf.types import Completions, Prompts

TAIL = 4  # last ids of the vocabulary in the forced text
SPREAD = 4  # ids spread over the vocabulary before them
KEY = 20_260_501  # of the canary's draws
ROUNDINGS = 2.0  # times the trainer's own rounding: the server rounds too, in another order
SEARCH_S = 60.0  # seconds after which no more hypotheses are tried
CLOSER = 0.1  # a hypothesis explains a difference if at most this share of it remains


def live_prompts(prompts: Prompts) -> list[list[int]]:
    """Return the token ids of each prompt, without padding."""
    return [ids[mask].tolist() for ids, mask in zip(prompts.prompt_ids, prompts.prompt_mask, strict=True)]


def forced_tail(vocabulary: int) -> list[int]:
    """Return ids spread over the vocabulary, its last ones among them."""
    spread = [vocabulary * i // (SPREAD + 1) for i in range(1, SPREAD + 1)]
    return spread + list(range(max(vocabulary - TAIL, 0), vocabulary))


@dataclass(frozen=True, kw_only=True)
class CanaryReading:
    """The log-probabilities of the canary's tokens from server and trainer, in nats, and the largest difference."""

    drawn: Completions
    served_drawn: Tensor  # [B, T]
    forced: Completions
    served_forced: Tensor  # [1, T]
    drawn_difference: float
    forced_difference: float

    @property
    def largest(self) -> float:
        """Return the largest difference; infinite if one of the numbers is none."""
        worst = max(
            self.drawn_difference, self.forced_difference, key=lambda value: math.inf if value != value else value
        )
        return math.inf if worst != worst else worst


@torch.no_grad()
def compare_with_server(
    models: Models, prompts: list[list[int]], answer: Answer, forced: list[int], scored: list[float], *, pad_id: int
) -> CanaryReading:
    """Compute the canary's tokens again.

    Args:
        models: the trainer's.
        prompts: the prompts that were sent.
        answer: the completions of the prompts.
        forced: the first prompt followed by the tail.
        scored: the log-probability of each token of `forced` after the first, at temperature 1.
        pad_id: the id under the masks.
    """
    drawn = as_completions(prompts, answer.ids, pad_id=pad_id)
    tail = len(forced) - len(prompts[0])
    forced_rows = as_completions([prompts[0]], [forced[-tail:]], pad_id=pad_id)
    served_drawn = torch.zeros(drawn.completion_ids.shape, dtype=torch.float64)
    for row, values in enumerate(answer.logprobs):
        served_drawn[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    served_forced = torch.tensor([scored[-tail:]], dtype=torch.float64)
    return CanaryReading(
        drawn=drawn,
        served_drawn=served_drawn,
        forced=forced_rows,
        served_forced=served_forced,
        drawn_difference=_difference(models.policy_tokens(drawn.to(models.device)).logprobs, served_drawn, drawn),
        forced_difference=_difference(
            models.policy_tokens(forced_rows.to(models.device), temperature=1.0).logprobs, served_forced, forced_rows
        ),
    )


@torch.no_grad()
def is_rounding(models: Models, reading: CanaryReading) -> bool:
    """Check whether arithmetic in 16 bits or TF32 explains the differences, by the trainer's own.

    Each has to be at most ROUNDINGS times the change by the trainer's arithmetic on the same tokens against full
    float32. Unlikely tokens change most. In full float32 nothing changes, and the answer is no.
    """
    wide = replace(models, dtype="float32")
    for rows, difference, temperature in (
        (reading.drawn, reading.drawn_difference, None),
        (reading.forced, reading.forced_difference, 1.0),
    ):
        on_device = rows.to(models.device)
        with exact_products(models.device):
            exact = wide.policy_tokens(on_device, temperature=temperature).logprobs.cpu().double()
        rounding = _difference(models.policy_tokens(on_device, temperature=temperature).logprobs, exact, rows)
        if not difference <= ROUNDINGS * rounding:
            return False
    return True


def _difference(own: Tensor, served: Tensor, rows: Completions) -> float:
    gap = (own.cpu().double() - served).abs()[rows.completion_mask]
    return math.inf if not torch.isfinite(gap).all() else float(gap.max())


def misread(prompts: list[list[int]], answer: Answer) -> str | None:
    """Say how a server read other prompts than were sent, as with a template of its own; None if it did not."""
    for sent, read in zip(prompts, answer.prompts, strict=True):
        if sent != read:
            return (
                "another template or added tokens: it read "
                f"{len(read)} tokens where {len(sent)} were sent ({read[:4]} ... for {sent[:4]} ...)"
            )
    return None


def differing(own: Mapping[str, str], served: Mapping[str, str]) -> list[str]:
    """Return the names of the tensors whose digests differ, or that one side lacks."""
    return [name for name in {**own, **served} if own.get(name) != served.get(name)]


@torch.no_grad()
def likely_cause(models: Models, reading: CanaryReading, older: Mapping[str, Tensor]) -> str:
    """Say which mistake explains the server's numbers: each is made in the trainer's model, one after the other.

    `older` has the tensors before the last push. The mistakes tried are old tensors by groups, transposed matrices,
    other scales of the adapter or of a tensor, a temperature left out, bfloat16 arithmetic, a vocabulary that is cut.
    Each takes a pass of the model, so no more old, transposed or scaled tensors are tried after SEARCH_S.
    """
    until = time.monotonic() + SEARCH_S
    if torch.isinf(reading.served_forced).any():
        return "a truncated vocabulary: it does not know the last token ids"
    served = _flat(reading.served_forced, reading.forced)
    start = float((_logprobs(models, reading.forced) - served).abs().max())
    if start <= CLOSER * reading.drawn_difference:
        return _cause_of_drawn(models, reading)
    causes: list[tuple[float, str]] = []
    for name, mistake in _mistakes(models, older):
        with mistake:
            causes.append((float((_logprobs(models, reading.forced) - served).abs().max()), name))
        if causes[-1][0] <= CLOSER**2 * start:
            return name
        if time.monotonic() > until:
            break
    with autocast("bfloat16", models.device):
        rounded = float((_logprobs(models, reading.forced, "bfloat16") - served).abs().max())
    causes.append((rounded, "bfloat16 arithmetic on the server"))
    cut = _cut_vocabulary(models, reading, served)
    if cut is not None:
        causes.append((0.0, cut))
    best, name = min(causes, default=(math.inf, ""))
    if best <= CLOSER * start:
        return name
    return (
        f"no single mistake that was tried explains it; the nearest is {name} ({best:.1e} nats remain of {start:.1e})"
    )


def _cause_of_drawn(models: Models, reading: CanaryReading) -> str:
    """Say why completions differ although the same weights score a forced text right."""
    own = models.policy_tokens(reading.drawn.to(models.device), temperature=1.0).logprobs
    if (
        models.temperature != 1
        and _difference(own, reading.served_drawn, reading.drawn) < reading.drawn_difference / 10
    ):
        return "log-probabilities without the temperature (vLLM: --logprobs-mode processed_logprobs)"
    return "a stale cache: a forced text is scored right, but completions of prompts that were asked before are not"


def _flat(values: Tensor, rows: Completions) -> Tensor:
    return values[rows.completion_mask].double()


def _logits(models: Models, rows: Completions, dtype: str | None = None) -> Tensor:
    """Return the logits [1, T, V] before each token of the forced text, by the model's own modules."""
    ids = torch.cat([rows.prompt_ids[0][rows.prompt_mask[0]], rows.completion_ids[0][rows.completion_mask[0]]])
    model: nn.Module = models.policy
    with autocast(dtype or models.dtype, models.device):
        logits: Tensor = model(input_ids=ids[None].to(models.device), use_cache=False).logits
    length = int(rows.completion_mask.sum())
    return logits[:, -length - 1 : -1].double().cpu()


def _logprobs(models: Models, rows: Completions, dtype: str | None = None) -> Tensor:
    chosen = rows.completion_ids[0][rows.completion_mask[0]]
    return _logits(models, rows, dtype)[0].log_softmax(-1).gather(1, chosen[:, None]).squeeze(1)


def _cut_vocabulary(models: Models, reading: CanaryReading, served: Tensor) -> str | None:
    """Say whether the server normalizes over fewer tokens: each log-probability is then higher by -log of their sum."""
    logs = _logits(models, reading.forced)[0].log_softmax(-1)
    chosen = reading.forced.completion_ids[0][reading.forced.completion_mask[0]]
    own = logs.gather(1, chosen[:, None]).squeeze(1)
    kept = torch.exp(own - served)  # the probability of the tokens that the server has
    mass = logs.exp().cumsum(-1)
    known = chosen < chosen.max()
    size = int(torch.searchsorted(mass[0], kept[0].clamp(max=1.0))) + 1
    if size >= logs.shape[1] or not known.any():
        return None
    fits = (mass[:, size - 1] - kept).abs()[known].max() < 1e-3
    return f"a truncated vocabulary of about {size:,} of {logs.shape[1]:,} tokens" if bool(fits) else None


def _mistakes(models: Models, older: Mapping[str, Tensor]) -> Iterator[tuple[str, _Mistake]]:
    """Yield mistakes and their names."""
    model = models.policy
    current = pushed_tensors(model)
    old = {name: tensor for name, tensor in older.items() if name in current and tensor.shape == current[name].shape}
    head = _tied_head(model, old)
    if head is not None:  # first: vLLM makes it on a CPU, and the others take a pass for each tensor
        yield "old lm_head: the output head of tied embeddings kept its old weights", head
    groups: dict[str, list[str]] = {}
    for name in old:
        for group in _groups(name):
            groups.setdefault(group, []).append(name)
    for group, names in groups.items():
        yield f"old {group}", _Mistake(model, {name: old[name] for name in names})
    for name, tensor in current.items():
        if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]:
            yield f"transposed {name}", _Mistake(model, {name: tensor.T.clone()})
    for low in (torch.bfloat16, torch.float16):
        name = str(low).removeprefix("torch.")
        yield f"weights rounded to {name}", _Mistake(model, {key: t.to(low).to(t.dtype) for key, t in current.items()})
    for factor in (0.0, 0.5, 2.0):
        if is_adapted(model):
            scaled = {name: tensor * factor for name, tensor in current.items() if "lora_B" in name}
            yield f"wrong scale of the adapter ({factor:g} times)", _Mistake(model, scaled)
        else:
            for name, tensor in current.items():
                yield f"wrong scale of {name} ({factor:g} times)", _Mistake(model, {name: tensor * factor})
    if is_adapted(model):
        yield "old adapter", _Mistake(model, old)


def _groups(name: str) -> list[str]:
    """Return the groups that a tensor is in: itself, its layer, the norms, everything."""
    layer = re.search(r"\.(\d+)\.", name)
    groups = [name, "weights as a whole: the push had no effect"]
    if layer is not None:
        groups.append(f"layer {layer[1]}")
    if "norm" in name.lower():
        groups.append("norms")
    return groups


class _Mistake:
    """A context in which some tensors of a model have other values."""

    def __init__(self, model: CausalLM, values: Mapping[str, Tensor]) -> None:
        self.model, self.values = model, values

    def __enter__(self) -> None:
        tensors = pushed_tensors(self.model)
        self.kept = {name: tensors[name].clone() for name in self.values}
        for name, value in self.values.items():
            tensors[name].copy_(value)

    def __exit__(self, *_: object) -> None:
        tensors = pushed_tensors(self.model)
        for name, value in self.kept.items():
            tensors[name].copy_(value)


class _OldHead(_Mistake):
    """A context in which the output head of tied embeddings has its old weights, and the embeddings the new."""

    def __init__(self, model: CausalLM, head: nn.Module, old: Tensor) -> None:
        super().__init__(model, {})
        self.head, self.old = head, old

    def __enter__(self) -> None:
        weight = self.head.weight
        assert isinstance(weight, nn.Parameter)
        self.weight = weight
        self.head.weight = nn.Parameter(self.old.to(weight), requires_grad=False)

    def __exit__(self, *_: object) -> None:
        self.head.weight = self.weight


def _tied_head(model: CausalLM, old: Mapping[str, Tensor]) -> _Mistake | None:
    base = base_model(model)
    head = base.get_output_embeddings()
    tied = None if head is None else head.weight
    if head is None or not isinstance(tied, Tensor) or tied is not base.get_input_embeddings().weight:
        return None
    tensors = pushed_tensors(model).items()
    name = next((name for name, tensor in tensors if tensor.data_ptr() == tied.data_ptr()), "")
    return _OldHead(model, head, old[name]) if name in old else None
