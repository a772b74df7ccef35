"""An evaluation's figures of completions: diversity, repetition, perplexity, and both estimates of the KL."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import online, ppo_tree
from tiny_models import BOS, EOS, completions_of, prompts_of, ragged, sampler_of, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf.config.sections import LogProbs, SamplingConfig
from rlhf.config.weights import LoraConfig
from rlhf.evaluation.evaluate import distinct_n, diversity, evaluate_policy, perplexity, repetition
from rlhf.models.backbone import add_lora
from rlhf.models.policy_models import Models, ReferenceComparison
from rlhf.runtime.memory import AdaptiveMicroBatch
from rlhf.tracking.metrics import METRICS
from rlhf.training.rollout import compute_logprobs_and_values
from rlhf.types import Completions, Scores


def lengths_as_scores(completions: Completions) -> Scores:
    return Scores(values=completions.completion_mask.sum(dim=1).float(), parts={})


def test_distinct_by_hand() -> None:
    texts = [[1, 2, 1, 2], [1, 2, 3], [9]]
    assert distinct_n(texts, 1) == pytest.approx(4 / 8)
    assert distinct_n(texts, 2) == pytest.approx(3 / 5)  # 12 21 12 | 12 23
    assert distinct_n(texts, 3) == pytest.approx(3 / 3)
    assert math.isnan(distinct_n(texts, 5))


def test_repetition_by_hand() -> None:
    assert repetition([[1, 2, 3, 4, 1, 2, 3, 4]]).value == pytest.approx(1 / 5)  # 1234 2341 3412 4123 1234
    assert repetition([[7] * 10]).value == pytest.approx(6 / 7)
    # The same 4-gram in two completions is no repetition; the short one has none; every 4-gram counts the same.
    share = repetition([[1, 2, 3, 4], [1, 2, 3, 4], [5] * 6, [1, 1, 1]])
    assert (share.total, share.weight) == (2, 5)
    assert math.isnan(repetition([[1, 2, 3]]).value)
    assert repetition([[1, 2, 1, 2]], n=2).value == pytest.approx(1 / 3)


def test_only_live_tokens_count() -> None:
    short = completions_of([[5]], [[3, 3, 3, 3, EOS]])
    padded = completions_of([[5], [5]], [[3, 3, 3, 3, EOS], [4] * 9], fill=3).rows(slice(0, 1))
    assert padded.completion_ids.shape[1] == 9
    assert diversity(padded) == pytest.approx(diversity(short))


def test_perplexity_is_of_all_tokens_together() -> None:
    logprobs = torch.tensor([[0.5, 0.25, 0.125], [0.5, 99.0, 99.0]], dtype=torch.float64).log()
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert perplexity(logprobs, mask) == pytest.approx((2 * 4 * 8 * 2) ** 0.25)
    assert perplexity(torch.full((1, 2), -1e4), torch.ones(1, 2, dtype=torch.bool)) == math.inf


def nudged() -> Models:
    policy = tiny()
    torch.manual_seed(1)
    for parameter in policy.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return Models(policy=policy, reference=tiny(), temperature=0.7, dtype="float64", device=torch.device("cpu"))


def test_both_estimates_of_the_kl_agree_and_the_exact_one_has_the_smaller_error() -> None:
    models, count = nudged(), 1500
    config = SamplingConfig(max_new_tokens=6, temperature=0.7)
    prompts = prompts_of([[1, 4 + i % 3, 6] for i in range(count)])
    sampler = sampler_of(models.policy, config)
    evaluation = evaluate_policy(
        [prompts], sampler, models, lengths_as_scores, proxy=None, key=3, greedy=False, rows_per_pass=512
    )
    metrics = evaluation.metrics
    gap = metrics["eval/kl"] - metrics["eval/kl_exact"]
    assert abs(gap) < 4 * metrics["eval/kl_se"]
    assert metrics["eval/kl_exact_se"] < 0.8 * metrics["eval/kl_se"]
    assert metrics["eval/kl_exact"] > 0.05
    assert float(evaluation.exact_kl.mean()) == pytest.approx(metrics["eval/kl_exact"])
    assert metrics["eval/kl_exact_se"] == pytest.approx(float(evaluation.exact_kl.std()) / count**0.5)
    assert set(metrics) <= set(METRICS)
    assert metrics["eval/reference_perplexity"] == pytest.approx(
        perplexity(evaluation.rollout.ref_logprobs, evaluation.rollout.completion_mask)
    )


@pytest.mark.parametrize("log_probs", ["auto", "naive"])
def test_a_model_that_is_its_own_reference_is_run_once_with_the_same_numbers(log_probs: LogProbs) -> None:
    policy = tiny()
    passes: list[object] = []
    policy.get_input_embeddings().register_forward_hook(lambda *_: passes.append(None))

    def compared(reference: torch.nn.Module) -> ReferenceComparison:
        passes.clear()
        models = replace(nudged(), policy=policy, reference=reference, log_probs=log_probs)
        return models.compare_to_reference(ragged())

    compared(policy)  # what is found out about a model once
    apart = compared(tiny())
    count = len(passes)
    together = compared(policy)
    assert len(passes) == count > 0
    for name in ("logprobs", "ref_logprobs", "kl"):
        assert torch.equal(getattr(apart, name), getattr(together, name))


def test_the_kl_of_a_position_is_that_of_the_models_distributions_there() -> None:
    models, batch = nudged(), ragged()
    kl = models.compare_to_reference(batch).kl
    expected = torch.zeros_like(kl)
    for row in range(len(batch)):
        prompt = batch.prompt_ids[row][batch.prompt_mask[row]]
        own = batch.completion_ids[row][batch.completion_mask[row]]
        ids = torch.cat([prompt, own])[None]
        assert models.reference is not None
        pi, ref = ((m(ids).logits[0] / 0.7).log_softmax(-1) for m in (models.policy, models.reference))
        for t in range(len(own)):
            at = len(prompt) + t - 1
            expected[row, t] = (pi[at].exp() * (pi[at] - ref[at])).sum()
    torch.testing.assert_close(kl, expected, rtol=0, atol=1e-10)


def test_log_probabilities_are_those_of_annotate() -> None:
    models, batch = nudged(), ragged()
    scores = lengths_as_scores(batch)
    expected, comparison = (
        compute_logprobs_and_values(batch, scores, models, cut=AdaptiveMicroBatch(2).cut),
        models.compare_to_reference(batch),
    )
    torch.testing.assert_close(comparison.logprobs, expected.logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(comparison.ref_logprobs, expected.ref_logprobs, rtol=0, atol=1e-12)


def test_with_an_adapter_the_reference_is_the_model_without_it() -> None:
    policy = add_lora(tiny(), LoraConfig(r=2))
    models = Models(
        policy=policy, temperature=1.0, dtype="float64", device=torch.device("cpu"), adapter_off_is_reference=True
    )
    assert float(models.compare_to_reference(ragged()).kl.abs().max()) < 1e-12  # a new adapter changes nothing
    torch.manual_seed(0)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data += 0.3 * torch.randn_like(parameter)
    other = replace(models, adapter_off_is_reference=False, reference=tiny())
    torch.testing.assert_close(models.compare_to_reference(ragged()).kl, other.compare_to_reference(ragged()).kl)
    assert float(models.compare_to_reference(ragged()).kl.max()) > 1e-3


def test_without_a_reference_there_is_no_kl() -> None:
    models = replace(nudged(), reference=None)
    sampler = sampler_of(models.policy, SamplingConfig(max_new_tokens=4))
    how = {"proxy": None, "key": 3, "greedy": True, "rows_per_pass": 2}
    evaluation = evaluate_policy([prompts_of([[5, 6], [7]])], sampler, models, lengths_as_scores, **how)  # type: ignore[arg-type]
    assert not {"eval/kl", "eval/kl_exact", "eval/reference_perplexity"} & set(evaluation.metrics)
    assert "eval/score_greedy" in evaluation.metrics
    assert evaluation.exact_kl.tolist() == [0.0, 0.0]
    with pytest.raises(RuntimeError, match="no reference"):
        models.compare_to_reference(ragged())


class Largest(TorchDispatchMode):
    """Keep the size of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else [result]:
            if isinstance(made, Tensor) and made.untyped_storage().nbytes() >= made.numel():  # an expanded view is none
                self.numbers = max(self.numbers, made.numel())
        return result


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_no_tensor_of_all_logits_is_made(family: str) -> None:
    """64 prompts x 128 tokens with V = 150,000: seven tensors of both models were 35 GB; here on a smaller scale."""
    vocabulary, rows, tokens = 12_000, 24, 32
    policy, reference = (tiny(family, vocab=vocabulary, dtype=torch.float32) for _ in range(2))
    models = Models(policy=policy, reference=reference, temperature=1.0, dtype="float32", device=torch.device("cpu"))
    prompts = [[BOS, 5 + row] for row in range(rows)]
    batch = completions_of(prompts, [[7 + row] * tokens for row in range(rows)])
    models.compare_to_reference(batch.rows(slice(0, 2)))  # what is found out about a model once
    with pytest.MonkeyPatch.context() as patch:
        for module in ("logprobs", "policy_models"):
            patch.setattr(f"rlhf.models.{module}.MAX_CHUNK_LOGITS", {"cpu": 2**19})
        with Largest() as largest:
            comparison = models.compare_to_reference(batch)
    assert comparison.logprobs.shape == (rows, tokens)
    assert largest.numbers < rows * tokens * vocabulary / 15
    assert largest.numbers >= vocabulary  # it did look at distributions


@pytest.mark.slow
def test_evaluation_at_a_vocabulary_of_150_000_adds_less_than_one_tensor_of_all_logits() -> None:
    """In a process of its own, by its resident set: 32 prompts x 64 tokens; one such tensor has 1.2 GB."""
    script = Path(__file__).with_name("peak_of_evaluation.py")
    process = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stderr
    added, whole = (float(number) for number in process.stdout.split())
    assert whole == 32 * 64 * 150_000 * 4 / 2**20
    assert added < 0.5 * whole


@pytest.mark.parametrize(("family", "log_probs"), [("llama", "auto"), ("gpt2", "auto"), ("mistral", "naive")])
def test_comparing_in_small_chunks_changes_nothing(family: str, log_probs: LogProbs) -> None:
    """A chunk of one token, or of all of them; a row at a time, if a model's forward must make the logits."""
    policy, reference = tiny(family), tiny(family)
    torch.manual_seed(1)
    for parameter in policy.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    models = replace(nudged(), policy=policy, reference=reference, log_probs=log_probs)
    results = []
    for numbers in (1, 2**23):
        with pytest.MonkeyPatch.context() as patch:
            for module in ("logprobs", "policy_models"):
                patch.setattr(f"rlhf.models.{module}.MAX_CHUNK_LOGITS", {"cpu": numbers})
            results.append(models.compare_to_reference(ragged()))
    for name in ("logprobs", "ref_logprobs", "kl"):
        torch.testing.assert_close(getattr(results[0], name), getattr(results[1], name), rtol=0, atol=1e-12)
    assert float(results[0].kl.max()) > 1e-3


def test_an_evaluation_that_memory_has_no_room_for_is_halved() -> None:
    models, notes = nudged(), []
    passes = AdaptiveMicroBatch(4, what="an evaluation pass", note=notes.append)
    compare, sizes = models.compare_to_reference, []

    def full(batch: Completions) -> ReferenceComparison:
        sizes.append(len(batch))
        if len(batch) > 1:
            raise torch.OutOfMemoryError
        return compare(batch)

    models.compare_to_reference = full  # type: ignore[method-assign]
    sampler = sampler_of(models.policy, SamplingConfig(max_new_tokens=4))
    prompts = [prompts_of([[5, 6], [7], [8, 9], [4]])]
    how = {"proxy": None, "key": 3, "greedy": False, "rows_per_pass": passes}
    evaluation = evaluate_policy(prompts, sampler, models, lengths_as_scores, **how)  # type: ignore[arg-type]
    assert sizes == [4, 2, 1, 1, 1, 1]
    assert len(notes) == 1
    assert "an evaluation pass of 4 rows: halved" in notes[0]
    assert evaluation.metrics["eval/kl_exact"] > 0.0


def test_an_evaluation_during_the_run_can_have_fewer_prompts(tmp_path: Path) -> None:
    """The first ones, each drawn as among all of them; a limit of the data that is smaller stays."""
    rows: dict[str, list[dict[str, object]]] = {}
    settings = {"all": [], "five": ["eval.prompts=5"], "two": ["data.eval_prompts.limit=2", "eval.prompts=5"]}
    for name, limits in settings.items():
        run = online(ppo_tree(tmp_path / name), *limits, "eval.samples=100")
        run.session.evaluate(0)
        run.session.recorder.close()
        lines = (tmp_path / name / "run" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
        rows[name] = [{key: json.loads(line)[key] for key in ("prompt", "completion")} for line in lines]
    assert len(rows["all"]) > 5
    assert (rows["five"], rows["two"]) == (rows["all"][:5], rows["all"][:2])


def test_a_reward_that_applies_to_no_held_out_row_has_no_mean() -> None:
    def of_first_rows(count: int) -> Callable[[Completions], Scores]:
        return lambda completions: Scores(
            values=torch.tensor([1.0 if row < count else math.nan for row in range(len(completions))]), parts={}
        )

    models, config = nudged(), SamplingConfig(max_new_tokens=2)
    prompts = prompts_of([[1, 4], [1, 5], [1, 6]])
    for known in (2, 0):
        metrics = evaluate_policy(
            [prompts],
            sampler_of(models.policy, config),
            models,
            lengths_as_scores,
            proxy=of_first_rows(known),
            key=3,
            greedy=False,
            rows_per_pass=8,
        ).metrics
        assert metrics.get("eval/proxy") == (1.0 if known else None)
