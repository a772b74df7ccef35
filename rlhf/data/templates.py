"""Conversations as text: what the chat template writes, where each turn of the assistant begins, and where it ends.

A turn of the assistant is what the model would have to write after the generation prompt: it begins where that ends,
and ends with the template's end-of-turn token. What follows that token (a line break, another special token) is
nobody's to learn. docs/decisions/011-turns.md says how templates are dealt with that rewrite turns or open a thought.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from rlhf.config.data import ChatFormat, Learn
from rlhf.data.conversation import THOUGHTS, WRITTEN_BY_ALL, Message, Prompt, assistant_turn, thought_of
from rlhf.data.paths import missing
from rlhf.data.row import BadRow
from rlhf.errors import DataError

Span = tuple[int, int]  # characters, the second one not included
Tools = Sequence[Mapping[str, Any]]

_PROBES = ("Probe A", "0 other z")  # answers that share neither their first nor their last character
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPENING = re.compile(r"<(\w+)>\s*")


@dataclass(frozen=True)
class Template:
    """How conversations become text: a Jinja source, or none; `turns`: text prompts become a user's turn too."""

    source: str | None
    turns: bool
    choice: str  # what data.chat_template says
    tool_source: str | None = None  # for rows with tools, where the tokenizer has a template of its own for them
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    specials: tuple[str, ...] = ()  # the tokenizer's special tokens, the longest first

    def source_for(self, tools: Tools) -> str | None:
        """Return the Jinja source for a conversation with these tools."""
        return self.tool_source if tools and self.tool_source is not None else self.source


def choose_template(tokenizer: PreTrainedTokenizerBase, choice: str | ChatFormat) -> Template:
    """Choose the template `data.chat_template` means: the tokenizer's own (auto), none, or that of a file."""
    chat = ChatFormat(choice) if isinstance(choice, str) else choice
    template = _source_of(tokenizer, chat.template)
    if template.source is None and (chat.kwargs or chat.system is not None):
        key = "data.system" if chat.system is not None else "data.chat_template_kwargs"
        raise DataError(f"{key} is given to a chat template, and {_why_none(template)}. Leave it out.")
    return replace(template, kwargs=chat.kwargs, system=chat.system, specials=special_texts(tokenizer))


def _source_of(tokenizer: PreTrainedTokenizerBase, choice: str) -> Template:
    if choice == "none":
        return Template(None, False, choice)
    if choice == "auto":
        named = tokenizer.chat_template  # some have several, by name
        source = named.get("default") if isinstance(named, dict) else named
        tool_source = named.get("tool_use") if isinstance(named, dict) else None
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
    """List the tokenizer's special tokens as text, the longest first."""
    flagged = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(flagged | set(tokenizer.all_special_tokens), key=lambda text: (-len(text), text)))


def turn_end_id(tokenizer: PreTrainedTokenizerBase, template: Template) -> int | None:
    """Find the token that ends the assistant's turn where it is a special one; None where the template has none.

    It need not be the tokenizer's EOS: Gemma's is <end_of_turn>, Phi-3's <|end|>.
    """
    if template.source is None:
        return None
    try:
        writer = Writer(tokenizer, template)
        text = writer.turn([{"role": "user", "content": "x"}], {"role": "assistant", "content": _PROBES[0]}).text
    except BadRow:
        return None
    end = next((special for special in template.specials if text.endswith(special)), None)
    number = tokenizer.convert_tokens_to_ids(end) if end is not None else None
    return number if isinstance(number, int) else None


@dataclass(frozen=True)
class Rendered:
    """A prompt and its completions as text, whose concatenation is what the model reads."""

    prompt: str
    completions: tuple[str, ...]
    templated: bool  # then the template has written the special tokens
    learned: tuple[tuple[Span, ...], ...] = ()  # of each completion, what the assistant says; empty: all of each
    messages: tuple[Message, ...] = ()  # the prompt as a conversation, where it is one
    ignored: tuple[str, ...] = ()  # fields of the row that the template did not write


@dataclass(frozen=True)
class TurnText:
    """One turn of the assistant: all that stands before it, and the turn up to its end-of-turn token."""

    before: str
    text: str


@dataclass(frozen=True)
class Writer:
    """Applies a chat template to conversations."""

    tokenizer: PreTrainedTokenizerBase
    template: Template
    tools: Tools = ()

    def prompt(self, conversation: Sequence[Message]) -> str:
        """Write a conversation that the assistant is to answer, the header of its turn included."""
        before = self.write(conversation, answer=True)
        if not before:
            raise BadRow("the chat template makes nothing of the prompt")
        return before

    def turn(self, conversation: Sequence[Message], answer: Message) -> TurnText:
        """Write the assistant's next turn, in the form in which a model would write it.

        Where the generation prompt opens a thought that the answered conversation lacks, the turn begins at the
        assistant's header, unless the answer has a thought: then that continues the opened one.
        """
        before = self.prompt(conversation)
        whole = self.write([*conversation, answer], answer=False)
        thinks = self._thinks(before, conversation, answer, whole)
        if thinks is not None:
            return thinks
        start = before if whole.startswith(before) else self._header(before, conversation)
        if start is None or not whole.startswith(start):
            raise BadRow("the chat template writes the prompt differently once it is answered")
        text = whole[len(start) :]
        if not text.strip():
            raise BadRow("the chat template makes nothing of the completion")
        return TurnText(start, text[: turn_end(text, self.template.specials)])

    def _thinks(self, before: str, conversation: Sequence[Message], answer: Message, whole: str) -> TurnText | None:
        """Write out an answer whose thought the template would leave away; None where it leaves none away."""
        thought, rest = thought_of(answer)
        if thought is None or (thought.strip() and thought.strip() in whole[_shared(before, whole) :]):
            return None
        header = before if whole.startswith(before) else self._header(before, conversation)
        if header is None:
            return None
        opened = _OPENING.fullmatch(before[len(header) :].lstrip())
        if opened is not None:
            text = f"{thought.strip()}\n</{opened.group(1)}>\n\n{rest.lstrip()}"
        elif isinstance(answer["content"], str) and "</think>" in answer["content"]:
            text = answer["content"]
        else:
            return None
        return TurnText(before, text + self._ending(conversation))

    def _ending(self, conversation: Sequence[Message]) -> str:
        """Find what the template writes after an answer, up to its end-of-turn token."""
        whole = self.write([*conversation, assistant_turn(_PROBES[0])], answer=False)
        after = whole[whole.rfind(_PROBES[0]) + len(_PROBES[0]) :]
        return after[: turn_end(after, self.template.specials)]

    def _header(self, before: str, conversation: Sequence[Message]) -> str | None:
        """Find how far the generation prompt and an answered conversation agree, whatever is answered.

        None where they part before the assistant's turn: then the template rewrites the prompt itself.
        """
        answered = [self.write([*conversation, assistant_turn(probe)], answer=False) for probe in _PROBES]
        header = before[: min(_shared(before, text) for text in answered)]
        asked = self.write(conversation, answer=False)
        return header if header and header.startswith(asked[: turn_end(asked, self.template.specials)]) else None

    def write(self, conversation: Sequence[Message], *, answer: bool) -> str:
        """Apply the template; with `answer` it ends with the header of the assistant's turn."""
        return self._render(conversation, answer=answer, marks=False)[0]

    def marked(self, conversation: Sequence[Message]) -> tuple[str, list[Span]] | None:
        """Write a whole conversation with what its {% generation %} blocks wrote; None where it has no such block."""
        source = self.template.source_for(self.tools)
        if source is None or not _MARKS.search(source):
            return None
        text, spans = self._render(conversation, answer=False, marks=True)
        return text, [(start, end) for start, end in spans if end > start]

    def _render(self, conversation: Sequence[Message], *, answer: bool, marks: bool) -> tuple[str, list[Span]]:
        source = self.template.source_for(self.tools)
        if source is None:
            raise DataError(
                f"The rows are conversations, and {_why_none(self.template)}. Set data.chat_template to the path of a "
                "Jinja file, or give rows with a plain-text prompt (for transcripts: prompt, chosen and rejected as "
                "text)."
            )
        try:
            result: Any = render_jinja_template(
                [[{key: value for key, value in message.items() if value is not None} for message in conversation]],
                tools=[dict(tool) for tool in self.tools] or None,
                chat_template=source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=answer,
                **{**self.tokenizer.special_tokens_map, **self.template.kwargs},
            )
        except jinja2.TemplateSyntaxError as error:
            choice = self.template.choice
            raise DataError(f"data.chat_template={choice}: line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, TypeError, ValueError) as error:  # a template raises to refuse a conversation
            raise BadRow("the chat template refuses the conversation", str(error)[:100]) from error
        texts, spans = result  # of each conversation, though transformers' annotation says less
        return texts[0], list(spans[0]) if marks else []


def _why_none(template: Template) -> str:
    return "data.chat_template is none" if template.choice == "none" else "the tokenizer has no chat template"


def turn_end(text: str, specials: Sequence[str]) -> int:
    """Find where the turn ends that `text` ends with: after the first of the special tokens at its end.

    White space may stand between and after them. Without any the turn is all of the text.
    """
    end, rest = len(text), text
    while special := next((each for each in specials if rest.rstrip().endswith(each)), None):
        end = len(rest.rstrip())
        rest = rest.rstrip().removesuffix(special)
    return end


def _shared(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def with_system(conversation: Sequence[Message], template: Template) -> list[Message]:
    """Put data.system before a conversation that has no system prompt."""
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
    """Write a prompt and its completions as text; a completion is the assistant's words, or messages it begins.

    What the template writes after the prompt is the completion, up to the end of its last turn.
    """
    if isinstance(prompt, str):
        texts = [text if isinstance(text, str) else str(text[-1]["content"]) for text in completions]
        return Rendered(prompt, tuple(texts), templated=False)
    asked = with_system(prompt, template)
    writer = Writer(tokenizer, template, tools)
    if not completions:
        text = writer.prompt(asked)
        return Rendered(text, (), True, messages=tuple(asked), ignored=ignored_fields(writer, asked, text))
    sides = [[assistant_turn(side)] if isinstance(side, str) else list(side) for side in completions]
    written = [_side_of(writer, asked, side) for side in sides]
    before = min((side.before for side in written), key=len)  # one side begins at the header, another after it
    if not all(side.before.startswith(before) for side in written):
        raise BadRow("the chat template writes the prompt of the two sides differently")
    moved = [side.begun_at(len(before)) for side in written]
    texts = [side.before + side.text for side in written]
    ignored = {
        n for side, text in zip(sides, texts, strict=True) for n in ignored_fields(writer, [*asked, *side], text)
    }
    return Rendered(
        before,
        tuple(side.text for side in moved),
        True,
        () if all(side.is_learned_whole for side in moved) else tuple(side.learned for side in moved),
        tuple(asked),
        tuple(sorted(ignored)),
    )


@dataclass(frozen=True)
class SideText:
    """Turns that follow a prompt, as text, and what of it the assistant says."""

    before: str
    text: str
    learned: tuple[Span, ...]

    @property
    def is_learned_whole(self) -> bool:
        """Say whether the assistant says all of the text."""
        return self.learned == ((0, len(self.text)),)

    def begun_at(self, start: int) -> SideText:
        """Return the same text, begun so many characters after the start of the conversation."""
        more = self.before[start:]
        (first, end), *others = self.learned
        learned = ((first, end + len(more)), *((a + len(more), b + len(more)) for a, b in others))
        return SideText(self.before[:start], more + self.text, learned)


class RewrittenTurn(BadRow):
    """An earlier turn of the assistant is written differently once more follows."""


def _side_of(writer: Writer, prompt: Sequence[Message], side: Sequence[Message]) -> SideText:
    turns = [len(prompt) + i for i, message in enumerate(side) if message["role"] == "assistant"]
    return _turns_of(writer, [*prompt, *side], turns)


def _turns_of(writer: Writer, conversation: Sequence[Message], turns: Sequence[int]) -> SideText:
    """Write a conversation that ends with the assistant, and find these of its turns (numbers of messages) in it.

    A turn is what the template writes when the conversation ends there.

    Raises:
        RewrittenTurn: an earlier turn is not in the whole as it was written then.
    """
    written = [writer.turn(conversation[:at], conversation[at]) for at in turns]
    whole = written[-1].before + written[-1].text
    if not all(whole.startswith(turn.before + turn.text) for turn in written):
        raise RewrittenTurn("the chat template writes an earlier turn differently once more follows")
    start = len(written[0].before)
    spans = tuple((len(turn.before) - start, len(turn.before) + len(turn.text) - start) for turn in written)
    return SideText(whole[:start], whole[start:], spans)


def _marked_turns(writer: Writer, conversation: Sequence[Message], turns: Sequence[int]) -> SideText | None:
    """Find turns by the template's own {% generation %} marks; None where it has not one for each turn."""
    marked = writer.marked(conversation)
    answers = [i for i, message in enumerate(conversation) if message["role"] == "assistant"]
    if marked is None or len(marked[1]) != len(answers):
        return None
    whole, specials = marked[0], writer.template.specials
    spans = [marked[1][answers.index(at)] for at in turns]
    start, (last, until) = spans[0][0], spans[-1]
    end = last + turn_end(whole[last:until], specials)
    inside = ((a - start, b - start) for a, b in [*spans[:-1], (last, end)])
    outside = next((each for each in specials if whole.startswith(each, end)), "")  # marks may leave out the turn's end
    return SideText(whole[:start], whole[start : end + len(outside)], tuple(inside))


def conversation_rows(
    writer: Writer, conversation: Sequence[Message], learn: Learn, *, prompt_turns: bool
) -> list[Rendered]:
    """Write a conversation to imitate: one row, or a row for each turn where the template rewrites earlier turns.

    `prompt_turns`: the assistant's earlier turns are to be learned too, not the last one alone.
    """
    asked = with_system(conversation, writer.template)
    if learn == "all":
        turn = writer.turn(asked[:-1], asked[-1])
        text = turn.before + turn.text
        return [Rendered("", (text,), True, ignored=ignored_fields(writer, asked, text))]
    answers = [i for i, message in enumerate(asked) if message["role"] == "assistant" and i > 0]
    turns = answers if learn == "assistant" and prompt_turns else answers[-1:]
    side = _marked_turns(writer, asked, turns)
    try:
        sides = [side if side is not None else _turns_of(writer, asked, turns)]
    except RewrittenTurn:
        sides = [_turns_of(writer, asked[: at + 1], [at]) for at in turns]
    ignored = ignored_fields(writer, asked, "".join(side.before + side.text for side in sides))
    return [
        Rendered(side.before, (side.text,), True, () if side.is_learned_whole else (side.learned,), ignored=ignored)
        for side in sides
    ]


def ignored_fields(writer: Writer, conversation: Sequence[Message], written: str) -> tuple[str, ...]:
    """Name the fields of these messages, and the tools, that the template writes nowhere."""
    names = sorted({name for message in conversation for name in message} - WRITTEN_BY_ALL)
    if not names and not writer.tools:
        return ()
    answer = conversation[-1]["role"] != "assistant"
    whole = writer.write(conversation, answer=answer)
    ignored = [name for name in names if writer.write(without(conversation, name), answer=answer) == whole]
    if writer.tools and replace(writer, tools=()).write(conversation, answer=answer) == whole:
        ignored.append("tools")
    thought = thought_of(conversation[-1])[0]
    by_hand = thought is not None and thought.strip() in written
    return tuple(name for name in ignored if not (by_hand and name in THOUGHTS))


def without(conversation: Sequence[Message], name: str) -> list[Message]:
    """Return the conversation without one field of its messages."""
    return [{key: value for key, value in message.items() if key != name} for message in conversation]


def segments(length: int, spans: Sequence[Span]) -> list[tuple[Span, bool]]:
    """Cut a text of this length where spans begin and end: each part, and whether it is inside of one."""
    cuts = sorted({0, length, *(at for span in spans for at in span)})
    return [((a, b), any(start <= a and b <= end for start, end in spans)) for a, b in pairwise(cuts) if b > a]
