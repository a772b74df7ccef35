"""Build samplers, and a trained model as a function from texts to texts and as a partner in a conversation."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from rlhf.config.data import ChatFormat
from rlhf.config.sections import SamplingConfig, TrainConfig
from rlhf.data.conversation import Message, Prompt
from rlhf.data.prompts import encode_conversations
from rlhf.data.tokenizer import base_of_adapter, load_tokenizer, locate_model, make_encoder, pad_id, stop_token_ids
from rlhf.environments.section import EnvironmentConfig
from rlhf.errors import DataError, ModelError
from rlhf.factory.models import continued_adapter
from rlhf.models.backbone import check_vocabulary, context_length, eos_ids, freeze, load_causal_lm, move_to
from rlhf.models.export import GENERATION
from rlhf.models.folders import model_folder
from rlhf.models.lora import settings_in
from rlhf.models.policy_models import Models
from rlhf.models.weight_files import local_folder
from rlhf.runtime.device import choose_device
from rlhf.runtime.distributed import SINGLE_PROCESS
from rlhf.sampling.episodes import EpisodeSampler, make_episode_sampler
from rlhf.sampling.fast.engine import FastSampler, changing_rotations
from rlhf.sampling.launched import LaunchedServer
from rlhf.sampling.pool import ServerPool
from rlhf.sampling.sampler import Sampler, make_sampler
from rlhf.sampling.served import ServedSampler
from rlhf.serving.server import Launch, Server
from rlhf.types import Completions, Prompts


def build_sampler(
    config: TrainConfig,
    models: Models,
    tokenizer: PreTrainedTokenizerBase,
    warn: Callable[[str], None] = lambda _: None,
    *,
    servers: ServerPool | None = None,
) -> Sampler:
    """Build the sampler of the policy that is being trained; `warn` receives the reason if it is not the fast one.

    With an environment it plays whole episodes. The `servers` sample if there are any, else this process.

    Raises:
        ConfigError: the environment cannot be made, or the chat template rewrites earlier turns.
    """
    sampler = _completion_sampler(config, models, tokenizer, warn, servers)
    if config.environment is None:
        return sampler
    return make_episode_sampler(
        sampler,
        config.environment,
        make_encoder(tokenizer, config.data.chat_format),
        max_new_tokens=config.sampling.max_new_tokens,
        context=context_length(models.policy),
        ranks=models.engine.ranks,
        plugins=config.plugins,
        steady=None if servers is None else servers.steady,
    )


def _completion_sampler(
    config: TrainConfig,
    models: Models,
    tokenizer: PreTrainedTokenizerBase,
    warn: Callable[[str], None],
    servers: ServerPool | None,
) -> Sampler:
    """Build the sampler of completions, in this process or from the servers."""
    ends, pad = stop_token_ids(tokenizer, config.data.chat_format, eos_ids(models.policy, tokenizer)), pad_id(tokenizer)
    if servers is not None:
        return ServedSampler(servers, models, config.sampling, eos_ids=ends, pad_id=pad)
    return make_sampler(
        models.policy,
        config.sampling,
        eos_ids=ends,
        pad_id=pad,
        dtype=config.policy.dtype,
        device=models.device,
        engine=models.engine,
        warn=warn,
    )


def build_servers(
    config: TrainConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    warn: Callable[[str], None] = lambda _: None,
) -> ServerPool | None:
    """Build what asks the sampling servers of a run in `folder`; None if the run samples in its own process.

    Raises:
        ConfigError: an address is invalid, or a token is not in the environment.
    """
    server = config.sampling.server
    if config.sampling.backend != "server" or server is None:
        return None
    own = folder.resolve() / WEIGHTS_FOLDER
    shared = own if server.weights_dir is None else Path(server.weights_dir).resolve()
    return ServerPool(
        server,
        own if server.weights_dir is None else shared / _name_of_run(folder),
        dtype=config.policy.dtype,
        pad_id=pad_id(tokenizer),
        shared=shared,
        warn=warn,
        processes=_launched(config, server, folder / WEIGHTS_FOLDER),
    )


def _name_of_run(folder: Path) -> str:
    """Name a run's subfolder of a shared folder: no other run has the name, and a restarted run has it again."""
    return f"{folder.name}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"


def _launched(config: TrainConfig, server: Server, logs: Path) -> list[LaunchedServer]:
    """Build what starts the servers of a run (sampling.server.launch)."""
    launch = server.launch
    if launch is None:
        return []
    made = []
    adapter, lora = continued_adapter(config.policy), config.policy.lora
    rank = None if lora is None else lora.r if adapter is None else int(settings_in(adapter).r)
    for number in range(launch.count):
        port = launch.port + number
        asked = Launch(
            model=model_folder(config.policy.model) if adapter is None else base_of_adapter(adapter),
            port=port,
            dtype=config.policy.dtype,
            device=config.run.device,
            threads=torch.get_num_threads(),
            tf32=config.run.tf32,
            lora_rank=rank,
        )
        command = [*server.command(asked), *launch.arguments]
        environment = {**server.launch_environment(asked), **launch.environment}
        made.append(LaunchedServer(command, environment, port=port, log=logs / f"server-{port}.log"))
    return made


def slow_lengths_reason(config: TrainConfig, sampler: Sampler) -> list[str]:
    """Return the reason if the fast sampler leaves rows of some lengths to transformers' generate, as a list."""
    sampler = sampler.sampler if isinstance(sampler, EpisodeSampler) else sampler
    switch = sampler.plain.switch if isinstance(sampler, FastSampler) else None
    prompts = config.data.prompts
    if switch is None or prompts is None or prompts.max_prompt_tokens + config.sampling.max_new_tokens - 1 <= switch:
        return []
    return [f"fast sampling leaves batches to transformers' generate where {changing_rotations(switch)}"]


WEIGHTS_FOLDER = "weights"  # in a run's folder: weights on their way to servers
NO_TEMPLATE = ChatFormat("none")


@dataclass(frozen=True)
class Drawing:
    """How the tokens of an answer are drawn; a temperature of 0 takes the most likely one each time."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0  # 0: from all tokens


GREEDY = Drawing(0.0)
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}  # of transformers, if sampling is on


def published_drawing(folder: str) -> Drawing:
    """Read how answers are drawn by default from the model's generation_config.json: greedily, if it does not say.

    Settings that it leaves out are as in transformers.

    Raises:
        ModelError: a setting of it is not a number, or one that no token can be drawn with.
    """
    location = locate_model(folder)
    files = local_folder(location, GENERATION) if location.gguf is None else None
    try:
        settings = json.loads((files / GENERATION).read_text(encoding="utf-8")) if files is not None else {}
    except (OSError, ValueError):
        settings = {}
    if not isinstance(settings, Mapping) or not settings.get("do_sample"):
        return GREEDY
    values = {name: default if settings.get(name) is None else settings[name] for name, default in DEFAULTS.items()}
    for name, value in values.items():
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            raise ModelError(
                f"{folder}: {GENERATION} has {name} {value!r}, which is no number that tokens can be drawn with; "
                "fix the file, or set do_sample to false in it"
            )
    return Drawing(float(values["temperature"]), float(values["top_p"]), int(values["top_k"]))


class Completer:
    """A model, from a run or a model folder, ready to generate text."""

    def __init__(
        self, path: str, sampling: SamplingConfig, device: torch.device | None = None, *, chat: ChatFormat = NO_TEMPLATE
    ) -> None:
        """Load the model and its tokenizer.

        Args:
            path: a run folder, a model folder or a hub id.
            device: where the model runs; None selects the GPU if there is one.
            chat: the chat format of the prompts; the default uses no chat template.
        """
        folder = model_folder(path)
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        self.encoder = make_encoder(self.tokenizer, chat)
        self.sampling = sampling
        device = device or choose_device("auto", key="device")
        model = load_causal_lm(folder)
        check_vocabulary(model, self.tokenizer, folder)
        freeze(model)
        self.model = move_to(model, device)
        self.eos_ids = tuple(sorted({*eos_ids(model, self.tokenizer), *self.encoder.stop_ids}))
        self.sampler = make_sampler(
            self.model,
            sampling,
            eos_ids=self.eos_ids,
            pad_id=self.encoder.pad_id,
            dtype="float32",
            device=device,
        )

    def player(self, environment: EnvironmentConfig | None, plugins: Sequence[str] = ()) -> Sampler:
        """Return a sampler of episodes in this environment; without one, the sampler of completions.

        Raises:
            ConfigError: the environment cannot be made, or the chat template rewrites earlier turns.
        """
        if environment is None:
            return self.sampler
        return make_episode_sampler(
            self.sampler,
            environment,
            self.encoder,
            max_new_tokens=self.sampling.max_new_tokens,
            context=context_length(self.model),
            ranks=SINGLE_PROCESS,
            plugins=plugins,
        )

    def sample(self, prompts: Sequence[str], *, count: int, key: int, greedy: bool = False) -> Completions:
        """Sample `count` completions of each prompt, as token ids.

        Raises:
            DataError: a prompt has no tokens, or too many for the model's context.
        """
        return self.sampler.sample(self.encode(prompts), key=key, group_size=count, greedy=greedy)

    def encode(self, prompts: Sequence[str]) -> Prompts:
        """Encode prompts that leave room for a completion of `sampling.max_new_tokens`.

        Raises:
            DataError: a prompt has no tokens, or too many for the model's context.
        """
        encoded = encode_conversations([self.to_prompt(text) for text in prompts], self.encoder)
        context, new = context_length(self.model), self.sampling.max_new_tokens
        lengths = encoded.prompt_mask.sum(dim=1).tolist()
        too_long = [number for number, tokens in enumerate(lengths) if context and tokens + new > context]
        if too_long:
            raise DataError(
                f"{len(too_long)} of {len(prompts)} prompts leave no room for {new:,} new tokens in the model's "
                f"context of {context:,} (prompt {too_long[0] + 1} has {lengths[too_long[0]]:,}): shorten them, or "
                "lower max_new_tokens"
            )
        return encoded

    def to_prompt(self, text: str) -> Prompt:
        """Make a prompt from a text: a user message if the model has a chat template, else the text itself."""
        return [{"role": "user", "content": text}] if self.encoder.template.turns else text

    def complete(self, prompts: Sequence[str], *, count: int, key: int, greedy: bool = False) -> list[list[str]]:
        """Sample `count` completions of each prompt, as text without special tokens."""
        samples = self.sample(prompts, count=count, key=key, greedy=greedy)
        texts = [
            self.text(ids, mask) for ids, mask in zip(samples.completion_ids, samples.completion_mask, strict=True)
        ]
        return [texts[start : start + count] for start in range(0, len(texts), count)]

    def text(self, ids: Tensor, mask: Tensor) -> str:
        """Decode the unmasked tokens of one completion to text without special tokens."""
        text = self.tokenizer.decode(ids[mask], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def stream(self, prompt: Prompt, write: Callable[[str], None], drawing: Drawing) -> tuple[str, bool]:
        """Generate one completion and write it as it is sampled, with torch's global random generator.

        An interrupt (Ctrl-C) ends the completion early.

        Returns:
            The text, and whether it ended with an end-of-sequence token.

        Raises:
            DataError: the prompt leaves no room in the model's context.
        """
        ids = encode_conversations([prompt], self.encoder, cure="").prompt_ids.to(self.model.device)
        max_new_tokens = self._max_new_tokens(ids.shape[1])
        streamer = _Streamer(self.decode_text, write)
        settings = GenerationConfig(
            do_sample=drawing.temperature > 0,
            max_new_tokens=max_new_tokens,
            eos_token_id=list(self.eos_ids),
            pad_token_id=self.encoder.pad_id,
            **(vars(drawing) if drawing.temperature > 0 else {}),
        )
        model: Any = self.model
        try:
            with torch.no_grad():
                model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, streamer=streamer)
        except KeyboardInterrupt:
            streamer.end()
        return streamer.written, bool(streamer.ids) and streamer.ids[-1] in self.eos_ids

    def decode_text(self, ids: Sequence[int]) -> str:
        """Decode token ids to text without special tokens."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _max_new_tokens(self, tokens: int) -> int:
        """Return how many tokens may follow a prompt of this many tokens."""
        context = context_length(self.model)
        room = self.sampling.max_new_tokens if context is None else min(self.sampling.max_new_tokens, context - tokens)
        if room < 1:
            raise DataError(f"{tokens:,} tokens leave nothing of the model's context of {context:,}")
        return room


class _Streamer(BaseStreamer):
    """A streamer that decodes a completion as it grows, and writes the part that can no longer change."""

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None]) -> None:
        self.decode, self.write = decode, write
        self.ids: list[int] = []
        self.written = ""
        self.has_prompt = False

    def put(self, value: Tensor) -> None:
        """Take the ids of a new token; the first call passes the ids of the prompt, which are skipped."""
        if not self.has_prompt:
            self.has_prompt = True
            return
        self.ids += value.flatten().tolist()
        text = self.decode(self.ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the last character still lacks bytes
            self._write_new(text)

    def end(self) -> None:
        """Write the rest of the text."""
        self._write_new(self.decode(self.ids))

    def _write_new(self, text: str) -> None:
        self.write(text[len(self.written) :])
        self.written = text


@dataclass
class Conversation:
    """A conversation with a model: the messages so far, and how the next answer is sampled."""

    model: Completer
    system: str | None
    drawing: Drawing
    messages: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        """Clear the history."""
        self.messages.clear()

    def ask(self, text: str, write: Callable[[str], None]) -> bool:
        """Send a user message and write the answer as it is generated; return whether the answer is complete."""
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        messages = [*self.messages, {"role": "user", "content": text}]
        answer, ended = self.model.stream([*system, *messages], write, self.drawing)
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return ended
