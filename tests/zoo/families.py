"""The zoo's table: model families in their published form, and the expectations of each.

A row has the configuration that decides how the family computes (at two or three layers and a width of a few dozen),
the special tokens, the way of adding BOS, the tokens that end generation, the chat template, and which fast ways are
on. The facts are from the published files of the model in `like`. Windows, soft caps and rotation lengths are
scaled down with the rest, so that leaving one out changes numbers. A template marked `reduced` leaves out tools and the
like: it writes the published one's text for conversations of system, user and assistant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from stored_templates import chat_template

ON = ""  # nothing speaks against a fast way: it is on

CONVERSATION = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A family's special tokens and the habits of its tokenizer."""

    eos: str
    bos: str | None = None
    pad: str | None = None
    unk: str | None = None
    first: tuple[str, ...] = ()  # special tokens before the vocabulary of texts, in the order of their ids
    last: tuple[str, ...] = ()  # and after it
    adds_bos: bool = False  # a BOS is put before every text
    pieces: Literal["bytes", "llama", "gemma"] = (
        "bytes"  # byte-level BPE, or SentencePiece with or without a first space
    )
    tokenizer_class: str = "PreTrainedTokenizerFast"
    spare_rows: int = 0  # embeddings beyond the tokenizer's tokens


@dataclass(frozen=True, kw_only=True)
class FastWays:
    """The fast ways that are on, with an adapter or without: ON, or the program's reason why not."""

    chunked: str = ON  # log-probabilities from a few tokens' logits at a time
    packed: str = ON  # rows without padding, shared prompts once
    written_out: str = ON  # layers without their modules, in training
    fast_sampler: str = ON  # one prefill a prompt, finished rows gone at once
    lean_decoder: str = ON  # the decode step written out


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table."""

    name: str
    title: str
    like: str  # the published model whose files these facts are from
    model_type: str
    config: dict[str, Any]
    tokens: Tokens
    ends: tuple[str, ...]  # eos_token_id of generation_config.json, as tokens
    generation: dict[str, Any] = field(default_factory=dict)  # its other defaults
    pads_with: str  # the token that fills rows: the tokenizer's pad token, else its EOS
    dtype: str = "bfloat16"
    template: str | None = None
    reduced: bool = False
    chat: str = ""  # CONVERSATION as the template writes it, ready for an answer
    turn_end: str = ""  # the end of an assistant's turn, if it is a token
    prefix: str = ""  # the tokens before every plain text
    fast: FastWays = FastWays()
    notes: str = ""  # its special points, for the page


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # random weights of 0.02 are so nearly uniform that errors hide
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
DEFAULT_ROPE = "default"


def rope(theta: float, rope_type: str = DEFAULT_ROPE, **scaling: Any) -> dict[str, Any]:
    """Write rotary settings as configurations have them."""
    return {"rope_theta": theta, "rope_type": rope_type, **scaling}


NOT_YET = "its layers are not written out"

FAMILIES = (
    Family(
        name="gpt2",
        title="GPT-2",
        like="openai-community/gpt2",
        model_type="gpt2",
        config={"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2},
        tokens=Tokens(
            bos="<|endoftext|>",
            eos="<|endoftext|>",
            unk="<|endoftext|>",
            last=("<|endoftext|>",),
            tokenizer_class="GPT2Tokenizer",
        ),
        ends=("<|endoftext|>",),
        pads_with="<|endoftext|>",
        dtype="float32",
        fast=FastWays(written_out=NOT_YET, lean_decoder=NOT_YET),
        notes="learned positions, tied head, dropout 0.1 in its files; no pad token, BOS is EOS",
    ),
    Family(
        name="llama2",
        title="Llama 2",
        like="meta-llama/Llama-2-7b-chat-hf",
        model_type="llama",
        config={**SMALL, "rope_parameters": rope(10_000.0)},
        tokens=Tokens(
            bos="<s>",
            eos="</s>",
            unk="<unk>",
            first=("<unk>", "<s>", "</s>"),
            adds_bos=True,
            pieces="llama",
            tokenizer_class="LlamaTokenizer",
        ),
        ends=("</s>",),
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9, "pad_token_id": 0},
        pads_with="</s>",
        dtype="float16",
        template=chat_template("zoo/llama2"),
        chat="<s>[INST] Hi [/INST] Hello </s><s>[INST] Bye [/INST]",
        turn_end="</s>",
        prefix="<s>",
        notes="no pad token; SentencePiece puts a space before a text; BOS before every user turn",
    ),
    Family(
        name="llama3",
        title="Llama 3",
        like="meta-llama/Llama-3.1-8B-Instruct",
        model_type="llama",
        config={
            **SMALL,
            "num_key_value_heads": 1,
            "rope_parameters": rope(
                500_000.0,
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
        tokens=Tokens(
            bos="<|begin_of_text|>",
            eos="<|eot_id|>",
            last=(
                "<|begin_of_text|>",
                "<|end_of_text|>",
                "<|finetune_right_pad_id|>",
                "<|start_header_id|>",
                "<|end_header_id|>",
                "<|eom_id|>",
                "<|eot_id|>",
                "<|python_tag|>",
            ),
            adds_bos=True,
        ),
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.9},
        pads_with="<|eot_id|>",
        template=chat_template("zoo/llama3"),
        reduced=True,
        chat=(
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
            "Today Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        turn_end="<|eot_id|>",
        prefix="<|begin_of_text|>",
        notes="three tokens end a turn; no pad token; scaled rotary embeddings; four query heads per key head",
    ),
    Family(
        name="mistral_base",
        title="Mistral 7B v0.1",
        like="mistralai/Mistral-7B-v0.1",
        model_type="mistral",
        config={**SMALL, "num_key_value_heads": 1, "sliding_window": 8, "rope_parameters": rope(10_000.0)},
        tokens=Tokens(
            bos="<s>",
            eos="</s>",
            unk="<unk>",
            first=("<unk>", "<s>", "</s>"),
            adds_bos=True,
            pieces="llama",
            tokenizer_class="LlamaTokenizer",
        ),
        ends=("</s>",),
        pads_with="</s>",
        prefix="<s>",
        notes="a window of 4,096 tokens in every layer (8 here); no pad token, no template",
    ),
    Family(
        name="mistral",
        title="Mistral 7B Instruct v0.2",
        like="mistralai/Mistral-7B-Instruct-v0.2",
        model_type="mistral",
        config={**SMALL, "num_key_value_heads": 1, "sliding_window": None, "rope_parameters": rope(1_000_000.0)},
        tokens=Tokens(
            bos="<s>",
            eos="</s>",
            unk="<unk>",
            first=("<unk>", "<s>", "</s>"),
            adds_bos=True,
            pieces="llama",
            tokenizer_class="LlamaTokenizer",
        ),
        ends=("</s>",),
        pads_with="</s>",
        template=chat_template("zoo/mistral"),
        chat="<s>[INST] Hi [/INST]Hello</s>[INST] Bye [/INST]",
        turn_end="</s>",
        prefix="<s>",
        notes="no window; no pad token",
    ),
    Family(
        name="tinyllama",
        title="TinyLlama",
        like="TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        model_type="llama",
        config={
            **SMALL,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "rope_parameters": rope(10_000.0),
        },
        tokens=Tokens(
            bos="<s>",
            eos="</s>",
            pad="</s>",
            unk="<unk>",
            first=("<unk>", "<s>", "</s>"),
            adds_bos=True,
            pieces="llama",
            tokenizer_class="LlamaTokenizer",
        ),
        ends=("</s>",),
        generation={"max_length": 2048, "pad_token_id": 0},
        pads_with="</s>",
        template=chat_template("zoo/zephyr"),
        chat="<|user|>\nHi</s>\n<|assistant|>\nHello</s>\n<|user|>\nBye</s>\n<|assistant|>\n",
        turn_end="</s>",
        prefix="<s>",
        notes="the pad token is EOS; eight query heads per key head; the template writes no BOS",
    ),
    Family(
        name="smollm2",
        title="SmolLM2",
        like="HuggingFaceTB/SmolLM2-135M-Instruct",
        model_type="llama",
        config={
            **SMALL,
            "hidden_size": 24,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": rope(100_000.0),
        },
        tokens=Tokens(
            bos="<|im_start|>",
            eos="<|im_end|>",
            pad="<|im_end|>",
            unk="<|endoftext|>",
            first=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            tokenizer_class="GPT2Tokenizer",
        ),
        ends=("<|im_end|>",),
        pads_with="<|im_end|>",
        template=chat_template("zoo/smollm2"),
        chat=(
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        turn_end="<|im_end|>",
        notes="the pad token is EOS; tied head; three query heads per key head",
    ),
    Family(
        name="qwen2_5",
        title="Qwen2.5",
        like="Qwen/Qwen2.5-0.5B-Instruct",
        model_type="qwen2",
        config={
            **SMALL,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": 32768,
            "rope_parameters": rope(1_000_000.0),
        },
        tokens=Tokens(
            eos="<|im_end|>",
            pad="<|endoftext|>",
            last=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            tokenizer_class="Qwen2Tokenizer",
            spare_rows=5,
        ),
        ends=("<|im_end|>", "<|endoftext|>"),
        generation={
            "do_sample": True,
            "repetition_penalty": 1.1,
            "temperature": 0.7,
            "top_p": 0.8,
            "top_k": 20,
        },
        pads_with="<|endoftext|>",
        template=chat_template("zoo/qwen2_5"),
        reduced=True,
        chat=(
            "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        turn_end="<|im_end|>",
        notes="biases of queries, keys and values; spare embedding rows; two tokens end a turn; no BOS",
    ),
    Family(
        name="qwen3",
        title="Qwen3",
        like="Qwen/Qwen3-0.6B",
        model_type="qwen3",
        config={
            **SMALL,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": rope(1_000_000.0),
        },
        tokens=Tokens(
            eos="<|im_end|>",
            pad="<|endoftext|>",
            last=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"),
            tokenizer_class="Qwen2Tokenizer",
            spare_rows=5,
        ),
        ends=("<|im_end|>", "<|endoftext|>"),
        generation={"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
        pads_with="<|endoftext|>",
        template=chat_template("zoo/qwen3"),  # a thought in the last turn only, empty if it came without
        reduced=True,
        chat=(
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        turn_end="<|im_end|>",
        notes="norms of queries and keys; heads wider than width / number; only the last turn keeps its thought",
    ),
    Family(
        name="gemma2",
        title="Gemma 2",
        like="google/gemma-2-2b-it",
        model_type="gemma2",
        config={
            **SMALL,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 12,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "rope_parameters": rope(10_000.0),
        },
        tokens=Tokens(
            bos="<bos>",
            eos="<eos>",
            pad="<pad>",
            unk="<unk>",
            first=("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"),
            adds_bos=True,
            pieces="gemma",
            tokenizer_class="GemmaTokenizer",
        ),
        ends=("<eos>", "<end_of_turn>"),
        pads_with="<pad>",
        template=chat_template("zoo/gemma2"),
        chat=(
            "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
            "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
        ),
        turn_end="<end_of_turn>",
        prefix="<bos>",
        fast=FastWays(
            chunked="the forward of Gemma2ForCausalLM changes the logits after its head",
            packed="Gemma2Model does not use sdpa attention",
            written_out="its rows are padded",
            fast_sampler="Gemma2ForCausalLM sets attn_logit_softcapping",
            lean_decoder="the fast sampler is off",
        ),
        notes="soft caps on scores and logits; every other layer has a window of 4,096 tokens (8 here); no system role",
    ),
    Family(
        name="gemma3",
        title="Gemma 3",
        like="google/gemma-3-1b-it",
        model_type="gemma3_text",
        config={
            **SMALL,
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"sliding_attention": rope(10_000.0), "full_attention": rope(1_000_000.0)},
        },
        tokens=Tokens(
            bos="<bos>",
            eos="<eos>",
            pad="<pad>",
            unk="<unk>",
            first=("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"),
            adds_bos=True,
            pieces="gemma",
            tokenizer_class="GemmaTokenizer",
        ),
        ends=("<eos>", "<end_of_turn>"),
        generation={"do_sample": True, "top_k": 64, "top_p": 0.95},
        pads_with="<pad>",
        template=chat_template("zoo/gemma3"),
        reduced=True,
        chat=(
            "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
            "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
        ),
        turn_end="<end_of_turn>",
        prefix="<bos>",
        notes="five of six layers have a window of 512 tokens (8 here) and other rotary embeddings",
    ),
    Family(
        name="phi3",
        title="Phi-3",
        like="microsoft/Phi-3-mini-4k-instruct",
        model_type="phi3",
        config={
            **SMALL,
            "sliding_window": 8,
            "original_max_position_embeddings": 256,
            "rope_parameters": rope(10_000.0),
        },
        tokens=Tokens(
            bos="<s>",
            eos="<|endoftext|>",
            pad="<|endoftext|>",
            unk="<unk>",
            first=("<unk>", "<s>", "</s>"),
            last=("<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
            pieces="llama",
            tokenizer_class="LlamaTokenizer",
            spare_rows=3,
        ),
        ends=("<|endoftext|>", "<|assistant|>", "<|end|>"),
        pads_with="<|endoftext|>",
        template=chat_template("zoo/phi3"),
        chat="<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n<|user|>\nBye<|end|>\n<|assistant|>\n",
        turn_end="<|end|>",
        notes="fused projections; a window of 2,047 tokens (8 here); the pad token is EOS, a turn ends with another",
    ),
    Family(
        name="phi4",
        title="Phi-4",
        like="microsoft/phi-4",
        model_type="phi3",
        config={
            **SMALL,
            "num_key_value_heads": 1,
            "sliding_window": None,
            "original_max_position_embeddings": 256,
            "rope_parameters": rope(250_000.0),
        },
        tokens=Tokens(
            bos="<|endoftext|>",
            eos="<|im_end|>",
            pad="<|dummy_85|>",
            last=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|dummy_85|>", "<|dummy_86|>"),
            tokenizer_class="GPT2Tokenizer",
            spare_rows=2,
        ),
        ends=("<|im_end|>",),
        pads_with="<|dummy_85|>",
        template=chat_template("zoo/phi4"),
        chat=(
            "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>Hello<|im_end|>"
            "<|im_start|>user<|im_sep|>Bye<|im_end|><|im_start|>assistant<|im_sep|>"
        ),
        turn_end="<|im_end|>",
        notes="fused projections; the template itself opens the assistant's turn",
    ),
    Family(
        name="phi4_mini",
        title="Phi-4 mini",
        like="microsoft/Phi-4-mini-instruct",
        model_type="phi3",
        config={
            **SMALL,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "sliding_window": 262144,
            "max_position_embeddings": 8192,
            "original_max_position_embeddings": 256,
            "rope_parameters": rope(
                10_000.0,
                "longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0, 1.0, 1.0],
                long_factor=[1.0, 8.0, 32.0],
            ),
        },
        tokens=Tokens(
            bos="<|endoftext|>",
            eos="<|endoftext|>",
            pad="<|endoftext|>",
            unk="<|endoftext|>",
            last=("<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>"),
            tokenizer_class="GPT2Tokenizer",
            spare_rows=1,
        ),
        ends=("<|end|>", "<|endoftext|>"),
        pads_with="<|endoftext|>",
        template=chat_template("zoo/phi4_mini"),
        reduced=True,
        chat="<|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>Bye<|end|><|assistant|>",
        turn_end="<|end|>",
        notes="fused projections; rotary on three quarters of a head, changing with the length (longrope)",
    ),
    Family(
        name="olmo2",
        title="OLMo 2",
        like="allenai/OLMo-2-1124-7B-Instruct",
        model_type="olmo2",
        config={**SMALL, "rms_norm_eps": 1e-6, "rope_parameters": rope(500_000.0)},
        tokens=Tokens(
            bos="<|endoftext|>",
            eos="<|endoftext|>",
            pad="<|pad|>",
            unk="<|endoftext|>",
            last=("<|endoftext|>", "<|pad|>"),
            tokenizer_class="GPT2Tokenizer",
            spare_rows=4,
        ),
        ends=("<|endoftext|>",),
        pads_with="<|endoftext|>",
        template=chat_template("zoo/olmo2"),
        chat="<|endoftext|><|user|>\nHi\n<|assistant|>\nHello<|endoftext|>\n<|user|>\nBye\n<|assistant|>\n",
        turn_end="<|endoftext|>",
        notes="norms after attention and feed-forward, and of queries and keys; BOS is EOS; role marks are plain text",
    ),
    Family(
        name="pythia",
        title="GPT-NeoX (Pythia)",
        like="EleutherAI/pythia-160m",
        model_type="gpt_neox",
        config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "use_parallel_residual": True,
            "rope_parameters": rope(10_000.0, partial_rotary_factor=0.25),
            "tie_word_embeddings": False,
        },
        tokens=Tokens(
            bos="<|endoftext|>",
            eos="<|endoftext|>",
            unk="<|endoftext|>",
            first=("<|endoftext|>", "<|padding|>"),
            tokenizer_class="GPTNeoXTokenizer",
            spare_rows=7,
        ),
        ends=("<|endoftext|>",),
        pads_with="<|padding|>",
        dtype="float16",
        fast=FastWays(written_out=NOT_YET, lean_decoder=NOT_YET),
        notes="attention and feed-forward in parallel; rotary on a quarter of a head; no pad token, no template",
    ),
    Family(
        name="opt",
        title="OPT",
        like="facebook/opt-125m",
        model_type="opt",
        config={
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "init_std": 0.2,
            "do_layer_norm_before": True,
            "dropout": 0.1,
            "activation_function": "relu",
        },
        tokens=Tokens(
            bos="</s>",
            eos="</s>",
            pad="<pad>",
            unk="</s>",
            first=("<s>", "<pad>", "</s>", "<unk>"),
            adds_bos=True,
            tokenizer_class="GPT2Tokenizer",
            spare_rows=2,
        ),
        ends=("</s>",),
        pads_with="<pad>",
        dtype="float16",
        prefix="</s>",
        fast=FastWays(written_out=NOT_YET, lean_decoder=NOT_YET),
        notes="learned positions counted from the mask; EOS is put before every text; dropout 0.1 in its files",
    ),
    Family(
        name="falcon",
        title="Falcon",
        like="tiiuae/falcon-7b-instruct",
        model_type="falcon",
        config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "initializer_range": 0.2,
            "multi_query": True,
            "parallel_attn": True,
            "bias": False,
            "alibi": False,
            "new_decoder_architecture": False,
            "tie_word_embeddings": True,
            "rope_parameters": rope(10_000.0),
        },
        tokens=Tokens(
            eos="<|endoftext|>",
            first=(">>TITLE<<", ">>ABSTRACT<<", ">>QUESTION<<", "<|endoftext|>"),
        ),
        ends=("<|endoftext|>",),
        pads_with="<|endoftext|>",
        template=chat_template("zoo/falcon"),
        chat="\n\nUser: Hi\n\nAssistant: Hello\n\nUser: Bye\n\nAssistant:",
        fast=FastWays(
            packed="rows of FalconModel without padding give other numbers",
            written_out="its rows are padded",
            fast_sampler="the attention of FalconForCausalLM cannot be given another cache",
            lean_decoder="the fast sampler is off",
        ),
        notes="one key head for all query heads; attention and feed-forward in parallel; the template ends no turn",
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}
