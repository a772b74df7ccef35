"""The work: models of random weights, data from one seed, and the sizes of each trainer's step. Needs no rlhf."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

TRAINERS = ("sft", "reward", "dpo", "dpo_cached", "grpo", "rloo", "ppo")
SHAPES = {  # layers, width, heads, vocabulary
    "toy": (2, 64, 2, 256),
    "tiny": (4, 192, 4, 2048),
    "small": (8, 512, 8, 8192),
    "0.5b": (24, 896, 14, 151936),
    "1.5b": (28, 1536, 12, 151936),
}
PROMPT = (16, 64)  # tokens, drawn evenly
COMPLETION = (16, 96)  # of the data that is not sampled
NEW_TOKENS = 64
LR = 1e-5
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")


@dataclass(frozen=True)
class Sizes:
    """What one step is made of."""

    rows: int = 32  # of SFT; pairs of DPO and the reward model
    prompts: int = 8  # of GRPO and RLOO
    group: int = 8
    ppo_prompts: int = 64
    ppo_epochs: int = 4
    ppo_minibatches: int = 4
    new_tokens: int = NEW_TOKENS


@dataclass(frozen=True)
class Job:
    """One trainer for so many steps, the first of which is a warm-up."""

    trainer: str
    steps: int
    folder: str
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 2
    sizes: Sizes = Sizes()
    whole: bool = False  # our passes have all rows of an optimizer step, as TRL's do, instead of our default's 16
    overrides: dict[str, Any] = field(default_factory=dict)  # of our configuration

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Job:
        """What `write` wrote."""
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{**content, "sizes": Sizes(**content["sizes"])})


def llama_config(shape: str) -> LlamaConfig:
    """The model of a shape, embeddings tied."""
    layers, width, heads, vocabulary = SHAPES[shape]
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=round(width * 8 / 3 / 64) * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def make_work(folder: Path, shape: str, steps: int, sizes: Sizes) -> int:
    """policy/, reward/, prompts.jsonl, pairs.jsonl, sft.jsonl in `folder`; returns the policy's parameters."""
    config = llama_config(shape)
    vocabulary = config.vocab_size
    tokenizer = _tokenizer(vocabulary)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for name, each in (("policy", model), ("reward", LlamaForSequenceClassification(_one_label(config)))):
        each.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rng = random.Random(0)
    rows = steps * max(sizes.rows, sizes.ppo_prompts, sizes.prompts)
    prompts = [_text(rng, PROMPT, vocabulary) for _ in range(rows)]
    sides = [[_text(rng, COMPLETION, vocabulary) for _ in range(rows)] for _ in range(2)]
    _write(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    _write(
        folder / "pairs.jsonl",
        [{"prompt": p, "chosen": a, "rejected": b} for p, a, b in zip(prompts, *sides, strict=True)],
    )
    _write(folder / "sft.jsonl", [{"prompt": p, "completion": a} for p, a in zip(prompts, sides[0], strict=True)])
    return sum(parameter.numel() for parameter in model.parameters())


def _one_label(config: LlamaConfig) -> LlamaConfig:
    return LlamaConfig(**{**config.to_dict(), "num_labels": 1})


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    words = [*SPECIAL, *(f"w{number}" for number in range(vocabulary - len(SPECIAL)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **names)


def _text(rng: random.Random, lengths: tuple[int, int], vocabulary: int) -> str:
    return " ".join(f"w{rng.randrange(vocabulary - len(SPECIAL))}" for _ in range(rng.randint(*lengths)))


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def score(*, prompts: list[str], completions: list[str], **_: object) -> list[float]:
    """A reward that costs nothing: how many different words."""
    return [float(len(set(text.split()))) for text in completions]
