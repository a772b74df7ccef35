"""Render conversations with the chat template, and find where each assistant turn begins and ends in the text.

An assistant turn is the text for the model to generate after the generation prompt: it begins where that prompt
ends, and ends with the template's end-of-turn token. Text after that token (a line break, another special token) is
never trained on. docs/decisions/011-turns.md describes how templates are handled that rewrite earlier turns or open a
thought.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf.config.data import ChatFormat, Learn
from rlhf.data.conversation import (
    REQUIRED_FIELDS,
    THOUGHTS,
    CompletionText,
    Message,
    Prompt,
    Span,
    assistant_turn,
    split_thought,
    with_arguments_as_text,
    without,
)
from rlhf.data.paths import missing
from rlhf.data.rows import BadRow
from rlhf.errors import DataError

Tools = Sequence[Mapping[str, Any]]

_PROBES = ("Probe A", "0 other z")  # answers that differ in their first and their last character
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPENING_TAG = re.compile(r"<(\w+)>\s*")


@dataclass(frozen=True)
class Template:
    """A chat template: its Jinja source, or none; `turns` means that text prompts become user turns too."""

    source: str | None
    turns: bool
    choice: str  # the value of data.chat_template
    tool_source: str | None = None  # for rows with tools, if the tokenizer has a separate template for them
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    specials: tuple[str, ...] = ()  # the tokenizer's special tokens, the longest first
    end: str | None = None  # the special token that ends an assistant's turn of plain text
    starts: tuple[str, ...] = ()  # how a text begins that has the template's turns written out

    def source_for(self, tools: Tools) -> str | None:
        """Return the Jinja source for a conversation with these tools."""
        return self.tool_source if tools and self.tool_source is not None else self.source


def choose_template(tokenizer: PreTrainedTokenizerBase, choice: str | ChatFormat) -> Template:
    """Load the template that `data.chat_template` selects: the tokenizer's own (auto), none, or a file.

    Raises:
        DataError: the file cannot be read, or other chat keys are set although there is no template.
    """
    chat = ChatFormat(choice) if isinstance(choice, str) else choice
    template = _load_template(tokenizer, chat.template)
    if template.source is None and (chat.kwargs or chat.system is not None):
        key = "data.system" if chat.system is not None else "data.chat_template_kwargs"
        raise DataError(f"{key} is given to a chat template, and {_no_template_reason(template)}. Leave it out.")
    template = replace(template, kwargs=chat.kwargs, system=chat.system, specials=special_texts(tokenizer))
    if template.source is None:
        return template
    renderer = TemplateRenderer(tokenizer, template)
    return replace(template, end=_find_turn_end(renderer), starts=_find_turn_starts(renderer))


def _load_template(tokenizer: PreTrainedTokenizerBase, choice: str) -> Template:
    if choice == "none":
        return Template(None, False, choice)
    if choice == "auto":
        templates = tokenizer.chat_template  # some tokenizers have several, by name
        source = templates.get("default") if isinstance(templates, dict) else templates
        tool_source = templates.get("tool_use") if isinstance(templates, dict) else None
        return Template(source, source is not None, choice, tool_source)
    path = Path(choice).expanduser()
    if not path.is_file():
        raise DataError(f"data.chat_template: {missing(choice)}; it is auto, none, or the path of a Jinja file")
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"data.chat_template: {choice} cannot be read: {error}") from error
    return Template(source, True, choice)


def special_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the tokenizer's special tokens as text, longest first."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(special | set(tokenizer.all_special_tokens), key=lambda text: (-len(text), text)))


def turn_end_id(tokenizer: PreTrainedTokenizerBase, template: Template) -> int | None:
    """Return the id of the special token that ends an assistant turn, or None if the template has none.

    It need not be the tokenizer's EOS: Gemma's is <end_of_turn>, Phi-3's <|end|>.
    """
    end = template.end
    end_id = tokenizer.convert_tokens_to_ids(end) if end is not None else None
    return end_id if isinstance(end_id, int) else None


def _find_turn_end(renderer: TemplateRenderer) -> str | None:
    """Return the special token that ends an assistant's turn of plain text, or None if it ends with none."""
    try:
        text = renderer.turn([{"role": "user", "content": "x"}], assistant_turn(_PROBES[0])).text
    except BadRow:
        return None
    return next((special for special in renderer.template.specials if text.endswith(special)), None)


def _find_turn_starts(renderer: TemplateRenderer) -> tuple[str, ...]:
    """Return how a conversation, one with a system prompt, and a user's later turn begin in this template."""
    user: Message = {"role": "user", "content": _PROBES[0]}
    answer = assistant_turn(_PROBES[1])
    cases: list[tuple[list[Message], list[Message]]] = [
        ([], [user]),
        ([], [{"role": "system", "content": _PROBES[0]}, user]),
        ([user, answer], [{"role": "user", "content": _PROBES[1]}]),
    ]
    starts: list[str] = []
    for history, turns in cases:
        try:
            before = renderer.write(history, answer=False) if history else ""
            text = renderer.write([*history, *turns], answer=False).removeprefix(before)
        except BadRow:  # the template takes no system prompt
            continue
        starts.append(_first_marker(text.partition(str(turns[0]["content"]))[0].strip(), renderer))
    return tuple(dict.fromkeys(start for start in starts if start))


def _first_marker(header: str, renderer: TemplateRenderer) -> str:
    """Return the special token at a header's start, BOS left out; else the whole header, unless it is BOS alone."""
    bos = renderer.tokenizer.bos_token
    rest = header.removeprefix(bos).lstrip() if isinstance(bos, str) else header
    return next((special for special in renderer.template.specials if rest.startswith(special)), header if rest else "")


def is_written_out(text: str, template: Template, bos: str | None) -> bool:
    """Return whether a text has the template's turns written out already: it begins like a turn, maybe after BOS."""
    bare = text.lstrip()
    body = bare.removeprefix(bos).lstrip() if bos else bare
    return bare.startswith(template.starts) or body.startswith(template.starts)


@dataclass(frozen=True)
class Rendered:
    """A prompt and its completions as text; the model reads prompt + completion."""

    prompt: str
    completions: tuple[str, ...]
    templated: bool  # the chat template wrote the text, special tokens included
    learned: tuple[tuple[Span, ...], ...] = ()  # for each completion, the spans to train on; empty: all
    messages: tuple[Message, ...] = ()  # the prompt as a conversation, if it is one
    ignored: tuple[str, ...] = ()  # fields of the row that the template did not write


@dataclass(frozen=True)
class TurnText:
    """One assistant turn: all text before it, and the turn up to and including its end-of-turn token."""

    before: str
    text: str


@dataclass(frozen=True)
class TemplateRenderer:
    """Applies a chat template to conversations."""

    tokenizer: PreTrainedTokenizerBase
    template: Template
    tools: Tools = ()

    def prompt(self, conversation: Sequence[Message]) -> str:
        """Render a conversation that the assistant is to answer, ending with the header of its turn.

        Raises:
            BadRow: the template refuses the conversation or renders nothing.
        """
        before = self.write(conversation, answer=True)
        if not before:
            raise BadRow("the chat template makes nothing of the prompt")
        return before

    def turn(self, conversation: Sequence[Message], answer: Message) -> TurnText:
        """Render the assistant's next turn as the model would have to generate it.

        If the generation prompt opens a thought that the answered conversation lacks, the turn begins at the
        assistant's header, unless the answer has a thought: then the turn continues the opened one.

        Raises:
            BadRow: the template renders no completion, or renders the prompt differently once it is answered.
        """
        before = self.prompt(conversation)
        whole = self.write([*conversation, answer], answer=False)
        thought_turn = self._turn_with_thought(before, conversation, answer, whole)
        if thought_turn is not None:
            return thought_turn
        start = before if whole.startswith(before) else self._header(before, conversation)
        if start is None or not whole.startswith(start):
            raise BadRow("the chat template writes the prompt differently once it is answered")
        text = whole[len(start) :]
        if not text.strip():
            raise BadRow("the chat template makes nothing of the completion")
        return TurnText(start, text[: turn_end(text, self.template)])

    def _turn_with_thought(
        self, before: str, conversation: Sequence[Message], answer: Message, whole: str
    ) -> TurnText | None:
        """Render an answer whose thought the template would drop; return None if it drops none."""
        thought, rest = split_thought(answer)
        if thought is None or (thought.strip() and thought.strip() in whole[_common_prefix_length(before, whole) :]):
            return None
        header = before if whole.startswith(before) else self._header(before, conversation)
        if header is None:
            return None
        opening_tag = _OPENING_TAG.fullmatch(before[len(header) :].lstrip())
        if opening_tag is not None:
            text = f"{thought.strip()}\n</{opening_tag.group(1)}>\n\n{rest.lstrip()}"
        elif isinstance(answer["content"], str) and "</think>" in answer["content"]:
            text = answer["content"]
        else:
            return None
        return TurnText(before, text + self._turn_ending(conversation))

    def _turn_ending(self, conversation: Sequence[Message]) -> str:
        """Return the template's text after an answer, up to and including its end-of-turn token."""
        whole = self.write([*conversation, assistant_turn(_PROBES[0])], answer=False)
        after = whole[whole.rfind(_PROBES[0]) + len(_PROBES[0]) :]
        return after[: turn_end(after, self.template)]

    def _header(self, before: str, conversation: Sequence[Message]) -> str | None:
        """Return the start that the generation prompt shares with the answered conversation, for any answer.

        None if they differ before the assistant's turn: then the template rewrites the prompt itself.
        """
        answered = [self.write([*conversation, assistant_turn(probe)], answer=False) for probe in _PROBES]
        header = before[: min(_common_prefix_length(before, text) for text in answered)]
        prompt = self.write(conversation, answer=False)
        return header if header and header.startswith(prompt[: turn_end(prompt, self.template)]) else None

    def write(self, conversation: Sequence[Message], *, answer: bool) -> str:
        """Render a conversation; with `answer`, the text ends with the header of the assistant's turn."""
        return self._render(conversation, answer=answer, marks=False)[0]

    def render_with_spans(self, conversation: Sequence[Message]) -> tuple[str, list[Span]] | None:
        """Render a conversation with the spans of its {% generation %} blocks; return None if it has no such block."""
        source = self.template.source_for(self.tools)
        if source is None or not _GENERATION_TAG.search(source):
            return None
        text, spans = self._render(conversation, answer=False, marks=True)
        return text, [(start, end) for start, end in spans if end > start]

    def _render(self, conversation: Sequence[Message], *, answer: bool, marks: bool) -> tuple[str, list[Span]]:
        source = self.template.source_for(self.tools)
        if source is None:
            raise DataError(
                f"The rows are conversations, and {_no_template_reason(self.template)}. Set data.chat_template to the "
                "path of a Jinja file, or give rows with a plain-text prompt (for transcripts: prompt, chosen and "
                "rejected as text)."
            )
        given = [{key: value for key, value in message.items() if value is not None} for message in conversation]
        try:
            return self._apply(source, given, answer=answer, marks=marks)
        except jinja2.TemplateSyntaxError as error:
            choice = self.template.choice
            raise DataError(f"data.chat_template={choice}: line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, TypeError, ValueError) as error:  # a template raises to refuse a conversation
            raise BadRow("the chat template refuses the conversation", str(error)[:100]) from error

    def _apply(self, source: str, given: list[Message], *, answer: bool, marks: bool) -> tuple[str, list[Span]]:
        """Apply the template; if it cannot take the arguments of a tool call as an object, it gets their text."""
        try:
            result: Any = render_jinja_template(
                [given],
                tools=[dict(tool) for tool in self.tools] or None,
                chat_template=source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=answer,
                **{**self.tokenizer.special_tokens_map, **self.template.kwargs},
            )
        except TypeError:
            as_text = with_arguments_as_text(given)
            if as_text == given:
                raise
            return self._apply(source, as_text, answer=answer, marks=marks)
        texts, spans = result  # one of each per conversation, though transformers' annotation says less
        return texts[0], list(spans[0]) if marks else []


def _no_template_reason(template: Template) -> str:
    return "data.chat_template is none" if template.choice == "none" else "the tokenizer has no chat template"


def turn_end(text: str, template: Template) -> int:
    """Return where the last turn of `text` ends.

    Of the special tokens at the end of the text, which white space may separate, it ends after the one that ends a turn
    of plain text (LFM2 writes <|tool_call_end|><|im_end|> after a tool call), else after the first. Without any, the
    turn is the whole text.
    """
    end, rest = len(text), text
    while special := next((token for token in template.specials if rest.rstrip().endswith(token)), None):
        rest = rest.rstrip()
        end = len(rest)
        if special == template.end and not rest.removesuffix(special).rstrip().endswith(special):
            return end
        rest = rest.removesuffix(special)
    return end


def _common_prefix_length(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def with_default_system(conversation: Sequence[Message], template: Template) -> list[Message]:
    """Prepend the system prompt of data.system to a conversation that has none."""
    if template.system is None or conversation[0]["role"] == "system":
        return list(conversation)
    return [{"role": "system", "content": template.system}, *conversation]


def render(
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    prompt: Prompt,
    completions: Sequence[str | Sequence[Message]],
    *,
    tools: Tools = (),
) -> Rendered:
    """Render a prompt and its completions as text; a completion is the assistant's text, or messages it begins.

    The completion is the template's text after the prompt, up to the end of its last turn.

    Raises:
        BadRow: the template refuses the conversation, or renders the prompt of two completions differently.
    """
    if isinstance(prompt, str):
        texts = [text if isinstance(text, str) else str(text[-1]["content"]) for text in completions]
        return Rendered(prompt, tuple(texts), templated=False)
    conversation = with_default_system(prompt, template)
    writer = TemplateRenderer(tokenizer, template, tools)
    if not completions:
        return _render_prompt(writer, conversation)
    sides = [[assistant_turn(side)] if isinstance(side, str) else list(side) for side in completions]
    return _render_sides(writer, conversation, sides)


def _render_prompt(writer: TemplateRenderer, conversation: Sequence[Message]) -> Rendered:
    text = writer.prompt(conversation)
    return Rendered(text, (), True, messages=tuple(conversation), ignored=ignored_fields(writer, conversation, text))


def _render_sides(
    writer: TemplateRenderer, conversation: Sequence[Message], sides: Sequence[Sequence[Message]]
) -> Rendered:
    """Render a conversation with each of its continuations, so that all have the same prompt.

    Raises:
        BadRow: the template refuses a continuation, or renders the prompt of two of them differently.
    """
    rendered = [_render_side(writer, conversation, side) for side in sides]
    before = _common_prompt(rendered)
    aligned = [side.starting_at(len(before)) for side in rendered]
    ignored = {
        name
        for side, text in zip(sides, rendered, strict=True)
        for name in ignored_fields(writer, [*conversation, *side], text.before + text.text)
    }
    return Rendered(
        before,
        tuple(side.text for side in aligned),
        True,
        () if all(side.is_learned_whole for side in aligned) else tuple(side.learned for side in aligned),
        tuple(conversation),
        tuple(sorted(ignored)),
    )


def _common_prompt(sides: Sequence[CompletionText]) -> str:
    """Return the shortest prompt of the sides: one may begin at the assistant's header, another after it.

    Raises:
        BadRow: another side's prompt does not begin with it.
    """
    before = min((side.before for side in sides), key=len)
    if not all(side.before.startswith(before) for side in sides):
        raise BadRow("the chat template writes the prompt of the two sides differently")
    return before


class RewrittenTurn(BadRow):
    """An earlier assistant turn is rendered differently once more messages follow."""


def _render_side(writer: TemplateRenderer, prompt: Sequence[Message], side: Sequence[Message]) -> CompletionText:
    turns = [len(prompt) + i for i, message in enumerate(side) if message["role"] == "assistant"]
    return _find_turns(writer, [*prompt, *side], turns)


def _find_turns(writer: TemplateRenderer, conversation: Sequence[Message], turns: Sequence[int]) -> CompletionText:
    """Render a conversation up to the last of `turns` (message numbers of assistant turns), and find their spans.

    A turn is the template's text if the conversation ends there.

    Raises:
        RewrittenTurn: an earlier turn is rendered differently in the whole conversation.
    """
    turn_texts = [writer.turn(conversation[:i], conversation[i]) for i in turns]
    whole = turn_texts[-1].before + turn_texts[-1].text
    if not all(whole.startswith(turn.before + turn.text) for turn in turn_texts):
        raise RewrittenTurn("the chat template writes an earlier turn differently once more follows")
    start = len(turn_texts[0].before)
    spans = tuple((len(turn.before) - start, len(turn.before) + len(turn.text) - start) for turn in turn_texts)
    return CompletionText(whole[:start], whole[start:], spans)


def _marked_turns(
    writer: TemplateRenderer, conversation: Sequence[Message], turns: Sequence[int]
) -> CompletionText | None:
    """Find turns by the template's {% generation %} blocks; return None unless each assistant turn has exactly one."""
    marked = writer.render_with_spans(conversation)
    answers = [i for i, message in enumerate(conversation) if message["role"] == "assistant"]
    if marked is None or len(marked[1]) != len(answers):
        return None
    whole, specials = marked[0], writer.template.specials
    spans = [marked[1][answers.index(i)] for i in turns]
    start, (last_start, last_end) = spans[0][0], spans[-1]
    end = last_start + turn_end(whole[last_start:last_end], writer.template)
    learned = ((a - start, b - start) for a, b in [*spans[:-1], (last_start, end)])
    # A block may end before the end-of-turn token.
    end_token = next((token for token in specials if whole.startswith(token, end)), "")
    return CompletionText(whole[:start], whole[start : end + len(end_token)], tuple(learned))


def conversation_rows(
    writer: TemplateRenderer, conversation: Sequence[Message], learn: Learn, *, given: int
) -> list[Rendered]:
    """Render a demonstration conversation as one row, or as a row per turn if the template rewrites earlier turns.

    `given`: so many messages at the start are the prompt; the assistant's turns among them are never trained on.
    """
    messages = with_default_system(conversation, writer.template)
    if learn == "all":
        turn = writer.turn(messages[:-1], messages[-1])
        text = turn.before + turn.text
        return [Rendered("", (text,), True, ignored=ignored_fields(writer, messages, text))]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    first = given + len(messages) - len(conversation)
    turns = [i for i in answers if i >= first] if learn == "assistant" else answers[-1:]
    sides = _locate_turns(writer, messages, turns)
    ignored = ignored_fields(writer, messages, "".join(side.before + side.text for side in sides))
    return [
        Rendered(side.before, (side.text,), True, () if side.is_learned_whole else (side.learned,), ignored=ignored)
        for side in sides
    ]


def _locate_turns(writer: TemplateRenderer, messages: Sequence[Message], turns: Sequence[int]) -> list[CompletionText]:
    """Find `turns` in one text, by the template's marks or else by rendering, or in a text each if one is rewritten."""
    marked = _marked_turns(writer, messages, turns)
    if marked is not None:
        return [marked]
    try:
        return [_find_turns(writer, messages, turns)]
    except RewrittenTurn:
        return [_find_turns(writer, messages[: i + 1], [i]) for i in turns]


def ignored_fields(writer: TemplateRenderer, conversation: Sequence[Message], written: str) -> tuple[str, ...]:
    """Return the message fields, and "tools", that the template does not write into the text."""
    names = sorted({name for message in conversation for name in message} - REQUIRED_FIELDS)
    if not names and not writer.tools:
        return ()
    ignored = _fields_without_effect(writer, conversation, names)
    thought = split_thought(conversation[-1])[0]
    thought_is_written = thought is not None and thought.strip() in written
    return tuple(name for name in ignored if not (thought_is_written and name in THOUGHTS))


def _fields_without_effect(
    writer: TemplateRenderer, conversation: Sequence[Message], names: Sequence[str]
) -> list[str]:
    """Return the fields among `names`, and "tools", without which the template renders the same text.

    A field without which it refuses the conversation (Mistral's tool_call_id) has an effect.
    """
    answer = conversation[-1]["role"] != "assistant"
    whole = writer.write(conversation, answer=answer)

    def renders_the_same(renderer: TemplateRenderer, messages: Sequence[Message]) -> bool:
        try:
            return renderer.write(messages, answer=answer) == whole
        except BadRow:
            return False

    ignored = [name for name in names if renders_the_same(writer, without(conversation, name))]
    if writer.tools and renders_the_same(replace(writer, tools=()), conversation):
        ignored.append("tools")
    return ignored
