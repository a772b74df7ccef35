"""The work: the models of both sides, their rows, and the sizes of each trainer's step. Needs no rlhf."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

TRAINERS = ("sft", "reward", "dpo", "dpo_cached", "grpo", "rloo", "ppo")
ONLINE = ("grpo", "rloo", "ppo")
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
MICRO_BATCH = 16  # rows in a pass of ours by default, and of the peer's with its memory flags
PEER_BATCH = 8  # rows in a pass of the peer by default (per_device_train_batch_size)
PEER_SETTINGS = ("defaults", "memory", "fastest")
ADAPTED = ("sft", "reward", "dpo", "dpo_cached", "grpo")  # the trainers that --lora compares


@dataclass(frozen=True)
class Sizes:
    """The sizes of one step."""

    rows: int = 32  # of SFT; pairs of DPO and the reward model
    prompts: int = 8  # of GRPO and RLOO
    group: int = 8
    ppo_prompts: int = 64
    ppo_epochs: int = 4
    ppo_minibatches: int = 4
    new_tokens: int = NEW_TOKENS

    def completions(self, trainer: str) -> int:
        """Count the rows that an online trainer samples in a step."""
        return self.ppo_prompts if trainer == "ppo" else self.prompts * self.group


REAL_SIZES = Sizes(rows=16, prompts=8, group=8, ppo_prompts=16, ppo_epochs=2, ppo_minibatches=2)
"""For a model of 100 to 200 million parameters on two cores."""


@dataclass(frozen=True)
class Workload:
    """The figures that decide the arithmetic of the rows: mean numbers of tokens, and sizes of the weights."""

    width: int  # of the hidden states
    inner: int  # of the MLP
    body: float  # numbers in the layers' matrices
    head: float  # and in the LM head's
    prompt: float  # tokens of a prompt, special tokens and template included
    chosen: float  # of a preferred completion, EOS included
    rejected: float
    parameters: int
    peer_pad: str | None = None  # the token that the peer pads with; None: the tokenizer's own

    @classmethod
    def read(cls, folder: Path) -> Workload:
        """Read what `write` wrote."""
        return cls(**json.loads((folder / "workload.json").read_text(encoding="utf-8")))

    def write(self, folder: Path) -> None:
        """Write it as JSON into `folder`."""
        (folder / "workload.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


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
    whole: bool = False  # our passes have all rows of an optimizer step, like TRL's, instead of our default's 16
    peer: str = "defaults"  # the settings of the peer, one of PEER_SETTINGS; trl_side.py says what each sets
    replay: bool = True  # the first step learns from written completions instead of the sampled ones (online)
    lora: int | None = None  # rank of the adapters on every linear layer; None: all weights are trained
    clock: str = "wall"  # or cpu: the processor time of the process, if other programs take their turns
    overrides: dict[str, Any] = field(default_factory=dict)  # of our configuration

    def now(self) -> float:
        """Read the clock, in seconds."""
        return time.process_time() if self.clock == "cpu" else time.perf_counter()

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Job:
        """Read what `write` wrote."""
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls(**{**content, "sizes": Sizes(**content["sizes"])})


def start_adapters(model: torch.nn.Module) -> None:
    """Draw the random half of every adapter again, so that both sides start from the same numbers."""
    with torch.no_grad():
        for number, (_, weight) in enumerate(item for item in model.named_parameters() if "lora_A" in item[0]):
            generator = torch.Generator().manual_seed(number)
            drawn = torch.empty(weight.shape).uniform_(-1, 1, generator=generator)
            weight.copy_(drawn * weight.shape[1] ** -0.5)


def llama_config(shape: str) -> LlamaConfig:
    """Build the configuration of a model of this shape, embeddings tied."""
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


def products(config: PreTrainedConfig) -> tuple[float, float]:
    """Count the weights that every token is multiplied with: of the layers, and of the LM head.

    For families with separate query, key, value, gate, up and down projections, as Llama's.
    """
    width, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    head_width = getattr(config, "head_dim", None) or width // heads
    attention = 2 * width * head_width * (heads + config.num_key_value_heads)
    return float(config.num_hidden_layers * (attention + 3 * width * inner)), float(width * config.vocab_size)


def synthetic_workload(shape: str) -> Workload:
    """Describe the workload of `make_work` by the mean of the lengths that it draws."""
    config = llama_config(shape)
    body, head = products(config)
    prompt, side = sum(PROMPT) / 2, sum(COMPLETION) / 2
    parameters = int(body + head) + config.hidden_size * (2 * config.num_hidden_layers + 1)
    return Workload(config.hidden_size, config.intermediate_size, body, head, prompt, side, side, parameters)


def make_work(folder: Path, shape: str, steps: int, sizes: Sizes) -> Workload:
    """Make a model of random weights and random rows in `folder`: policy/, reward/ and the files of `write_rows`."""
    config = llama_config(shape)
    vocabulary = config.vocab_size
    tokenizer = _tokenizer(vocabulary)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    save_reward_model(model, folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    rng = random.Random(0)
    prompts = [_text(rng, PROMPT, vocabulary) for _ in range(prompts_needed(steps, sizes))]
    sides = [[f" {_text(rng, COMPLETION, vocabulary)}" for _ in range(steps * sizes.rows)] for _ in range(2)]
    pairs = [Pair(*texts) for texts in zip(prompts[: steps * sizes.rows], *sides, strict=True)]
    first = [[rng.randrange(len(SPECIAL), vocabulary) for _ in range(sizes.new_tokens)] for _ in range(_first(sizes))]
    write_rows(folder, prompts, pairs, first)
    workload = synthetic_workload(shape)
    workload.write(folder)
    return workload


@dataclass(frozen=True)
class Pair:
    """A prompt as the model reads it, and two completions without their EOS."""

    prompt: str
    chosen: str
    rejected: str


def prompts_needed(steps: int, sizes: Sizes) -> int:
    """Count the prompts that the steps of the greediest trainer read."""
    return steps * max(sizes.rows, sizes.ppo_prompts, sizes.prompts)


def _first(sizes: Sizes) -> int:
    return max(sizes.completions(trainer) for trainer in ONLINE)


def write_rows(folder: Path, prompts: Sequence[str], pairs: Sequence[Pair], replay: list[list[int]]) -> None:
    """Write prompts.jsonl, pairs.jsonl, sft.jsonl, and completions of an online trainer's first step, replay.json."""
    _write(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    _write(folder / "pairs.jsonl", [asdict(pair) for pair in pairs])
    _write(folder / "sft.jsonl", [{"prompt": pair.prompt, "completion": pair.chosen} for pair in pairs])
    (folder / "replay.json").write_text(json.dumps(replay), encoding="utf-8")


def save_reward_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Save the layers of `model` with a random scalar head as a sequence-classification folder."""
    config = type(model.config)(**{**model.config.to_dict(), "num_labels": 1})
    classifier = LlamaForSequenceClassification(config).to(model.dtype)
    classifier.model.load_state_dict(model.model.state_dict())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        classifier.score.weight.normal_(std=(config.hidden_size + 1) ** -0.5, generator=generator)
    classifier.save_pretrained(folder)


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
    """Score completions at no cost: by their different words, and a little by their letters, so that hardly any tie."""
    return [len(set(text.split())) + len(text) / 1000 for text in completions]
