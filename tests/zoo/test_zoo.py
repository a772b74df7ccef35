"""Every family of the table, from its published form to its export: its outputs equal transformers'."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import CONVERSATION, FAMILIES, ON, Family
from folders import vocabulary, write_folder
from tiny_models import completions_of
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from zoo_checks import (
    COMPLETIONS,
    PROMPTS,
    check_greedy,
    expected_logprobs,
    our_logprobs,
    plain_model,
    plain_tokenizer,
    published_logprobs,
    published_model,
    reasons_of,
    ways_of,
)
from zoo_runs import Trained, train_one_step, train_reward_model

from rlhf.config.weights import LoraConfig
from rlhf.data.tokenizer import load_tokenizer, make_encoder, pad_id
from rlhf.models.backbone import CausalLM, add_lora, eos_ids, load_causal_lm
from rlhf.models.scalar_head import load_scalar_head, sequence_scores
from rlhf.tracking.exported import read_export

each_family = pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
Folder = Callable[[Family], Path]


def every_other_family(first: int) -> pytest.MarkDecorator:
    """All families, of which the default run has every other one."""
    marks = [[] if place % 2 == first else [pytest.mark.slow] for place in range(len(FAMILIES))]
    cases = [pytest.param(family, id=family.name, marks=mark) for family, mark in zip(FAMILIES, marks, strict=True)]
    return pytest.mark.parametrize("family", cases)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Make a family's folder, once a session."""
    root = tmp_path_factory.mktemp("zoo")

    def make(family: Family) -> Path:
        path = root / family.name
        return path if path.is_dir() else write_folder(family, path)

    return make


@each_family
def test_it_loads_as_published(family: Family, folder_of: Folder) -> None:
    folder, ids = folder_of(family), vocabulary(family.tokens)
    published = {path.name: path.read_bytes() for path in folder.iterdir()}
    tokenizer, model = load_tokenizer(str(folder)), load_causal_lm(str(folder))
    assert tokenizer.get_vocab() == ids == plain_tokenizer(folder).get_vocab()
    assert tokenizer.pad_token == plain_tokenizer(folder).pad_token
    assert pad_id(tokenizer) == ids[family.pads_with]
    assert set(eos_ids(model, tokenizer)) == {ids[token] for token in (family.tokens.eos, *family.ends)}
    assert model.get_input_embeddings().num_embeddings == len(ids) + family.tokens.spare_rows  # type: ignore[operator]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == published


@each_family
def test_texts_become_the_ids_that_transformers_makes(family: Family, folder_of: Folder) -> None:
    tokenizer, plain = load_tokenizer(str(folder_of(family))), plain_tokenizer(folder_of(family))
    encoder = make_encoder(tokenizer, "none")
    text = encoder.render("red one")
    assert encoder.prompts([text]) == [plain("red one")["input_ids"]]
    assert [plain.convert_tokens_to_ids(token) for token in [family.prefix] if token] == list(encoder.prefix)
    if family.template is None:
        whole, head = plain("red one")["input_ids"], plain("red")["input_ids"]
        assert whole[: len(head)] == head
        continued = encoder.completions([encoder.render("red", [" one"])], 0)
        assert continued == [[*whole[len(head) :], plain.eos_token_id]]
        return
    encoder = make_encoder(tokenizer, "auto")
    asked, answered = encoder.render(CONVERSATION), encoder.render(CONVERSATION[:1], ["Hello"])
    assert asked.prompt == family.chat
    assert encoder.prompts([asked]) == [
        plain.apply_chat_template(CONVERSATION, add_generation_prompt=True, return_dict=False)
    ]
    prompt, completion = encoder.prompts([answered])[0], encoder.completions([answered], 0)[0]
    assert completion[-1] == vocabulary(family.tokens)[family.turn_end or family.tokens.eos]
    learned = [*prompt, *(completion if family.turn_end else completion[:-1])]
    whole = plain.apply_chat_template(CONVERSATION[:2], return_dict=False)
    assert learned == whole[: len(learned)]


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "lora"])
@each_family
def test_fast_ways_are_those_of_the_table(family: Family, adapter: bool, folder_of: Folder) -> None:
    folder = folder_of(family)
    model: CausalLM = load_causal_lm(str(folder))
    if adapter:
        model = add_lora(model, LoraConfig())
    assert ways_of(model, load_tokenizer(str(folder))) == {
        name: reason == ON for name, reason in vars(family.fast).items()
    }
    for name, reason in reasons_of(model).items():
        assert reason == getattr(family.fast, name)


@every_other_family(0)  # sampling/test_fast.py compares the samplers, for every kind of layer
def test_greedy_completions_are_those_of_transformers(family: Family, folder_of: Folder) -> None:
    folder = folder_of(family)
    check_greedy(load_causal_lm(str(folder)), published_model(folder), load_tokenizer(str(folder)))


@each_family
def test_log_probabilities_are_those_of_transformers(family: Family, folder_of: Folder) -> None:
    folder = folder_of(family)
    model, fill = load_causal_lm(str(folder)).train(), pad_id(load_tokenizer(str(folder)))
    ours = our_logprobs(model, fill)
    assert torch.allclose(ours, published_logprobs(folder), atol=1e-4)
    assert ours.std() > 0.2, "random weights say something"


# One of four algorithms trains each family, in turn; the rest are slow. Their use of a family is the same: they
# sample from it, ask it for log-probabilities and take their gradient. Besides, GRPO trains an adapter of each, or a
# reward model, like a critic, is trained of it below.
CASES = [
    pytest.param(family, algorithm, id=f"{family.name}-{algorithm}", marks=[pytest.mark.slow] if place % 4 else [])
    for index, family in enumerate(FAMILIES)
    for place, algorithm in enumerate(["sft", "dpo", "grpo", "ppo"], index)
]


@pytest.mark.parametrize(("family", "algorithm"), CASES)
def test_one_step_trains_and_exports(family: Family, algorithm: str, folder_of: Folder, tmp_path: Path) -> None:
    folder = folder_of(family)
    trained = train_one_step(family, folder, tmp_path / "run", algorithm)
    check_step(trained)
    row = trained.metrics[-1]
    if algorithm == "sft":
        assert 1.0 < row["loss/sft"] < 20.0
    if algorithm == "dpo":
        assert row["loss/preference"] == pytest.approx(math.log(2), abs=1e-5)
    if algorithm in ("ppo", "grpo"):
        assert row["policy/first_ratio_deviation"] < 1e-3
    check_export(trained, folder)


@every_other_family(0)
def test_one_step_trains_an_adapter_and_exports_a_whole_model(
    family: Family, folder_of: Folder, tmp_path: Path
) -> None:
    folder = folder_of(family)
    trained = train_one_step(family, folder, tmp_path / "run", "grpo", policy={"lora": {"r": 2}, "lr": 1e-1})
    check_step(trained, share=0.1)
    exported, published = plain_model(trained.folder), published_model(folder)
    assert exported.state_dict().keys() == published.state_dict().keys()
    assert (expected_logprobs(exported) - published_logprobs(folder)).abs().max() > 1e-3


def check_step(trained: Trained, *, share: float = 0.5) -> None:
    """All numbers of the step are finite, and more than a `share` of the tensors have moved."""
    row = trained.metrics[-1]
    assert row["step"] == 1
    assert all(value is not None and math.isfinite(value) for value in row.values())
    assert row["policy/grad_norm"] > 0
    after = trained.module.state_dict()
    moved = [name for name, before in trained.before.items() if not torch.equal(before, after[name])]
    assert len(moved) > share * len(after)


def check_export(trained: Trained, folder: Path) -> None:
    """The export has the published shapes and settings, and gives the trained outputs in transformers."""
    exported, published = plain_model(trained.folder), published_model(folder)
    shapes = {name: weight.shape for name, weight in published.state_dict().items()}
    assert {name: weight.shape for name, weight in exported.state_dict().items()} == shapes
    record = read_export(trained.folder.parent)
    assert record is not None
    check_weights(exported, trained, getattr(torch, record.dtype))
    expected = expected_logprobs(exported)
    assert (expected - published_logprobs(folder)).abs().max() > 1e-3, "the step is in the export"
    tokenizer, before = plain_tokenizer(trained.folder), plain_tokenizer(folder)
    assert tokenizer.get_vocab() == before.get_vocab()
    assert tokenizer.special_tokens_map == before.special_tokens_map
    assert tokenizer.chat_template == before.chat_template
    assert tokenizer("red one good")["input_ids"] == before("red one good")["input_ids"]
    for name in ("config.json", "generation_config.json"):
        written, start = read(trained.folder / name), read(folder / name)
        assert written == (start | {"dtype": record.dtype} if "dtype" in start else start)
    ours = our_logprobs(load_causal_lm(str(trained.folder)), pad_id(load_tokenizer(str(trained.folder))))
    assert torch.allclose(ours, expected, atol=1e-4)


def check_weights(exported: PreTrainedModel, trained: Trained, dtype: torch.dtype) -> None:
    """The weights in the files are the trained ones, in the dtype that the run chose."""
    live = trained.module.state_dict()
    for name, weight in exported.state_dict().items():
        assert torch.equal(weight, live[name].to(dtype).float()), name


def read(path: Path) -> dict[str, object]:
    """Read a configuration without the keys that only name its writer."""
    content: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return {key: value for key, value in content.items() if key not in ("transformers_version", "_name_or_path")}


@every_other_family(1)
def test_a_reward_model_of_one_step_exports(family: Family, folder_of: Folder, tmp_path: Path) -> None:
    trained = train_reward_model(family, folder_of(family), tmp_path / "run")
    check_step(trained)
    plain, info = AutoModelForSequenceClassification.from_pretrained(
        trained.folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    rows = len(vocabulary(family.tokens)) + family.tokens.spare_rows
    assert plain.get_input_embeddings().num_embeddings == rows
    check_scores(trained.folder, plain.eval())


@torch.no_grad()
def check_scores(folder: Path, plain: PreTrainedModel) -> None:
    """The scores of a reward model equal plain transformers', calibrated, for texts that end with EOS."""
    tokenizer = load_tokenizer(str(folder))
    model = load_scalar_head(str(folder), tokenizer, new_head=None).eval()
    completions = [[*completion, tokenizer.eos_token_id] for completion in COMPLETIONS]
    batch = completions_of(PROMPTS, completions)
    fields = batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask
    mean, std = plain.config.score_mean, plain.config.score_std
    for score, prompt, completion in zip(sequence_scores(model, *fields), PROMPTS, completions, strict=True):
        raw = plain(input_ids=torch.tensor([[*prompt, *completion]]), use_cache=False).logits
        assert (float(raw) - mean) / std == pytest.approx(float(score), abs=1e-3)
