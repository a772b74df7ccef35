"""A trained reward model as PPO sees it: the policy's ids, or its text encoded again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rm_cases import made_model
from tiny_models import BOS, COMPLETIONS, EOS, PAD, PROMPTS, completions_of, padded, ragged, saved, tiny, tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from reward_model.server import parse_request
from reward_model.source import OWN_TEMPLATE, RewardModelSource, render_for_reward_model, truncate_row
from rlhf.batching import concat
from rlhf.data.conversation import tools_of
from rlhf.data.tokenizer import make_encoder, shares_vocabulary
from rlhf.errors import ModelError, RewardError
from rlhf.factory.rewards import build_source
from rlhf.models.scalar_head import ScalarHeadModel, sequence_scores
from rlhf.references import MESSAGES
from rlhf.rewards.model import ModelSource
from rlhf.rewards.source import ShardedReward
from rlhf.runtime.engine import Engine
from rlhf.types import Completions


def fields(batch: Completions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask


def source(model: ScalarHeadModel, policy: PreTrainedTokenizerFast | None = None, size: int = 2) -> RewardModelSource:
    return RewardModelSource(
        model, tokenizer(), policy_tokenizer=policy or tokenizer(), micro_batch_size=size, dtype="float64"
    )


def other_tokenizer(*, pad: str = "[PAD]") -> PreTrainedTokenizerFast:
    """The same words under other ids, between other special tokens, and never a BOS by itself."""
    words = {f"t{i}": 40 - i for i in range(3, 23)} | {"<|end|>": 0, pad: 1}
    backend = Tokenizer(WordLevel(words, unk_token=pad))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=pad, eos_token="<|end|>")


def with_bos() -> PreTrainedTokenizerFast:
    """The reward model's tokenizer, putting <s> before every text."""
    made = tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return made


def bytewise(*special: str) -> PreTrainedTokenizerFast:
    """A token a byte, after the special tokens, of which the first is EOS."""
    tokens = [*special, *sorted(ByteLevel.alphabet())]
    backend = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0])


@pytest.mark.parametrize("size", [1, 3, 64])
def test_the_scores_are_the_models_in_the_original_order(size: int, tmp_path: Path) -> None:
    model = made_model(tmp_path)
    model.calibrate(0.3, 2.0)
    scores = source(model, size=size)(ragged(fill=17)).values
    assert scores.dtype == torch.float32
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        expected = sequence_scores(model, *fields(completions_of([prompt], [completion])))
        torch.testing.assert_close(scores[i].double(), expected[0], rtol=0, atol=1e-6)


def test_the_model_is_frozen(tmp_path: Path) -> None:
    model = made_model(tmp_path)
    source(model)
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_tokenizers_agree_up_to_a_pad_token_of_the_policys(tmp_path: Path) -> None:
    grown = tokenizer()
    grown.add_special_tokens({"pad_token": "[PAD]"})
    assert shares_vocabulary(grown, tokenizer())
    grown.add_tokens(["<tool>"])
    assert not shares_vocabulary(grown, tokenizer())
    assert not shares_vocabulary(other_tokenizer(), tokenizer())
    assert not shares_vocabulary(tokenizer(24), tokenizer(23))
    assert shares_vocabulary(tokenizer(23), tokenizer(24))


def test_a_pad_token_the_reward_model_has_no_row_for_is_never_looked_up(tmp_path: Path) -> None:
    grown = tokenizer()
    grown.add_special_tokens({"pad_token": "[PAD]"})
    assert grown.pad_token_id == 23  # the reward model has rows 0 .. 22
    model = made_model(tmp_path)
    scores = source(model, grown)(ragged(fill=23)).values
    assert torch.equal(scores, source(model)(ragged()).values)
    sampled = replace(ragged(), completion_ids=torch.where(ragged().completion_ids == PAD, 23, ragged().completion_ids))
    assert source(model, grown)(sampled).values.isfinite().all()


@pytest.mark.parametrize("ours", [tokenizer, with_bos])
def test_another_tokenizers_text_is_encoded_again(ours, tmp_path: Path) -> None:
    policy, model = other_tokenizer(), made_model(tmp_path)
    texts = [([5, 7, 9], [3, 14]), ([4], [15, 9, 6, 5]), ([8, 8], [10])]
    finished = [True, False, True]

    def theirs(ids: list[int]) -> list[int]:
        return [40 - i for i in ids]

    ends = [[0] if done else [] for done in finished]
    asked = completions_of(
        [[1, *theirs(prompt)] for prompt, _ in texts],  # a special token of the policy's own goes
        [[*theirs(text), *end] for (_, text), end in zip(texts, ends, strict=True)],
    )
    asked = replace(asked, finished=torch.tensor(finished))
    scores = RewardModelSource(model, ours(), policy_tokenizer=policy, micro_batch_size=2, dtype="float64")(
        asked
    ).values
    bos = [1] if ours is with_bos else []
    expected = completions_of(
        [[*bos, *prompt] for prompt, _ in texts],
        [[*text, *([EOS] if done else [])] for (_, text), done in zip(texts, finished, strict=True)],
    )
    torch.testing.assert_close(scores.double(), sequence_scores(model, *fields(expected)).detach(), rtol=0, atol=1e-6)


def test_another_tokenizers_text_is_read_once_and_as_every_reward_reads_it(tmp_path: Path) -> None:
    """A prompt that ended inside a character was read twice, and channels as one word."""
    policy, own = bytewise("<e>", "<|channel|>", "<|message|>"), bytewise("</s>")
    judge = RewardModelSource(made_model(tmp_path), own, policy_tokenizer=policy, micro_batch_size=2)

    def read(prompt: list[int], completion: list[int]) -> list[str]:
        batch, _ = judge.prepare(completions_of([prompt], [completion]))
        return [own.decode(ids[0]) for ids in (batch.prompt_ids, batch.completion_ids)]

    ids = policy.encode("a é!")
    assert read(ids[:3], ids[3:])[1].endswith("!")
    assert "a" not in read(ids[:3], ids[3:])[1]
    answer = "<|channel|>analysis<|message|>Easy.<|channel|>final<|message|>4"
    assert read(policy.encode("2+2="), policy.encode(answer)) == ["2+2=", "4"]


def test_an_empty_completion_is_scored(tmp_path: Path) -> None:
    model = made_model(tmp_path)
    policy = other_tokenizer()
    asked = replace(completions_of([[35, 33]], [[0]]), finished=torch.tensor([True]))
    scores = source(model, policy)(asked).values
    expected = sequence_scores(model, *fields(completions_of([[5, 7]], [[EOS]])))
    torch.testing.assert_close(scores.double(), expected.detach(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scores_that_are_no_numbers_are_refused(value: float, tmp_path: Path) -> None:
    model = made_model(tmp_path)
    nn.init.constant_(model.head.weight, value)
    with pytest.raises(RewardError, match="4 of 4 completions"):
        source(model)(ragged())


def test_a_row_beyond_the_context_is_read_without_its_beginning_and_counted(tmp_path: Path) -> None:
    """It stopped the run. The prompt's oldest tokens go, a BOS in front stays, and the completion is whole."""
    model = made_model(tmp_path, "gpt2")
    ids, mask = padded([[5] * 60], left=False)
    long = replace(
        completions_of([[BOS, 6, 7, 8, 9, 4]], [[3]]),
        completion_ids=ids,
        completion_mask=mask,
        sampler_logprobs=torch.zeros(ids.shape),
    )
    scores = source(model)(concat([long, ragged()]))
    short = completions_of([[BOS, 8, 9, 4]], [[5] * 60])
    assert scores.values[0].item() == pytest.approx(source(model)(short).values.item(), abs=1e-6)
    torch.testing.assert_close(scores.values[1:], source(model)(ragged()).values, rtol=0, atol=1e-6)
    assert scores.parts["cut"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_what_of_a_row_is_read() -> None:
    assert truncate_row([1, 6, 7, 8], [3, 4], 6, bos=1) == ([1, 6, 7, 8], [3, 4])
    assert truncate_row([1, 6, 7, 8], [3, 4], 5, bos=1) == ([1, 7, 8], [3, 4])
    assert truncate_row([9, 6, 7, 8], [3, 4], 5, bos=1) == ([6, 7, 8], [3, 4])
    assert truncate_row([1, 6, 7, 8], [2, 3, 4], 4, bos=1) == ([1], [2, 3, 4])
    assert truncate_row([1, 6, 7, 8], [2, 3, 4, 5, 6], 4, bos=1) == ([1], [4, 5, 6])
    assert truncate_row([6, 7, 8], [2, 3, 4, 5, 6], 4, bos=None) == ([8], [4, 5, 6])


def test_a_folder_is_loaded_with_its_calibration(tmp_path: Path) -> None:
    model = made_model(tmp_path / "start")
    model.calibrate(-0.4, 0.5)
    model.save(tokenizer(), tmp_path / "rm")
    loaded = RewardModelSource.load(
        str(tmp_path / "rm"), tokenizer(), device=torch.device("cpu"), micro_batch_size=2, dtype="float64"
    )
    assert torch.equal(loaded(ragged()).values, source(model)(ragged()).values)
    assert loaded(ragged()).parts["cut"].tolist() == [0.0] * 4


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a reward model"):
        RewardModelSource.load(
            saved(tiny(), tmp_path), tokenizer(), device=torch.device("cpu"), micro_batch_size=2, dtype="float64"
        )


def test_another_familys_reward_model_reads_conversations_by_its_own_template(tmp_path: Path) -> None:
    own, model = tokenizer(), made_model(tmp_path)
    own.chat_template = (
        "{% for m in messages %}{{ 't9 ' if m.role == 'user' else 't10 ' }}{{ m.content }} </s> {% endfor %}"
    )
    own.chat_template += "{% if add_generation_prompt %}t10 {% endif %}"
    asked = completions_of([[38, 35, 0]] * 2, [[34, 0]] * 2)  # as the policy's template wrote it: no word is t5
    conversation = {"prompt_messages": [{"role": "user", "content": "t5 t7"}]}
    asked = replace(asked, finished=torch.tensor([True, False]), references=(conversation, conversation))
    judge = RewardModelSource(model, own, policy_tokenizer=other_tokenizer(), micro_batch_size=2, dtype="float64")
    assert judge.note == "The reward model reads text, not token ids: conversations by its own chat template"
    expected = completions_of([[9, 5, 7, EOS, 10]] * 2, [[6, EOS], [6]])
    scores = judge(asked).values
    torch.testing.assert_close(scores.double(), sequence_scores(model, *fields(expected)).detach(), rtol=0, atol=1e-6)
    plain = source(model, other_tokenizer())
    assert plain.note == "The reward model reads text, not token ids: plain text, for it has no chat template"
    assert source(model).note == ""
    assert not torch.equal(plain(asked).values, scores)


def test_a_text_with_the_reward_model_s_turns_in_it_gets_no_other_template() -> None:
    """The policy's text of a conversation may begin alike, for templates resemble each other: its messages count."""
    own = tokenizer()
    own.chat_template = (
        "{% for m in messages %}{{ 't9 ' if m.role == 'user' else 't10 ' }}{{ m.content }} </s> {% endfor %}"
        "{% if add_generation_prompt %}t10 {% endif %}"
    )
    encoder = make_encoder(own, OWN_TEMPLATE)
    turns = "t9 t5 </s> t10 "

    def rendered(prompt: str, content: str) -> tuple[str, bool]:
        made = render_for_reward_model(encoder, prompt, "t6", [{"role": "user", "content": content}])
        return made.prompt, made.templated

    assert rendered(turns, turns) == (turns, False)
    assert rendered("t5", "t5") == (turns, True)
    assert rendered("t9 t5 t11 ", "t5") == (turns, True)


@pytest.mark.parametrize("chat", [{}, {"chat_template": "none"}, {"system": "t9"}])
def test_a_run_of_another_vocabulary_reads_conversations_as_it_was_trained_to(
    chat: dict[str, str], tmp_path: Path
) -> None:
    """It read them by its tokenizer's template, without regard to data.chat_template and data.system."""
    own, model = tokenizer(), made_model(tmp_path)
    own.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    model.save(own, tmp_path / "rm/model")
    (tmp_path / "rm/config.yaml").write_text(json.dumps({"data": chat}))
    config = ModelSource(path=str(tmp_path / "rm"))
    built = build_source(config, other_tokenizer(), Engine(torch.device("cpu")))
    assert isinstance(built, ShardedReward)
    judge = built.source
    assert isinstance(judge, RewardModelSource)
    asked = completions_of([[38, 35, 0]], [[34, 0]])
    asked = replace(asked, references=({"prompt_messages": [{"role": "user", "content": "t5 t7"}]},))
    read, _ = judge.prepare(asked)
    expected = {"none": [5], "auto": [5, 7]}[chat.get("chat_template", "auto")]
    assert read.prompt_ids[0].tolist() == [9] * ("system" in chat) + expected


def test_a_template_that_refuses_the_conversation_is_told(tmp_path: Path) -> None:
    own = tokenizer()
    own.chat_template = "{{ raise_exception('no system prompts') }}"
    asked = replace(
        completions_of([[38]], [[34, 0]]),
        references=({"prompt_messages": [{"role": "system", "content": "t5"}, {"role": "user", "content": "t5"}]},),
    )
    judge = RewardModelSource(made_model(tmp_path), own, policy_tokenizer=other_tokenizer(), micro_batch_size=2)
    with pytest.raises(RewardError, match=r"no system prompts \(the reward model's template\)"):
        judge(asked)


def test_a_reward_model_of_another_vocabulary_reads_the_tools() -> None:
    own = tokenizer()
    own.chat_template = (
        "{% for t in tools or [] %}t11 {% endfor %}{% for m in messages %}{{ m.content }} </s> {% endfor %}"
    )
    encoder, asked = make_encoder(own, OWN_TEMPLATE), [{"role": "user", "content": "t5"}]
    tools = tools_of({"tools": [{"type": "function", "function": {"name": "f"}}]})
    assert render_for_reward_model(encoder, "t5", "t6", asked, tools).prompt.startswith("t11 t5")
    request = {"prompts": ["t5"], "completions": ["t6"], "references": [{MESSAGES: asked, "tools": [*tools]}]}
    assert parse_request(request).tools == (tools,)
    assert parse_request({**request, "references": [{MESSAGES: asked}]}).tools == ((),)
