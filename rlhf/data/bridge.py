"""The tokens between an action and the next one: an observation, as the chat template writes it.

History is never tokenized again: the policy continues the very tokens that it has drawn. So the template's text
after an assistant's turn is found once, as the difference of two renderings of made-up conversations; it has to be the
same after any turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.data.conversation import Message, assistant_turn, with_marks
from rlhf.data.rows import BadRow
from rlhf.data.templates import TemplateRenderer, turn_end_id
from rlhf.data.tokenizer import Encoder
from rlhf.environments.tools import Call, read_calls
from rlhf.errors import ConfigError

_OBSERVED = ("Probe C", "0 seen z")
_CALL = Call("probe", {"text": "a", "number": 1})
_ANSWERS = ("Probe A", "<think>\nsome thought\n</think>\n\nProbe B")
CURE = (
    "Give data.chat_template the path of a Jinja file that leaves earlier turns as they were, or set "
    "environment.max_turns=1"
)


@dataclass(frozen=True)
class Bridge:
    """Writes observations as the tokens that follow an action."""

    encoder: Encoder
    head: str  # the template's text after an assistant's turn, before a user's text
    tail: str  # its text after that, up to the beginning of the assistant's next turn
    end_id: int | None  # the token that ends an assistant's turn; None if none does

    def tokens(self, observation: str | Sequence[Message], last: int, *, role: str = "user") -> list[int]:
        """Encode an observation, with the template's text around it; `last` is the last token of the action.

        An action that was cut, or that ended with another stop token, gets the template's end of turn first. Special
        tokens that the observation spells out are ordinary text.

        Raises:
            ConfigError: the template refuses the messages, or there is none that could write them.
        """
        end = [self.end_id] if self.end_id is not None and last != self.end_id else []
        if isinstance(observation, str) and (role == "user" or not self.encoder.template.turns):
            head, text, tail = self.head, observation, self.tail
        else:
            messages = [{"role": role, "content": observation}] if isinstance(observation, str) else list(observation)
            written = _difference(self.encoder, self._messages(messages), 0)
            marked, contents = with_marks(messages)
            if not self.encoder.spells_specials(contents):
                return [*end, *self.encoder.continuation(written)]
            return [*end, *self.encoder.written(written, _difference(self.encoder, marked, 0), contents)]
        if not self.encoder.spells_specials([text]):
            return [*end, *self.encoder.continuation(head + text + tail)]
        ids = self.encoder.continuation(head) if head else []
        ids += self.encoder.without_specials(text)
        return [*end, *ids, *(self.encoder.continuation(tail) if tail else [])]

    def _messages(self, messages: list[Message]) -> list[Message]:
        if not self.encoder.template.turns:
            raise ConfigError(
                "the environment returned messages, but there is no chat template that could write them: return a text"
            )
        return messages


def make_bridge(encoder: Encoder) -> Bridge:
    """Find the template's text between two turns, and check that it is always the same.

    Raises:
        ConfigError: it depends on earlier text, as in templates that drop earlier thoughts.
    """
    if not encoder.template.turns:
        return Bridge(encoder, "", "", None)
    cases = [
        _difference(encoder, [{"role": "user", "content": text}], history)
        for history in range(len(_histories()))
        for text in _OBSERVED
    ]
    parts = [case.partition(_OBSERVED[number % 2]) for number, case in enumerate(cases)]
    if len({(head, tail) for head, _, tail in parts}) != 1 or not all(middle for _, middle, _ in parts):
        raise _refused(encoder, "writes what stands between two turns differently from case to case")
    head, _, tail = parts[0]
    return Bridge(encoder, head, tail, turn_end_id(encoder.tokenizer, encoder.template))


def _histories() -> list[list[Message]]:
    user: Message = {"role": "user", "content": "Probe Q"}
    short = [user, assistant_turn(_ANSWERS[0])]
    return [short, [*short, user, assistant_turn("Probe D")], [user, assistant_turn(_ANSWERS[1])]]


def _difference(encoder: Encoder, messages: list[Message], history: int) -> str:
    """Return a template's text for messages after an assistant's turn, up to the beginning of its next turn.

    Raises:
        ConfigError: the template refuses the messages, or writes the turn differently once they follow.
    """
    before = _histories()[history]
    renderer = TemplateRenderer(encoder.tokenizer, encoder.template)
    try:
        turn = renderer.turn(before[:-1], before[-1])
        whole = renderer.write([*before, *messages], answer=True)
    except BadRow as error:
        raise _refused(encoder, f"refuses a conversation of several turns ({error})") from error
    if not whole.startswith(turn.before + turn.text):
        raise _refused(encoder, "writes an earlier turn differently once more follows (it may drop thoughts)")
    return whole[len(turn.before + turn.text) :]


def _refused(encoder: Encoder, problem: str) -> ConfigError:
    name = getattr(encoder.tokenizer, "name_or_path", "") or type(encoder.tokenizer).__name__
    choice = encoder.template.choice
    where = f"the chat template of {name}" if choice == "auto" else f"data.chat_template={choice}"
    return ConfigError(f"{where} {problem}, so that an episode's tokens are not those the policy drew. {CURE}")


def writes_tools(encoder: Encoder, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the template has a form of its own for tools, whose calls environments read in an action."""
    template = encoder.template
    if not template.turns:
        return False
    user: list[Message] = [{"role": "user", "content": "Probe Q"}]
    plain = TemplateRenderer(encoder.tokenizer, replace(template, tool_source=None))
    function = {"name": _CALL.name, "arguments": _CALL.arguments}
    call: Message = {**assistant_turn(""), "tool_calls": [{"type": "function", "function": function}]}
    renderer = TemplateRenderer(encoder.tokenizer, template, tools)
    try:
        turn = renderer.turn(user, call).text
        is_in_prompt = renderer.prompt(user) != plain.prompt(user)
    except BadRow:
        return False
    ids = encoder.continuation(turn)
    action = encoder.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return is_in_prompt and read_calls(str(action)) == [_CALL]
