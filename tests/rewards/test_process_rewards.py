"""Rewards of steps: their places, their advantages by GAE, and a model of the hub's form."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig as PeftSettings
from peft import get_peft_model
from runs import make_model, online, ppo_tree, trained
from tiny_models import EOS, completions_of, tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
)

from rlhf.algo.kl import Coefs
from rlhf.algorithms.online import Online
from rlhf.batching import extend
from rlhf.config.load import train_config, validate
from rlhf.data.paths import model_paths
from rlhf.errors import ConfigError, ModelError, RewardError
from rlhf.experience import compute_advantages
from rlhf.models.lora import quiet_peft
from rlhf.models.step_model import load_step_model
from rlhf.references import CONVERSATION, MESSAGES
from rlhf.rewards.process import FunctionProcess, ModelProcess, ProcessGrader, find_steps
from rlhf.types import Rollout


def read(ids: Sequence[int]) -> str:
    """Each id is a piece of text, as a tokenizer's."""
    return "".join(PIECES[i] for i in ids)


PIECES = ["a", "bc", "\n\n", ".\n\n", "\n", "\n\nd", " ", "e"]


@pytest.mark.parametrize(
    "ids, places, steps",
    [
        ([0, 1, 2, 7], [1, 3], ["abc", "e"]),
        ([0, 3, 7, 1], [1, 3], ["a.", "ebc"]),  # a token that ends the step and has the separator
        ([0, 5, 1], [0, 2], ["a", "dbc"]),  # a token that has the separator and begins a step
        ([0, 2, 2, 7, 2], [0, 3], ["a", "e"]),  # parts without text are no steps
        ([0, 4, 4, 1], [0, 3], ["a", "bc"]),  # a separator in two tokens
        ([0, 6, 2, 7], [0, 3], ["a", "e"]),
        ([0], [0], ["a"]),
        ([2], [], []),
        ([], [], []),
    ],
)
def test_steps_and_their_last_tokens(ids: list[int], places: list[int], steps: list[str]) -> None:
    assert find_steps(ids, read, "\n\n") == (places, steps)


def test_a_character_of_several_tokens_ends_with_the_last_of_them() -> None:
    """Bytes as tokens: the first of a character decode to a mark as long as the whole."""
    ids = list("a \U0001f642\n\nb".encode())
    assert find_steps(ids, lambda some: bytes(some).decode(errors="replace"), "\n\n") == ([5, 8], ["a \U0001f642", "b"])


def grader(function: Any, **settings: Any) -> ProcessGrader:
    section = validate(FunctionProcess, {"type": "function", "target": "mine:grade", "separator": " t9", **settings})
    return ProcessGrader(section, function, tokenizer())


def test_rewards_stand_at_the_last_token_of_each_step() -> None:
    seen = []

    def grade(prompt: str, steps: list[str], row: Mapping[str, Any]) -> list[float]:
        seen.append((prompt, steps, row["n"]))
        return [float(len(step)) for step in steps]

    batch = completions_of([[7], [8]], [[3, 4, 9, 5, EOS], [6, EOS]])
    batch = replace(batch, references=({"prompt": "asked", "n": 1}, {"n": 2}))
    rewards = grader(grade, weight=0.5)(batch)
    assert seen == [("asked", ["t3 t4", "t5"], 1), ("t8", ["t6"], 2)]
    assert rewards.tolist() == [[0, 2.5, 0, 1, 0], [1, 0, 0, 0, 0]]


def test_a_function_gets_the_prompt_of_the_row(tmp_path: Path) -> None:
    """A text without chat template; the messages of a conversation, and a row without a prompt, as they were read."""
    path = tmp_path / "grades.py"
    path.write_text("def grade(prompt, steps, row):\n    return [float(len(prompt + row.get('prompt', '')))]\n")
    section = validate(FunctionProcess, {"type": "function", "target": f"{path}:grade"})
    grade = section.build(lambda _: pytest.fail("no model"))
    messages = [{"role": "user", "content": "abc"}]
    assert grade("<u>abc", ["x"], {"prompt": "<u>abc", MESSAGES: messages}) == [6.0]
    assert grade("<u>abc", ["x"], {"prompt": "<u>abc", MESSAGES: messages, CONVERSATION: True}) == [12.0]
    assert grade("abcd", ["x"], {}) == [4.0]


def test_a_function_may_reward_each_token() -> None:
    seen = []

    def grade(prompt: str, tokens: list[str], row: Mapping[str, Any]) -> list[float]:
        seen.append(tokens)
        return [float(number) for number in range(len(tokens))]

    batch = completions_of([[7], [8]], [[3, 9, 5, EOS], [6, EOS]])
    rewards = grader(grade, per="token", weight=2.0)(replace(batch, references=({}, {})))
    assert seen == [["t3", "t9", "t5", ""], ["t6", ""]]  # a special token has no text
    assert rewards.tolist() == [[0, 2, 4, 6], [0, 2, 0, 0]]


@pytest.mark.parametrize(
    "grades",
    [[1.0], [1.0, float("nan")], [], None, [None, 1.0], [[1.0, 2.0], 3.0], {1: 0.5, 2: 0.5}, "12", b"ab", ["1", "2"]],
)
def test_a_step_without_a_grade_is_an_error(grades: Any) -> None:
    batch = completions_of([[7]], [[3, 9, 5, EOS]])
    with pytest.raises(RewardError, match=r"for 2 steps .*give one finite number for each step"):
        grader(lambda prompt, steps, row: grades)(replace(batch, references=({},)))


def rollout_with_steps() -> Rollout:
    """Two completions with the scores 10 and 4; the first one has the step rewards 2.5 and 1."""
    batch = completions_of([[7], [8]], [[3, 4, 9, 5], [6, EOS]])
    zeros = torch.zeros(batch.completion_ids.shape)
    steps = torch.tensor([[0.0, 2.5, 0.0, 1.0], [0.0, 0.0, 9.0, 9.0]])  # nothing counts behind a completion's end
    return extend(
        Rollout,
        batch,
        scores=torch.tensor([10.0, 4.0]),
        baselines=torch.zeros(2),
        logprobs=zeros,
        ref_logprobs=zeros,
        values=zeros,
        hinted=torch.zeros(2, dtype=torch.bool),
        process_rewards=steps,
    )


def advantages_of(advantage: dict[str, Any], **sections: Any) -> list[list[float]]:
    kl = {"placement": "none", "coef": 0.0}
    tree = {"advantage": advantage, "policy_loss": {"type": "clip"}, "kl": kl, **sections}
    coefs = Coefs(kl=0.0, penalty=0.0)
    experience = compute_advantages(rollout_with_steps(), Online.model_validate(tree), coefs)
    return cast(list[list[float]], experience.advantages.tolist())


def test_gae_credits_what_led_to_a_step() -> None:
    """By hand, V = 0: a token's advantage is the sum of all rewards from there on, the score among them."""
    critic = {"value_loss": {"clip_eps": None}}
    whole = advantages_of({"type": "gae", "whiten": False}, **critic)
    assert whole == [[13.5, 13.5, 11, 11], [4, 4, 0, 0]]
    own = advantages_of({"type": "gae", "gae_lambda": 0.0, "whiten": False}, **critic)
    assert own == [[0, 2.5, 0, 11], [0, 4, 0, 0]]


def test_reinforce_credits_what_led_to_a_step() -> None:
    assert advantages_of({"type": "batch_whiten", "whiten": False}) == [[13.5, 13.5, 11, 11], [4, 4, 0, 0]]


STEPS = """
def grade(prompt, steps, row):
    return [float(step.split().count("good")) for step in steps]
"""


def test_a_run_is_trained_on_them(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    process = {"type": "function", "target": str(tmp_path / "steps.py") + ":grade", "separator": " red", "weight": 2.0}
    tree = ppo_tree(tmp_path, reward={"process": process})
    run = trained(tree, "schedule.steps=1", "algorithm.kl.coef=0", "eval.every=0")
    row = run.session.recorder.folder.read_metrics()[-1]
    assert row["process/reward"] > 0
    assert row["process/steps"] > 0
    # the first values are 0: the mean return of a token is the rest of the score and of the rewards of steps
    assert row["critic/return"] > row["score/mean"] + 0.1 * row["process/reward"]
    assert row["reward/kl_penalty"] == pytest.approx(0.0, abs=1e-5)  # rewards of steps are no penalty
    for preset in ("online_dpo", "rejection_sampling", "dapo"):
        with pytest.raises(ConfigError, match=r"reward\.process rewards steps, and this algorithm chooses completions"):
            online(tree, f"algorithm.preset={preset}")


def token_classifier(folder: Path) -> LlamaForTokenClassification:
    make_model(folder)
    config = LlamaConfig.from_pretrained(folder, num_labels=2)
    torch.manual_seed(1)
    model = LlamaForTokenClassification(config).eval()
    model.save_pretrained(folder)
    return model


def test_a_token_classification_model_grades_steps(tmp_path: Path) -> None:
    model = token_classifier(tmp_path / "prm")
    settings = {"type": "model", "path": str(tmp_path / "prm"), "model_separator": "two"}
    grade = load_step_model(validate(ModelProcess, settings), device=torch.device("cpu"))
    given = grade("red one", ["good good", "bad"], {})
    ids = torch.tensor([[1, 6, 8, 4, 4, 9, 5, 9]])  # <bos> red one | good good two | bad two
    expected = model(input_ids=ids).logits.softmax(dim=2)[0, [5, 7], 1]
    assert given == pytest.approx(expected.tolist(), abs=1e-6)
    with pytest.raises(ModelError, match=r"reward.process.label is 2, and the model has 2 classes"):
        load_step_model(validate(ModelProcess, {**settings, "label": 2}), device=torch.device("cpu"))
    with pytest.raises(ModelError, match="no token-classification model could be loaded"):
        load_step_model(validate(ModelProcess, {**settings, "path": str(tmp_path / "no")}), device=torch.device("cpu"))


def grade_of(prompt: str, row: Mapping[str, Any], folder: Path) -> list[float]:
    section = validate(ModelProcess, {"type": "model", "path": str(folder), "model_separator": "two"})
    return list(load_step_model(section, device=torch.device("cpu"))(prompt, ["good"], row))


def test_a_model_reads_the_prompt_as_its_training_does(tmp_path: Path) -> None:
    """Without the marks of the policy's chat template; several messages have no other text."""
    token_classifier(tmp_path / "prm")
    plain = grade_of("red one", {}, tmp_path / "prm")
    marked = grade_of("blue red one two", {}, tmp_path / "prm")
    one, two = ([{"role": "user", "content": "red one"}] * count for count in (1, 2))
    system = [{"role": "system", "content": "blue"}, *one]
    assert plain != marked
    for row, expected in [
        ({MESSAGES: one}, plain),
        ({MESSAGES: system}, plain),
        ({MESSAGES: one, CONVERSATION: True}, plain),
        ({MESSAGES: two, CONVERSATION: True}, marked),
    ]:
        assert grade_of("blue red one two", {"prompt": "blue red one two", **row}, tmp_path / "prm") == expected


def test_a_solution_longer_than_the_models_context_is_refused(tmp_path: Path) -> None:
    token_classifier(tmp_path / "prm")  # whose context is 64: <bos>, 61 words, the step and its separator fill it
    assert len(grade_of("red " * 61, {}, tmp_path / "prm")) == 1
    with pytest.raises(RewardError, match=r"have 65 tokens, .* context is 64: lower"):
        grade_of("red " * 62, {}, tmp_path / "prm")


def refusal_of(path: Path) -> str:
    with pytest.raises(ModelError, match=r"^reward\.process\.path: ") as caught:
        load_step_model(validate(ModelProcess, {"type": "model", "path": str(path)}), device=torch.device("cpu"))
    return str(caught.value)


def test_a_model_without_a_head_for_steps_is_refused(tmp_path: Path) -> None:
    """transformers would draw the missing head at random, and a run would train on noise."""
    make_model(tmp_path / "lm")
    assert "its weights lack score.bias, score.weight" in refusal_of(tmp_path / "lm")
    for task, kind in [("CAUSAL_LM", AutoModelForCausalLM), ("TOKEN_CLS", AutoModelForTokenClassification)]:
        base = kind.from_pretrained(tmp_path / "lm")
        with quiet_peft():
            model = get_peft_model(base, PeftSettings(task_type=task, target_modules=["q_proj"]))
        model.save_pretrained(tmp_path / task)
        tokenizer().save_pretrained(tmp_path / task)
        assert "is an adapter, whose head transformers does not use" in refusal_of(tmp_path / task)


def test_a_classifier_of_whole_answers_is_named_as_such(tmp_path: Path) -> None:
    """Also one whose head has the names and shapes of a token classifier's, as BERT's has."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    start = LlamaConfig.from_pretrained(make_model(tmp_path / "lm"))
    for name, classes, model in [
        ("one", 1, LlamaForSequenceClassification),
        ("two", 2, LlamaForSequenceClassification),
        ("bert", 2, BertForSequenceClassification),
    ]:
        config = BertConfig(vocab_size=16, num_labels=classes, **small)
        if model is LlamaForSequenceClassification:
            config = copy.deepcopy(start)
            config.num_labels = classes
        model(config).save_pretrained(tmp_path / name)
        tokenizer().save_pretrained(tmp_path / name)
        text = refusal_of(tmp_path / name)
        assert f"a classifier of whole answers ({model.__name__})" in text
        assert ("reward.source.path" in text) == (classes == 1)


def test_the_model_is_among_the_models_of_a_run(tmp_path: Path) -> None:
    """A missing one is told before the run, and a comparison keeps its digest."""
    tree = ppo_tree(tmp_path, reward={"process": {"type": "model", "path": "runs/steps"}})
    assert ("reward.process.path", "runs/steps") in list(model_paths(train_config(tree)))


def test_a_run_with_such_a_model(tmp_path: Path) -> None:
    token_classifier(tmp_path / "prm")
    process = {"type": "model", "path": str(tmp_path / "prm"), "separator": " red", "model_separator": "two"}
    run = trained(ppo_tree(tmp_path, reward={"process": process}), "schedule.steps=1", "eval.every=0")
    row = run.session.recorder.folder.read_metrics()[-1]
    assert 0 < row["process/reward"] < 7
