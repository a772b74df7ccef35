"""Chat templates as the families write them, cut down to what matters here, each with its tokenizer's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from made_tokenizers import CHATML, byte_tokenizer
from transformers import PreTrainedTokenizerBase

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
QWEN3 = (  # thoughts leave the history; the last answer always has one, if an empty one
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}{% set thought = m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ text }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</tool_call>"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1 = (  # opens a thought for the answer, and writes no answer's thought
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template, the tokenizer's special tokens, and what ends a turn."""

    template: str
    end: str
    eos: str
    bos: str | None = None
    extra: tuple[str, ...] = ()

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Make a tokenizer of bytes with these special tokens; nothing is put before a text."""
        tokenizer = byte_tokenizer(bos=self.bos, eos=self.eos, pad=None, extra=self.extra)
        tokenizer.chat_template = self.template
        return tokenizer


_CHATML = {"end": "<|im_end|>", "eos": "<|im_end|>", "extra": ("<|im_start|>", "<|endoftext|>")}
FAMILIES: dict[str, Family] = {
    "chatml": Family(CHATML, **_CHATML),  # type: ignore[arg-type]
    "llama3": Family(
        LLAMA3, "<|eot_id|>", "<|end_of_text|>", "<bos>", ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")
    ),
    "gemma": Family(GEMMA, "<end_of_turn>", "<eos>", "<bos>", ("<end_of_turn>", "<start_of_turn>")),
    "phi3": Family(PHI3, "<|end|>", "<|endoftext|>", None, ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")),
    "mistral": Family(MISTRAL, "</s>", "</s>", "<s>"),
    "qwen3": Family(QWEN3, **_CHATML),  # type: ignore[arg-type]
    "r1": Family(R1, "<|end_of_sentence|>", "<|end_of_sentence|>", "<bos>", ("<|User|>", "<|Assistant|>")),
    "marked": Family(MARKED, **_CHATML),  # type: ignore[arg-type]
}
