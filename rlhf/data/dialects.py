"""What rows look like in the data sets people have, read into one form for each use.

A dialect is a set of columns and a pure function from a row to `PairText`, `DemoText`, `PromptText` or
`LabelledText`. A prompt is text or a conversation; a completion is text, the assistant's words, and where it is more
than that (tool calls, a thought, several turns) messages as well.
`turns` says that a prompt given as text is to become the user's turn of a conversation; a transcript stays one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from rlhf.data.conversation import (
    Message,
    Prompt,
    as_text,
    asking,
    check_answer,
    is_messages,
    messages,
    more_than_text,
    open_question,
    same_message,
    shared_turns,
    shown,
    some_text,
    split_answer,
    text,
    tools_of,
    with_system,
)
from rlhf.data.row import BadRow, Row
from rlhf.data.skips import Skips
from rlhf.errors import DataError

ASSISTANT = "\n\nAssistant:"
HUMAN = "\n\nHuman:"

Values = Mapping[str, object]
Completion = str | Sequence[Message]
T = TypeVar("T")


@dataclass(frozen=True)
class PairText:
    """Two completions of one prompt, the first preferred by `margin` (0 where the data do not say)."""

    prompt: Prompt
    chosen: str
    rejected: str
    margin: float
    tools: tuple[dict[str, Any], ...] = ()
    sides: tuple[tuple[Message, ...], ...] = ()  # chosen and rejected as messages, where one is more than a text

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Return the two sides as the template is given them."""
        return self.sides or (self.chosen, self.rejected)


@dataclass(frozen=True)
class DemoText:
    """A completion to imitate; a plain text is the completion of an empty prompt."""

    prompt: Prompt
    completion: str
    tools: tuple[dict[str, Any], ...] = ()
    turns: tuple[Message, ...] = ()  # the completion as messages, where it is more than a text
    whole: bool = False  # a row of messages: the assistant's earlier turns, in the prompt, are its words to learn too

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Return the completion as the template is given it."""
        return (self.turns or self.completion,)


@dataclass(frozen=True)
class PromptText:
    """A prompt to answer, and the columns of its row."""

    prompt: Prompt
    reference: Mapping[str, object]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Return nothing: a prompt is to be answered."""
        return ()


@dataclass(frozen=True)
class LabelledText:
    """A completion and whether it is a desirable one."""

    prompt: Prompt
    completion: str
    desirable: bool
    tools: tuple[dict[str, Any], ...] = ()
    turns: tuple[Message, ...] = ()

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Return the completion as the template is given it."""
        return (self.turns or self.completion,)


def ask(value: object, name: str, *, turns: bool) -> Prompt:
    """A prompt column: text, or a conversation the assistant is to answer."""
    if is_messages(value) or name != "prompt":
        return asking(messages(value, name), name)
    prompt = as_text(value, name)
    return [_turn(some_text(prompt, name))] if turns and not is_transcript(prompt) else prompt


def is_transcript(prompt: str) -> bool:
    """Say whether a text prompt has its turns written out, as HH-RLHF has them."""
    return HUMAN.strip() in prompt and prompt.rstrip().endswith(ASSISTANT.strip())


def _turn(content: str) -> Message:
    return {"role": "user", "content": content}


def _question(values: Values, *, turns: bool) -> Prompt:
    """A question, and a line of its own for the answer; bare as a user's turn."""
    asked = some_text(values.get("question"), "question")
    return [_turn(asked)] if turns else asked + "\n"


def _instruction(values: Values, *, turns: bool) -> Prompt:
    """An Alpaca instruction under Alpaca's headings; bare as a user's turn."""
    instruction = some_text(values.get("instruction"), "instruction")
    given = as_text(values.get("input") or "", "input")
    if turns:
        return with_system([_turn(f"{instruction}\n\n{given}" if given.strip() else instruction)], values)
    heading = f"### Instruction:\n{instruction}\n\n"
    return heading + (f"### Input:\n{given}\n\n" if given.strip() else "") + "### Response:\n"


def _asked(values: Values, column: str, *, turns: bool) -> Prompt:
    match column:
        case "question":
            return _question(values, turns=turns)
        case "instruction":
            return _instruction(values, turns=turns)
        case _:
            prompt = ask(values.get(column), column, turns=turns)
            return prompt if isinstance(prompt, str) else with_system(prompt, values)


def _completion(values: Values, column: str) -> tuple[str, tuple[Message, ...]]:
    """Read the assistant's answer: its text, and its message where that has more."""
    value = values.get(column)
    if not is_messages(value):
        return some_text(value, column), ()
    before, answer = split_answer(messages(value, column), column)
    if before:
        raise BadRow(f"{column} has more than the assistant's answer")
    return answer["content"], more_than_text([answer])


def _margin(values: Values) -> float:
    """`margin`, or how much higher the chosen side is scored; 0 where the row has neither."""
    if values.get("margin") not in (None, ""):
        return _number(values["margin"], "margin")
    scores = [values.get(name) for name in ("score_chosen", "score_rejected")]
    if any(score in (None, "") for score in scores):
        return 0.0
    return _number(scores[0], "score_chosen") - _number(scores[1], "score_rejected")


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadRow(f"{name} is not a number", shown(value))
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise BadRow(f"{name} is not a number", shown(value)) from error
    if not math.isfinite(number):
        raise BadRow(f"{name} is not a number", shown(value))
    return number


def _pair(prompt: Prompt, chosen: str, rejected: str, values: Values) -> PairText:
    if chosen.strip() == rejected.strip():
        raise BadRow("chosen and rejected are the same")
    return PairText(prompt, chosen, rejected, _margin(values), tools_of(values))


def explicit_pair(values: Values, *, turns: bool, column: str) -> PairText:
    """A prompt of its own; both sides are text, an assistant's message, or the whole conversation."""
    chosen, rejected = values.get("chosen"), values.get("rejected")
    if is_messages(chosen) != is_messages(rejected):
        raise BadRow("chosen and rejected are not of the same form")
    prompt = _asked(values, column, turns=turns or is_messages(chosen))
    if not is_messages(chosen):
        return _pair(prompt, some_text(chosen, "chosen"), some_text(rejected, "rejected"), values)
    assert not isinstance(prompt, str)
    sides = [_whole(messages(side, name), prompt, name) for side, name in ((chosen, "chosen"), (rejected, "rejected"))]
    return _conversations_pair(sides[0], sides[1], values)


def _whole(side: list[Message], asked: list[Message], name: str) -> list[Message]:
    """The whole conversation of one side, whether it repeats the prompt or only answers it."""
    if shared_turns(side, asked) == len(asked):
        return side
    if side[0]["role"] == "assistant":
        return asked + side
    if any(message["content"].strip() == asked[-1]["content"].strip() for message in side):
        return side
    raise BadRow(f"{name} is a conversation in which the prompt does not occur")


def implicit_pair(values: Values, *, turns: bool) -> PairText:
    """Both sides begin with the prompt: two transcripts, or two conversations."""
    del turns  # a transcript has its turns written out; a conversation is one already
    chosen, rejected = values.get("chosen"), values.get("rejected")
    if is_messages(chosen) != is_messages(rejected):
        raise BadRow("chosen and rejected are not of the same form")
    if not is_messages(chosen):
        return _transcripts_pair(some_text(chosen, "chosen"), some_text(rejected, "rejected"), values)
    sides = [with_system(messages(side, name), values) for side, name in ((chosen, "chosen"), (rejected, "rejected"))]
    return _conversations_pair(sides[0], sides[1], values)


def _conversations_pair(chosen: list[Message], rejected: list[Message], values: Values) -> PairText:
    """Split both sides where they part, which must be at a turn of the assistant's."""
    for side, name in ((chosen, "chosen"), (rejected, "rejected")):
        check_answer(side[-1], name)
    at = shared_turns(chosen, rejected)
    if at == min(len(chosen), len(rejected)):
        at -= 1  # one side is all of the other, and goes on
    if len(chosen) == len(rejected) and all(map(same_message, chosen, rejected)):
        raise BadRow("chosen and rejected are the same")
    answers = (chosen[at:], rejected[at:])
    if any(answer[0]["role"] != "assistant" for answer in answers):
        raise BadRow("chosen and rejected part where the assistant does not speak")
    prompt = asking(chosen[:at], "the conversation before the answers")
    texts = [str(answer[-1]["content"]) for answer in answers]
    sides = tuple(tuple(answer) for answer in answers) if any(map(more_than_text, answers)) else ()
    return PairText(prompt, texts[0], texts[1], _margin(values), tools_of(values), sides)


def _transcripts_pair(chosen: str, rejected: str, values: Values) -> PairText:
    """HH-RLHF: the prompt is all up to and including the last "\\n\\nAssistant:", which the two must share."""
    prompt, answer = _last_answer(chosen, "chosen")
    other_prompt, other_answer = _last_answer(rejected, "rejected")
    if prompt != other_prompt:
        raise BadRow("chosen and rejected differ before the last answer")
    return _pair(prompt, some_text(answer, "chosen"), some_text(other_answer, "rejected"), values)


def _last_answer(transcript: str, name: str) -> tuple[str, str]:
    at = transcript.rfind(ASSISTANT)
    if at < 0:
        raise BadRow(f"{name} is neither a transcript (no {ASSISTANT!r}) nor has it a prompt column")
    prompt, answer = transcript[: at + len(ASSISTANT)], transcript[at + len(ASSISTANT) :]
    if HUMAN in answer:
        raise BadRow(f"{name} ends with a human's turn")
    return prompt, answer


def completion_demo(values: Values, *, turns: bool, prompt: str, completion: str) -> DemoText:
    """A prompt column and a completion column."""
    asked = _asked(values, prompt, turns=turns)
    answer, messages_of_it = _completion(values, completion)
    return DemoText(asked, answer, tools_of(values), messages_of_it)


def conversation_demo(values: Values, *, turns: bool, column: str) -> DemoText:
    """A conversation that the assistant ends: its last message is the completion, its earlier ones are learned too."""
    del turns
    conversation = with_system(messages(values.get(column), column), values)
    before, answer = split_answer(conversation, column)
    return DemoText(asking(before, column), answer["content"], tools_of(values), more_than_text([answer]), whole=True)


def chosen_demo(values: Values, *, turns: bool, pair: Callable[..., PairText]) -> DemoText:
    """The preferred side of a pair."""
    both = pair(values, turns=turns)
    return DemoText(both.prompt, both.chosen, both.tools, more_than_text(both.sides[0]) if both.sides else ())


def text_demo(values: Values, *, turns: bool) -> DemoText:
    """A plain text, learned from its first word on."""
    del turns
    return DemoText("", some_text(values.get("text"), "text"))


def column_prompt(values: Values, *, turns: bool, column: str) -> PromptText:
    """A column with the prompt; of a conversation, all before the assistant's last answer."""
    if is_messages(values.get(column)):
        conversation = with_system(messages(values[column], column), values)
        return PromptText(open_question(conversation, column), dict(values), tools_of(values))
    return PromptText(_asked(values, column, turns=turns), dict(values), tools_of(values))


def pair_prompt(values: Values, *, turns: bool, pair: Callable[..., PairText]) -> PromptText:
    """The prompt of a pair."""
    both = pair(values, turns=turns)
    return PromptText(both.prompt, dict(values), both.tools)


def text_prompt(values: Values, *, turns: bool) -> PromptText:
    """A plain text, or as much of it as `first_tokens` says."""
    del turns
    return PromptText(text(values, "text"), dict(values))


def labelled(values: Values, *, turns: bool, demo: Callable[..., DemoText]) -> LabelledText:
    """A demonstration with a `label`: true where it is desirable."""
    text_of_it = demo(values, turns=turns)
    label = _label(values.get("label"))
    return LabelledText(text_of_it.prompt, text_of_it.completion, label, text_of_it.tools, text_of_it.turns)


def _label(value: object) -> bool:
    names = {"true": True, "1": True, "false": False, "0": False}
    key = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if key not in names:
        raise BadRow("label is neither true nor false", shown(value))
    return names[key]


@dataclass(frozen=True)
class Shape(Generic[T]):
    """Columns that rows must have, and how such a row is read: `read(values, turns=...)`."""

    columns: tuple[str, ...]
    read: Callable[..., T]


@dataclass(frozen=True)
class Use(Generic[T]):
    """A use of data and the shapes it takes, the first that fits being meant."""

    name: str
    shapes: tuple[Shape[T], ...]

    def shape_of(self, rows: Sequence[Row], file: str) -> Shape[T]:
        """The shape of a file: by the columns that at least half of its rows have."""
        counts = Counter(name for row in rows for name in row.values)
        columns = [name for name, count in counts.items() if 2 * count >= len(rows)]
        for shape in self.shapes:
            if set(shape.columns) <= set(columns):
                return shape
        understood = "; ".join(" + ".join(shape.columns) for shape in self.shapes)
        raise DataError(
            f"{file}: no {self.name} in these columns: {', '.join(map(repr, columns)) or 'none'}. "
            f"Understood are: {understood}. Columns with other names can be renamed, as in columns: "
            f"{{{self.shapes[0].columns[0]}: their name}}."
        )

    def read(self, rows: Sequence[Row], skips: Skips, *, turns: bool) -> Iterator[tuple[Row, T]]:
        """The usable rows in this form; the others go to `skips`."""
        files: dict[str, list[Row]] = {}
        for row in rows:
            files.setdefault(row.file, []).append(row)
        for file, its_rows in files.items():
            shape = self.shape_of(its_rows, file)
            for row in its_rows:
                try:
                    found = shape.read(row.values, turns=turns)
                except BadRow as bad:
                    skips.add(row, bad.reason, bad.detail)
                    continue
                yield row, found


def _explicit(column: str) -> Callable[..., PairText]:
    return partial(explicit_pair, column=column)


_PAIR_READERS: tuple[tuple[tuple[str, ...], Callable[..., PairText]], ...] = (
    (("prompt", "chosen", "rejected"), _explicit("prompt")),
    (("conversations", "chosen", "rejected"), _explicit("conversations")),
    (("instruction", "chosen", "rejected"), _explicit("instruction")),
    (("question", "chosen", "rejected"), _explicit("question")),
    (("chosen", "rejected"), implicit_pair),
)
_COMPLETION_COLUMNS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
_DEMO_SHAPES: tuple[Shape[DemoText], ...] = (
    *(Shape(c, partial(completion_demo, prompt=c[0], completion=c[1])) for c in _COMPLETION_COLUMNS),
    *(Shape(c, partial(chosen_demo, pair=read)) for c, read in _PAIR_READERS),
    *(Shape((c,), partial(conversation_demo, column=c)) for c in ("messages", "conversations")),
    Shape(("text",), text_demo),
)

PAIRS = Use("preference pairs", tuple(Shape(columns, read) for columns, read in _PAIR_READERS))
DEMONSTRATIONS = Use("texts to imitate", _DEMO_SHAPES)
PROMPTS: Use[PromptText] = Use(
    "prompts",
    (
        *(Shape(c, partial(pair_prompt, pair=read)) for c, read in _PAIR_READERS),
        *(
            Shape((c,), partial(column_prompt, column=c))
            for c in ("prompt", "messages", "conversations", "instruction", "question")
        ),
        Shape(("text",), text_prompt),
    ),
)
LABELLED: Use[LabelledText] = Use(
    "labelled completions",
    tuple(
        Shape((*s.columns, "label"), partial(labelled, demo=s.read)) for s in _DEMO_SHAPES if "chosen" not in s.columns
    ),
)
