"""Recognize the common row formats of data sets by their columns, and read each into one form per use.

A format is a set of columns and a pure function from a row to `PairText`, `DemoText`, `PromptText` or
`LabelledText`. A prompt is text or a conversation. A completion is the assistant's text, and also a tuple of messages
if it is more than text (tool calls, reasoning, several turns).
`turns` means that a prompt given as text becomes the user's turn of a conversation; transcripts stay text.
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
    check_answer,
    check_prompt,
    check_user_speaks,
    describe_value,
    is_messages,
    messages,
    messages_unless_plain,
    same_message,
    shared_turns,
    some_text,
    split_answer,
    text,
    tools_of,
    with_system,
    without_final_answers,
)
from rlhf.data.rows import BadRow, DataRow, RowCounts
from rlhf.errors import DataError

ASSISTANT = "\n\nAssistant:"
HUMAN = "\n\nHuman:"

Values = Mapping[str, object]
Completion = str | Sequence[Message]
T = TypeVar("T")


@dataclass(frozen=True)
class PairText:
    """Two completions of one prompt, the first preferred by `margin` (0 if the data do not say)."""

    prompt: Prompt
    chosen: str
    rejected: str
    margin: float
    tools: tuple[dict[str, Any], ...] = ()
    sides: tuple[tuple[Message, ...], ...] = ()  # chosen and rejected as messages, if either is more than text

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Return the chosen and the rejected completion in the form passed to the chat template."""
        return self.sides or (self.chosen, self.rejected)


@dataclass(frozen=True)
class DemoText:
    """A completion to imitate; a plain text is the completion of an empty prompt."""

    prompt: Prompt
    completion: str
    tools: tuple[dict[str, Any], ...] = ()
    turns: tuple[Message, ...] = ()  # the completion as messages, if it is more than text
    whole: bool = False  # a conversation: the assistant's turns inside the prompt may be trained on too

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Return the completion in the form passed to the chat template."""
        return (self.turns or self.completion,)


@dataclass(frozen=True)
class PromptText:
    """A prompt to answer, and the columns of its row."""

    prompt: Prompt
    reference: Mapping[str, object]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Return an empty tuple: a prompt has no completion yet."""
        return ()


@dataclass(frozen=True)
class LabelledText:
    """A completion and whether it is desirable."""

    prompt: Prompt
    completion: str
    desirable: bool
    tools: tuple[dict[str, Any], ...] = ()
    turns: tuple[Message, ...] = ()

    @property
    def completions(self) -> tuple[Completion, ...]:
        """Return the completion in the form passed to the chat template."""
        return (self.turns or self.completion,)


def read_prompt_column(value: object, name: str, *, turns: bool) -> Prompt:
    """Read a prompt column: text, or a conversation whose next turn is the assistant's."""
    if is_messages(value) or name != "prompt":
        return check_prompt(messages(value, name), name)
    prompt = as_text(value, name)
    return [_user_message(some_text(prompt, name))] if turns and not is_transcript(prompt) else prompt


def is_transcript(prompt: str) -> bool:
    """Return whether a text prompt is a transcript with its turns written out, as in HH-RLHF."""
    return HUMAN.strip() in prompt and prompt.rstrip().endswith(ASSISTANT.strip())


def _user_message(content: str) -> Message:
    return {"role": "user", "content": content}


def _read_question(values: Values, *, turns: bool) -> Prompt:
    """Read a question: a user message if `turns`, otherwise text that ends with a line break."""
    question = some_text(values.get("question"), "question")
    return with_system([_user_message(question)], values) if turns else question + "\n"


def _read_instruction(values: Values, *, turns: bool) -> Prompt:
    """Read an Alpaca instruction: a user message if `turns`, otherwise text under Alpaca's headings."""
    instruction = some_text(values.get("instruction"), "instruction")
    context = as_text(values.get("input") or "", "input")
    if turns:
        return with_system([_user_message(f"{instruction}\n\n{context}" if context.strip() else instruction)], values)
    heading = f"### Instruction:\n{instruction}\n\n"
    return heading + (f"### Input:\n{context}\n\n" if context.strip() else "") + "### Response:\n"


def _read_prompt(values: Values, column: str, *, turns: bool) -> Prompt:
    match column:
        case "question":
            return _read_question(values, turns=turns)
        case "instruction":
            return _read_instruction(values, turns=turns)
        case _:
            prompt = read_prompt_column(values.get(column), column, turns=turns)
            return prompt if isinstance(prompt, str) else with_system(prompt, values)


def _read_completion(values: Values, column: str, prompt: Prompt) -> tuple[str, tuple[Message, ...]]:
    """Read the assistant's answer: its text, and its messages if it is more than text."""
    value = values.get(column)
    if not is_messages(value):
        return _read_answer(value, prompt, column), ()
    before, answer = split_answer(messages(value, column), column)
    if before:
        raise BadRow(f"{column} has more than the assistant's answer")
    return answer["content"], messages_unless_plain([answer])


def _read_margin(values: Values) -> float:
    """Return the row's `margin`, else score_chosen - score_rejected, else 0."""
    if values.get("margin") not in (None, ""):
        return _to_number(values["margin"], "margin")
    scores = [values.get(name) for name in ("score_chosen", "score_rejected")]
    if any(score in (None, "") for score in scores):
        return 0.0
    return _to_number(scores[0], "score_chosen") - _to_number(scores[1], "score_rejected")


def _to_number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadRow(f"{name} is not a number", describe_value(value))
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise BadRow(f"{name} is not a number", describe_value(value)) from error
    if not math.isfinite(number):
        raise BadRow(f"{name} is not a number", describe_value(value))
    return number


def _text_pair(prompt: Prompt, chosen: str, rejected: str, values: Values) -> PairText:
    if chosen.strip() == rejected.strip():
        raise BadRow("chosen and rejected are the same")
    return PairText(prompt, chosen, rejected, _read_margin(values), tools_of(values))


def explicit_pair(values: Values, *, turns: bool, column: str) -> PairText:
    """Read a pair with a prompt column; both sides are text, an assistant message, or a whole conversation."""
    chosen, rejected = values.get("chosen"), values.get("rejected")
    if is_messages(chosen) != is_messages(rejected):
        raise BadRow("chosen and rejected are not of the same form")
    prompt = _read_prompt(values, column, turns=turns or is_messages(chosen))
    if not is_messages(chosen):
        texts = [_read_answer(side, prompt, name) for side, name in ((chosen, "chosen"), (rejected, "rejected"))]
        return _text_pair(prompt, texts[0], texts[1], values)
    if isinstance(prompt, str):
        raise BadRow(f"{column} is a transcript in text, chosen and rejected are messages: give all three in one form")
    sides = [
        _full_conversation(messages(side, name), prompt, name)
        for side, name in ((chosen, "chosen"), (rejected, "rejected"))
    ]
    return _conversation_pair(sides[0], sides[1], values)


def _read_answer(value: object, prompt: Prompt, name: str) -> str:
    """Read an answer to a transcript in text, whether it repeats the transcript or only answers it."""
    answer = some_text(value, name)
    if isinstance(prompt, str) and is_transcript(prompt) and answer.strip().startswith(prompt.strip()):
        return some_text(answer.lstrip().removeprefix(prompt.strip()), name)
    return answer


def _full_conversation(side: list[Message], prompt: list[Message], name: str) -> list[Message]:
    """Return the whole conversation of one side, whether it repeats the prompt, its last turns, or only answers it."""
    for start in range(len(prompt)):
        if shared_turns(side, prompt[start:]) == len(prompt) - start:
            return prompt[:start] + side
    if side[0]["role"] == "assistant":
        return prompt + side
    if not any(message["content"].strip() == prompt[-1]["content"].strip() for message in side):
        raise BadRow(f"{name} is a conversation in which the prompt does not occur")
    lacks_system = prompt[0]["role"] == "system" and side[0]["role"] != "system"
    return prompt[:1] + side if lacks_system else side


def implicit_pair(values: Values, *, turns: bool) -> PairText:
    """Read a pair whose sides both begin with the prompt: two transcripts, or two conversations."""
    del turns  # a transcript has its turns written out, and a conversation has turns already
    chosen, rejected = values.get("chosen"), values.get("rejected")
    if is_messages(chosen) != is_messages(rejected):
        raise BadRow("chosen and rejected are not of the same form")
    if not is_messages(chosen):
        return _transcript_pair(some_text(chosen, "chosen"), some_text(rejected, "rejected"), values)
    sides = [with_system(messages(side, name), values) for side, name in ((chosen, "chosen"), (rejected, "rejected"))]
    return _conversation_pair(sides[0], sides[1], values)


def _conversation_pair(chosen: list[Message], rejected: list[Message], values: Values) -> PairText:
    """Build a pair by splitting two conversations where they first differ, which must be at an assistant turn."""
    for side, name in ((chosen, "chosen"), (rejected, "rejected")):
        check_answer(side[-1], name)
    split = shared_turns(chosen, rejected)
    if split == min(len(chosen), len(rejected)):
        split -= 1  # one side is the beginning of the other
    if len(chosen) == len(rejected) and all(map(same_message, chosen, rejected)):
        raise BadRow("chosen and rejected are the same")
    answers = (chosen[split:], rejected[split:])
    if any(answer[0]["role"] != "assistant" for answer in answers):
        raise BadRow("chosen and rejected part where the assistant does not speak")
    prompt = check_prompt(chosen[:split], "the conversation before the answers")
    texts = [str(answer[-1]["content"]) for answer in answers]
    sides = tuple(tuple(answer) for answer in answers) if any(map(messages_unless_plain, answers)) else ()
    return PairText(prompt, texts[0], texts[1], _read_margin(values), tools_of(values), sides)


def _transcript_pair(chosen: str, rejected: str, values: Values) -> PairText:
    """Build a pair from HH-RLHF transcripts; the prompt ends with the last "\\n\\nAssistant:" and must be shared."""
    prompt, answer = _split_transcript(chosen, "chosen")
    other_prompt, other_answer = _split_transcript(rejected, "rejected")
    if prompt != other_prompt:
        raise BadRow("chosen and rejected differ before the last answer")
    return _text_pair(prompt, some_text(answer, "chosen"), some_text(other_answer, "rejected"), values)


def _split_transcript(transcript: str, name: str) -> tuple[str, str]:
    at = transcript.rfind(ASSISTANT)
    if at < 0:
        raise BadRow(f"{name} is neither a transcript (no {ASSISTANT!r}) nor has it a prompt column")
    prompt, answer = transcript[: at + len(ASSISTANT)], transcript[at + len(ASSISTANT) :]
    if HUMAN in answer:
        raise BadRow(f"{name} ends with a human's turn")
    return prompt, answer


def completion_demo(values: Values, *, turns: bool, prompt: str, completion: str) -> DemoText:
    """Read a demonstration from a prompt column and a completion column; `finished`: false refuses a sample cut off.

    With it, a model would learn to end in the middle of a sentence: every completion is followed by EOS.
    """
    if str(values.get("finished")).strip().lower() in ("false", "0"):  # a table's cells are text
        raise BadRow(f"{completion} was cut before it ended (finished: false)")
    question = _read_prompt(values, prompt, turns=turns)
    answer, answer_messages = _read_completion(values, completion, question)
    return DemoText(question, answer, tools_of(values), answer_messages)


def conversation_demo(values: Values, *, turns: bool, column: str) -> DemoText:
    """Read a conversation: its last message is the completion; earlier assistant turns may be trained on too."""
    del turns
    conversation = with_system(messages(values.get(column), column), values)
    before, answer = split_answer(conversation, column)
    check_user_speaks(before, column)
    return DemoText(before, answer["content"], tools_of(values), messages_unless_plain([answer]), whole=True)


def chosen_demo(values: Values, *, turns: bool, pair: Callable[..., PairText]) -> DemoText:
    """Read the chosen side of a pair as a demonstration."""
    preference = pair(values, turns=turns)
    return DemoText(
        preference.prompt,
        preference.chosen,
        preference.tools,
        messages_unless_plain(preference.sides[0]) if preference.sides else (),
    )


def text_demo(values: Values, *, turns: bool) -> DemoText:
    """Read a plain text as a demonstration, to be trained on from its first word."""
    del turns
    return DemoText("", some_text(values.get("text"), "text"))


def column_prompt(values: Values, *, turns: bool, column: str) -> PromptText:
    """Read a prompt column; for a conversation, everything before the assistant's final answer."""
    if is_messages(values.get(column)):
        conversation = with_system(messages(values[column], column), values)
        return PromptText(without_final_answers(conversation, column), dict(values), tools_of(values))
    return PromptText(_read_prompt(values, column, turns=turns), dict(values), tools_of(values))


def pair_prompt(values: Values, *, turns: bool, pair: Callable[..., PairText]) -> PromptText:
    """Read the prompt of a pair."""
    preference = pair(values, turns=turns)
    return PromptText(preference.prompt, dict(values), preference.tools)


def text_prompt(values: Values, *, turns: bool) -> PromptText:
    """Read a plain text as a prompt; `data.prompts.first_tokens` may shorten it later."""
    del turns
    return PromptText(text(values, "text"), dict(values))


def labelled(values: Values, *, turns: bool, demo: Callable[..., DemoText]) -> LabelledText:
    """Read a demonstration with a `label`: true if it is desirable."""
    label = _parse_label(values.get("label"))
    demonstration = demo(values if label else {**values, "finished": None}, turns=turns)  # a bad one may be cut
    return LabelledText(demonstration.prompt, demonstration.completion, label, demonstration.tools, demonstration.turns)


def _parse_label(value: object) -> bool:
    labels = {"true": True, "1": True, "false": False, "0": False}
    key = str(value).strip().lower() if isinstance(value, bool | int | str) else ""
    if key not in labels:
        raise BadRow("label is neither true nor false", describe_value(value))
    return labels[key]


@dataclass(frozen=True)
class RowFormat(Generic[T]):
    """The columns a row format needs, and the function that reads such a row: `read(values, turns=...)`."""

    columns: tuple[str, ...]
    read: Callable[..., T]


@dataclass(frozen=True)
class RowFormats(Generic[T]):
    """A use of data and the row formats it accepts; the first one that fits a file is used."""

    name: str
    shapes: tuple[RowFormat[T], ...]

    def choose_format(self, rows: Sequence[DataRow], file: str) -> RowFormat[T]:
        """Return the first shape that fits the columns which at least half of the rows in `file` have.

        Raises:
            DataError: no shape fits.
        """
        counts = Counter(name for row in rows for name in row.values)
        columns = [name for name, count in counts.items() if 2 * count >= len(rows)]
        for shape in self.shapes:
            if set(shape.columns) <= set(columns):
                return shape
        understood = "; ".join(" + ".join(shape.columns) for shape in self.shapes)
        hint = ""
        if self.name == PAIRS.name and any(set(shape.columns) <= set(columns) for shape in LABELLED.shapes):
            hint = " For completions with a label each set algorithm.preset=kto."
        if self.name == LABELLED.name and any(set(shape.columns) <= set(columns) for shape in PAIRS.shapes):
            hint = " Pairs are split into two labelled completions only if one path, without stream, has all rows."
        raise DataError(
            f"{file}: no {self.name} in these columns: {', '.join(map(repr, columns)) or 'none'}. "
            f"Understood are: {understood}. Columns with other names can be renamed, as in columns: "
            f"{{{self.shapes[0].columns[0]}: their name}}.{hint}"
        )

    def read(
        self, rows: Sequence[DataRow], skips: RowCounts, *, turns: bool | Callable[[Values], bool]
    ) -> Iterator[tuple[DataRow, T]]:
        """Yield each usable row with its parsed form; unusable rows are recorded in `skips`.

        `turns` is for all rows, or a function that tells it of each.
        """
        files: dict[str, list[DataRow]] = {}
        for row in rows:
            files.setdefault(row.file, []).append(row)
        for file, file_rows in files.items():
            shape = self.choose_format(file_rows, file)
            for row in file_rows:
                try:
                    parsed = shape.read(row.values, turns=turns(row.values) if callable(turns) else turns)
                except BadRow as bad:
                    skips.add(row, bad.reason, bad.detail)
                    continue
                yield row, parsed


def _explicit_reader(column: str) -> Callable[..., PairText]:
    return partial(explicit_pair, column=column)


_PAIR_READERS: tuple[tuple[tuple[str, ...], Callable[..., PairText]], ...] = (
    (("prompt", "chosen", "rejected"), _explicit_reader("prompt")),
    (("conversations", "chosen", "rejected"), _explicit_reader("conversations")),
    (("instruction", "chosen", "rejected"), _explicit_reader("instruction")),
    (("question", "chosen", "rejected"), _explicit_reader("question")),
    (("chosen", "rejected"), implicit_pair),
)
_COMPLETION_COLUMNS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
_DEMO_SHAPES: tuple[RowFormat[DemoText], ...] = (
    *(RowFormat(c, partial(completion_demo, prompt=c[0], completion=c[1])) for c in _COMPLETION_COLUMNS),
    *(RowFormat(c, partial(chosen_demo, pair=read)) for c, read in _PAIR_READERS),
    *(RowFormat((c,), partial(conversation_demo, column=c)) for c in ("messages", "conversations")),
    RowFormat(("text",), text_demo),
)

PAIRS = RowFormats("preference pairs", tuple(RowFormat(columns, read) for columns, read in _PAIR_READERS))
DEMONSTRATIONS = RowFormats("texts to imitate", _DEMO_SHAPES)
PROMPTS: RowFormats[PromptText] = RowFormats(
    "prompts",
    (
        *(RowFormat(c, partial(pair_prompt, pair=read)) for c, read in _PAIR_READERS),
        *(
            RowFormat((c,), partial(column_prompt, column=c))
            for c in ("prompt", "messages", "conversations", "instruction", "question")
        ),
        RowFormat(("text",), text_prompt),
    ),
)
LABELLED: RowFormats[LabelledText] = RowFormats(
    "labelled completions",
    tuple(
        RowFormat((*s.columns, "label"), partial(labelled, demo=s.read))
        for s in _DEMO_SHAPES
        if "chosen" not in s.columns
    ),
)
