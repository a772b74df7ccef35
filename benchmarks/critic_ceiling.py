"""Measure how much of a reward a critic could explain: by the prompt alone, and by the tokens written so far.

    python benchmarks/critic_ceiling.py runs/detox/sft --reward-model runs/detox/reward_model \
        --prompts data/paradetox/prompts.jsonl --rows 384 --json benchmarks/results/critic_ceiling.json
    python benchmarks/critic_ceiling.py runs/json/ppo --verifier json --prompts runs/json/train.jsonl \
        --max-new-tokens 96 --temperature 0.7 --json benchmarks/results/critic_ceiling_json.json

Several completions of each prompt are sampled and scored. The share of the scores' variance that lies between prompts
is the most that a critic can explain before the first token; it needs no critic, only the resampling. Beside it stands
the share that a linear value head explains on unseen prompts, by ridge regression on the hidden states of the
policy and of the reward model, from which a critic may start. With --verifier a program scores, and only the policy
has such a head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rlhf.config.load import load_chat_format, validate
from rlhf.config.run import RunConfig
from rlhf.config.sections import SamplingConfig
from rlhf.factory.rewards import build_source
from rlhf.factory.sampler import Completer
from rlhf.models.folders import model_folder
from rlhf.models.kernels.llama.forward import predictor_states
from rlhf.models.scalar_head import ScalarHeadModel, completion_values, load_scalar_head, sequence_scores
from rlhf.rewards.verifier import VerifierSource
from rlhf.runtime.engine import make_engine
from rlhf.runtime.seeding import derive_seed
from rlhf.types import Completions

FOLDS = 5
PENALTIES = (1e2, 1e3, 1e4, 1e5, 1e6)  # of the ridge; the best is shown, which flatters the head slightly
ROWS_PER_PASS = 64
Rows = tuple[Tensor, Tensor, Tensor, Tensor]  # prompt ids and mask, completion ids and mask


def prompt_share(scores: Tensor) -> float:
    """Return the share of the variance of scores [prompts, count] between prompts, freed of the noise of the means.

    One-way analysis of variance: s_between = Var(means) - s_within / count, and the share s_between / (s_between +
    s_within).
    """
    within = scores.var(dim=1).mean()
    between = scores.mean(dim=1).var() - within / scores.shape[1]
    return float(between / (between + within))


def explained(values: Tensor, returns: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns), like critic/explained_variance."""
    return float(1 - (returns - values).var() / returns.var())


def ridge(features: Tensor, targets: Tensor, fold: Tensor, penalty: float) -> Tensor:
    """Compute each row's value by a linear head that was fitted on the other folds; features [N, D]."""
    predicted = torch.zeros_like(targets)
    for number in range(FOLDS):
        seen = fold != number
        mean, std = features[seen].mean(dim=0), features[seen].std(dim=0) + 1e-6
        inputs, center = (features[seen] - mean) / std, targets[seen].mean()
        gram = inputs.T @ inputs + penalty * torch.eye(inputs.shape[1])
        weights = torch.linalg.solve(gram, inputs.T @ (targets[seen] - center))
        predicted[~seen] = (features[~seen] - mean) / std @ weights + center
    return predicted


def best_ridge(features: Tensor, targets: Tensor, fold: Tensor) -> float:
    """Return the explained variance of the best penalty."""
    return max(explained(ridge(features, targets, fold, penalty), targets) for penalty in PENALTIES)


@torch.no_grad()
def hidden_states(model: ScalarHeadModel, batches: Sequence[Rows]) -> Tensor:
    """Compute the hidden state before each completion token, [tokens, D] in the order of the masks."""
    states = []
    for batch in batches:
        rows = model.rows(*batch)
        assert rows is not None, "this model's rows need padding"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states.append(predictor_states(model.classifier.base_model, rows, rows.predictor_index).float())
    return torch.cat(states)


def batches_of(rows: Rows) -> Iterator[Rows]:
    """Yield the rows in passes."""
    for start in range(0, len(rows[0]), ROWS_PER_PASS):
        part = slice(start, start + ROWS_PER_PASS)
        yield rows[0][part], rows[1][part], rows[2][part], rows[3][part]


@torch.no_grad()
def measure(arguments: argparse.Namespace) -> dict[str, float | int | str]:
    """Sample, score and regress."""
    lines = Path(arguments.prompts).read_text(encoding="utf-8").splitlines()
    table = [json.loads(line) for line in lines[arguments.skip : arguments.skip + arguments.rows]]
    prompts = [row["prompt"] for row in table]
    sampling = SamplingConfig(
        max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature, batch_size=ROWS_PER_PASS
    )
    completer = Completer(arguments.policy, sampling, chat=load_chat_format(arguments.policy))
    samples = completer.sample(prompts, count=arguments.count, key=derive_seed(0, "critic ceiling"), greedy=False)
    rows = samples.prompt_ids, samples.prompt_mask, samples.completion_ids, samples.completion_mask
    batches = list(batches_of(rows))
    models = {"policy": load(arguments.policy, completer, head="zero")}
    if arguments.verifier is None:
        models["reward model"] = load(arguments.reward_model, completer, head=None)
        scores = torch.cat([sequence_scores(models["reward model"], *batch) for batch in batches])
    else:
        references = tuple(row for row in table for _ in range(arguments.count))
        scores = verify(arguments.verifier, completer, replace(samples, references=references))
    row, place = rows[3].nonzero(as_tuple=True)
    returns, fold = scores[row], row // arguments.count % FOLDS
    first = (place == 0).nonzero().squeeze(1)  # the token from which a row's prompt is read
    of_row = torch.zeros(len(scores), dtype=torch.long)
    of_row[row[first]] = first
    result: dict[str, float | int | str] = {
        "policy": str(arguments.policy),
        "prompts": len(prompts),
        "completions of each": arguments.count,
        "score mean": float(scores.mean()),
        "score std": float(scores.std()),
        "between prompts": prompt_share(scores.view(-1, arguments.count)),
    }
    if "reward model" in models:
        values = torch.cat([completion_values(models["reward model"], *batch)[batch[3]] for batch in batches])
        result["the reward model's own head"] = explained(values, returns)
    for name, model in models.items():
        states = hidden_states(model, batches)
        result[f"linear head on the {name}, prompt only"] = best_ridge(states[of_row[row]], returns, fold)
        result[f"linear head on the {name}, prompt and tokens so far"] = best_ridge(states, returns, fold)
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in result.items()}


def load(path: str, completer: Completer, *, head: Literal["zero"] | None) -> ScalarHeadModel:
    """Load a reward model, or a policy with a new head."""
    return load_scalar_head(model_folder(path), completer.tokenizer, new_head=head, dtype="bfloat16")


def verify(name: str, completer: Completer, samples: Completions) -> Tensor:
    """Compute the grades of samples, whose rows have the columns that the verifier reads."""
    source = validate(VerifierSource, {"type": "verifier", "name": name})
    return build_source(source, completer.tokenizer, make_engine(RunConfig()))(samples).values


def main() -> None:
    """Measure one policy and print the figures; add them to the JSON file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("policy", help="a run, or a model folder")
    score = parser.add_mutually_exclusive_group(required=True)
    score.add_argument("--reward-model", help="a run of rlhf reward, or a model folder")
    score.add_argument("--verifier", help="the name of a verifier, which reads the columns of the prompts' rows")
    parser.add_argument("--prompts", required=True, help="a JSONL file with the column prompt")
    parser.add_argument("--rows", type=int, default=256, help="prompts")
    parser.add_argument("--skip", type=int, default=1000, help="prompts to leave out at the start of the file")
    parser.add_argument("--count", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--json", type=Path, help="the file that the result is added to")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.json is not None:
        before = json.loads(arguments.json.read_text(encoding="utf-8")) if arguments.json.is_file() else []
        arguments.json.write_text(json.dumps([*before, result], indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
