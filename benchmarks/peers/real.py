"""The same work from a real model and real pairs: an ordinary folder, and rows as its chat template writes them."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from peers.work import ONLINE, Pair, Sizes, Workload, products, prompts_needed, save_reward_model, write_rows


@dataclass(frozen=True)
class EncodedPair:
    """A pair as text, and how many tokens its three texts have, EOS included."""

    pair: Pair
    prompt: list[int]
    chosen: list[int]
    rejected: list[int]


def make_real_work(
    folder: Path, model: Path, pairs: Path, steps: int, sizes: Sizes, *, max_tokens: int = 192
) -> Workload:
    """Prepare a published model and real pairs in `folder`, in the form of `work.make_work`.

    Args:
        folder: receives policy/, reward/, the rows and workload.json.
        model: an ordinary folder, a GGUF file, or a folder whose only model file is one.
        pairs: JSON lines, gzipped or not, with prompt, chosen and rejected as text.
        steps: of each trainer.
        sizes: of each trainer's step. Rows are repeated if there are too few.
        max_tokens: pairs with a longer side are left out.

    Raises:
        SystemExit: the model or the pairs cannot be used.
    """
    policy, tokenizer = load_model(model)
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    save_reward_model(policy, folder / "reward")
    tokenizer.save_pretrained(folder / "reward")
    encoded = list(encode_pairs(read_rows(pairs), tokenizer, max_tokens))
    if not encoded:
        raise SystemExit(f"{pairs}: no pair of at most {max_tokens} tokens: raise --max-tokens")
    rows = list(islice(cycle(encoded), steps * sizes.rows))
    prompts = list(dict.fromkeys(row.pair.prompt for row in encoded))
    replay = replayed_completions(encoded, tokenizer, sizes)
    write_rows(folder, list(islice(cycle(prompts), prompts_needed(steps, sizes))), [row.pair for row in rows], replay)
    body, head = products(policy.config)
    workload = Workload(
        width=policy.config.hidden_size,
        inner=policy.config.intermediate_size,
        body=body,
        head=head,
        prompt=statistics.mean(len(row.prompt) for row in rows),
        chosen=statistics.mean(len(row.chosen) for row in rows),
        rejected=statistics.mean(len(row.rejected) for row in rows),
        parameters=sum(parameter.numel() for parameter in policy.parameters()),
        peer_pad=pad_for_peer(tokenizer, rows),
    )
    workload.write(folder)
    return workload


def load_model(model: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and tokenizer of a folder or GGUF file; a GGUF file's weights are dequantized to float32."""
    folder, gguf = gguf_file(model)
    if gguf is None:
        return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    # The loaded model remembers its quantization and cannot be saved: the weights go into a plain model.
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(quantized)(type(quantized.config)(**settings))
    plain.load_state_dict(quantized.state_dict())
    plain.generation_config = quantized.generation_config
    return plain, AutoTokenizer.from_pretrained(folder, gguf_file=gguf)


def gguf_file(model: Path) -> tuple[Path, str | None]:
    """Return the folder of a model and the name of its GGUF file; None for an ordinary folder."""
    if model.is_file():
        return model.parent, model.name
    if (model / "config.json").is_file():
        return model, None
    names = sorted(path.name for path in model.glob("*.gguf"))
    if len(names) != 1:
        raise SystemExit(f"--model {model}: neither a config.json nor one GGUF file: name the file itself")
    return model, names[0]


def read_rows(path: Path) -> list[Mapping[str, str]]:
    """Read the rows of a JSON lines file, gzipped or not."""
    if not path.is_file():
        raise SystemExit(f"--pairs {path}: no such file")
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def encode_pairs(
    rows: Iterable[Mapping[str, str]], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> Iterator[EncodedPair]:
    """Render the pairs that both sides read, their prompts by the chat template (unchanged if there is none).

    Left out: pairs that are too long, and pairs whose tokens differ if prompt and completion are encoded as one.
    """
    for row in rows:
        prompt = row["prompt"]
        if tokenizer.chat_template:
            turn = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        texts = [f"{row[name]}{tokenizer.eos_token}" for name in ("chosen", "rejected")]
        start, *sides = (ids_of(tokenizer, text) for text in (prompt, *texts))
        alike = all(ids_of(tokenizer, prompt + text) == start + side for text, side in zip(texts, sides, strict=True))
        if alike and sides[0] != sides[1] and len(start) + max(map(len, sides)) <= max_tokens:
            yield EncodedPair(Pair(prompt, row["chosen"], row["rejected"]), start, *sides)


def ids_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a text without the special tokens that a tokenizer may put around it."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def replayed_completions(
    encoded: list[EncodedPair], tokenizer: PreTrainedTokenizerBase, sizes: Sizes
) -> list[list[int]]:
    """Make completions of full length for a first step: the data's completions joined and cut, without EOS."""
    stream = [token for row in encoded for token in row.chosen if token not in tokenizer.all_special_ids]
    count = max(sizes.completions(trainer) for trainer in ONLINE)
    tokens = list(islice(cycle(stream), count * sizes.new_tokens))
    return [tokens[start : start + sizes.new_tokens] for start in range(0, len(tokens), sizes.new_tokens)]


def pad_for_peer(tokenizer: PreTrainedTokenizerBase, rows: list[EncodedPair]) -> str | None:
    """Choose a token for the peer to pad with, which tells padding by its id; None if the tokenizer's own can serve.

    If the pad token is the EOS, its PPO would not see the ends of the prompt's turns, and its reward model would
    read a token too early.
    """
    used = set(chain.from_iterable(chain(row.prompt, row.chosen, row.rejected) for row in rows))
    used |= {tokenizer.eos_token_id, tokenizer.bos_token_id}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in used:
        return None
    specials = [token for token in tokenizer.all_special_tokens if tokenizer.convert_tokens_to_ids(token) not in used]
    others = sorted(tokenizer.get_vocab().items(), key=lambda item: -item[1])
    return next(chain(specials, (token for token, number in others if number not in used)))
