"""A function reward sees the right texts, and every mistake with it is named plainly."""

from __future__ import annotations

import ast
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import BOS, EOS, PAD, completions_of, tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlhf.errors import RewardError
from rlhf.rewards.function import FunctionReward, TimeLimitExceeded, load_function, run_with_timeout
from rlhf.rewards.source import decode
from rlhf.types import Completions
from rlhf.user_code import check_target


def three() -> Completions:
    """One finished, one with a pad token inside and not finished, one that is EOS alone."""
    return completions_of([[BOS, 5, 7], [4], [PAD, 6, 8]], [[3, 14, EOS], [15, PAD, 9, 4], [EOS]])


def written(folder: Path, body: str) -> str:
    (folder / "mine.py").write_text(body)
    return f"{folder / 'mine.py'}:score"


def returning(folder: Path, value: str) -> Callable[[], Any]:
    """Scoring the three by a function whose whole body is `return value`."""
    target = written(folder, f"import math\ndef score(prompts, completions, references):\n    return {value}\n")
    return lambda: FunctionReward(target, {}, tokenizer())(three())


def test_it_is_called_with_texts_references_and_kwargs(tmp_path: Path) -> None:
    target = written(
        tmp_path,
        "def score(prompts, completions, references, scale, shift=0):\n"
        "    seen = [p + '|' + c + '|' + r['answer'] for p, c, r in zip(prompts, completions, references)]\n"
        "    assert type(references) is list and type(references[0]) is dict\n"
        "    assert seen == ['t5 t7|' + ' t3 t14|a', 't4| t15 t9 t4|b', 'asked||c'], seen\n"
        "    return [scale * len(c.split()) + shift for c in completions]\n",
    )
    batch = replace(three(), references=({"answer": "a"}, {"answer": "b"}, {"answer": "c", "prompt": "asked"}))
    scores = FunctionReward(target, {"scale": 2}, tokenizer())(batch)
    assert scores.values.tolist() == [4.0, 6.0, 0.0]
    assert scores.values.dtype == torch.float32
    assert scores.parts == {}


def test_a_prompt_column_that_is_no_text_is_not_the_prompt() -> None:
    messages = [{"role": "user", "content": "hello"}]
    batch = replace(three(), references=({"prompt": messages}, {}, {"prompt": "asked"}))
    assert decode(batch, tokenizer()).prompts == ["t5 t7", "t4", "asked"]


def test_an_eos_that_is_no_special_token_is_left_out_only_where_it_ended_the_text() -> None:
    plain = tokenizer()
    batch = completions_of([[5], [5]], [[3, 9, 9], [3, 9]])
    ended = replace(batch, finished=torch.tensor([True, False]))
    assert decode(ended, plain).completions == [" t3 t9", " t3 t9"]


def test_the_text_of_an_episode_is_what_the_policy_wrote() -> None:
    """The environment's t8 and t9 are no part of it, nor the end of an action; an action that was cut has none."""
    batch = completions_of([[5], [5], [5]], [[3, EOS, 8, 9, 4, EOS, 8], [3, EOS, 8, 4, 6], [7, EOS]])
    turns = torch.tensor([[0, 0, -1, -1, 1, 1, -1], [0, 0, -1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
    batch = replace(batch, episode_turns=turns, finished=torch.tensor([True, False, True]))
    assert decode(batch, tokenizer()).completions == [" t3\n t4", " t3\n t4 t6", " t7"]


def test_the_leading_space_of_a_completion_survives(shared: Path) -> None:
    """Decoded alone, stories260K's tokens of " was a girl" lose their first space."""
    theirs = AutoTokenizer.from_pretrained(shared / "models" / "stories260K" / "hf")
    ids = theirs("Once upon a time, there was a girl")["input_ids"]
    texts = decode(completions_of([ids[:7]], [ids[7:]]), theirs)
    assert texts.prompts[0] + texts.completions[0] == "Once upon a time, there was a girl"
    assert texts.completions[0].startswith(" ")


def test_a_character_cut_by_the_prompts_end_breaks_nothing() -> None:
    vocab = {symbol: i for i, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bytewise = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = bytewise("aé!")["input_ids"]
    assert len(ids) == 4
    texts = decode(replace(completions_of([ids[:2]], [ids[2:]]), finished=torch.tensor([False])), bytewise)
    assert texts.completions[0].endswith("!")
    assert texts.prompts[0].startswith("a")


def test_the_text_is_what_was_written_whatever_the_tokenizer_likes_to_clean_up() -> None:
    """ " ." became "." with the tokenizers that ask for it: a reward of code or JSON read another text."""
    backend = Tokenizer(WordLevel({"t3": 3, ".": 4, "'": 5}, unk_token="t3"))
    cleaning = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    texts = decode(completions_of([[3, 4]], [[3, 5, 3, 4]]), cleaning)
    assert (texts.prompts, texts.completions) == (["t3 ."], [" t3 ' t3 ."])


@pytest.mark.parametrize(
    "value, expected",
    [
        ("[1, 2.5, -3]", [1.0, 2.5, -3.0]),
        ("(1, 2, 3)", [1.0, 2.0, 3.0]),
        ("[True, False, True]", [1.0, 0.0, 1.0]),
        ("__import__('numpy').array([1, 2, 3], dtype='int64')", [1.0, 2.0, 3.0]),
        ("__import__('torch').tensor([0.5, 0.25, 4.0], dtype=__import__('torch').bfloat16)", [0.5, 0.25, 4.0]),
        ("list(__import__('numpy').array([0.5, 1, 2], dtype='float32'))", [0.5, 1.0, 2.0]),
        ("list(__import__('torch').tensor([0.5, 1, 2]))", [0.5, 1.0, 2.0]),
    ],
)
def test_any_list_of_numbers_will_do(value: str, expected: list[float], tmp_path: Path) -> None:
    assert returning(tmp_path, value)().values.tolist() == expected


def test_parts_are_kept_by_name(tmp_path: Path) -> None:
    scores = returning(tmp_path, "([1, 2, 3], {'length': [4, 5, 6], 'fit': [0.5, 0.5, 0]})")()
    assert scores.values.tolist() == [1.0, 2.0, 3.0]
    assert {name: part.tolist() for name, part in scores.parts.items()} == {
        "length": [4.0, 5.0, 6.0],
        "fit": [0.5, 0.5, 0.0],
    }


def test_two_scores_in_a_tuple_are_not_scores_and_parts(tmp_path: Path) -> None:
    target = written(tmp_path, "def score(prompts, completions, references):\n    return (1.0, 2.0)\n")
    two = three().rows(slice(0, 2))
    assert FunctionReward(target, {}, tokenizer())(two).values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    "value, message",
    [
        ("[1, 2]", r"2 scores for 3 completions; the first without one: ''"),
        ("[1]", r"1 scores for 3 completions; the first without one: ' t15 t9 t4'"),
        ("[1, 2, 3, 4]", r"4 scores for 3 completions$"),
        ("[1, math.nan, math.nan]", r"2 scores of 3 that are not finite.*'nan', for the completion ' t15 t9 t4'"),
        ("[1, 2, -math.inf]", r"1 scores of 3 .*'-inf', for the completion ''"),
        ("[1e39, 2, 3]", r"1 scores of 3 .*'1e\+39', for the completion ' t3 t14'"),
        ("[10**400, 2, 3]", r"1 scores of 3 .* for the completion ' t3 t14'"),
        ("['0.5', 2, 3]", r"1 scores of 3 .*'0.5', for the completion ' t3 t14' \(it is a string: return numbers"),
        ("[1, None, 3]", r"1 scores of 3 .*'None', for the completion ' t15 t9 t4'"),
        (
            "[[1], [2], [3]]",
            r"3 scores of 3 that are not finite .*\(it is a list: return one number for each completion",
        ),
        ("None", r"returned NoneType for scores; give a list"),
        ("0.5", r"returned float for scores"),
        ("'abc'", r"returned str for scores"),
        ("{0: 1, 1: 2, 2: 3}", r"returned dict for scores"),
        ("([1, 2, 3], {'fit': [1, 2]})", r"2 values of part 'fit' for 3 completions"),
        ("([1, 2, 3], {'fit': [1, 2, math.nan]})", r"1 values of part 'fit' of 3 that are not finite"),
    ],
)
def test_what_is_no_list_of_finite_numbers_is_named(value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=message) as caught:
        returning(tmp_path, value)()
    assert "mine.py:score" in str(caught.value)


def test_a_column_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    body = "def score(prompts, completions, references):\n    return [row['sentence'] for row in references]\n"
    reward = FunctionReward(written(tmp_path, body), {}, tokenizer())
    rows = replace(three(), references=({"prompt": "p", "answer": "x"},) * 3)
    with pytest.raises(
        RewardError, match=r"KeyError: 'sentence' at .*mine\.py:2 .*The rows have the columns answer, prompt"
    ):
        reward(rows)
    with pytest.raises(RewardError, match="The rows have no columns"):
        reward(replace(three(), references=({},) * 3))


@pytest.mark.parametrize(
    "raised", ["ValueError('bad answer')", "KeyError('answer')", "type('Odd', (Exception,), {})('bad answer')"]
)
def test_what_the_function_raises_is_told_with_its_line(raised: str, tmp_path: Path) -> None:
    target = written(tmp_path, f"def score(prompts, completions, references):\n    raise {raised}\n")
    reward = FunctionReward(target, {}, tokenizer())
    with pytest.raises(
        RewardError, match=r"answer'? at .*mine\.py:2 \(called with 3 completions; the first: ' t3 t14'\)"
    ):
        reward(three())


def test_an_interruption_is_no_reward_error(tmp_path: Path) -> None:
    target = written(tmp_path, "def score(prompts, completions, references):\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        FunctionReward(target, {}, tokenizer())(three())


def test_a_long_completion_is_cut_in_the_message(tmp_path: Path) -> None:
    target = written(tmp_path, "def score(prompts, completions, references):\n    return [float('nan')]\n")
    with pytest.raises(RewardError) as caught:
        FunctionReward(target, {}, tokenizer())(completions_of([[5]], [[11] * 500]))
    assert len(str(caught.value)) < 600
    assert "…" in str(caught.value)


def test_a_module_function_is_loaded_by_name() -> None:
    assert load_function("math:sqrt") is math.sqrt
    assert load_function("numpy.linalg:norm") is np.linalg.norm


@pytest.mark.parametrize(
    "target, message",
    [
        ("math", "write module:function or"),
        ("math:", "write module:function or"),
        (":sqrt", "write module:function or"),
        ("math:sqr", "math has no 'sqr'; did you mean sqrt"),
        ("math:zzzzzz", "math has no 'zzzzzz'$"),
        ("math:pi", "'pi' is a float, not a function"),
        ("no_such_package.rewards:score", "no module 'no_such_package.rewards': install it"),
        ("numpy.lineal:norm", "no module 'numpy.lineal'"),
    ],
)
def test_a_wrong_target_is_named(target: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load_function(target)


def test_a_missing_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    written(tmp_path, "")
    with pytest.raises(RewardError, match=r"no reward file .*mien\.py'; did you mean .*mine\.py"):
        load_function(f"{tmp_path / 'mien.py'}:score")
    with pytest.raises(RewardError, match="no reward file"):
        load_function("nowhere/at/all.py:score")


def test_a_missing_name_in_a_file_is_named_with_the_nearest(tmp_path: Path) -> None:
    written(tmp_path, "def score(prompts, completions, references): ...")
    with pytest.raises(RewardError, match="has no 'scores'; did you mean score"):
        load_function(f"{tmp_path / 'mine.py'}:scores")


def test_a_missing_name_is_told_before_the_file_runs(tmp_path: Path) -> None:
    written(tmp_path, "import no_such_helper_that_is_slow\ndef score(prompts, completions, references): ...")
    with pytest.raises(RewardError, match="has no 'scores'; did you mean score"):
        load_function(f"{tmp_path / 'mine.py'}:scores")


@pytest.mark.parametrize(
    "body",
    [
        "from math import *\n",
        "globals()['sqrt'] = abs\n",
        "if True:\n    from math import sqrt\n",
        "from math import floor as sqrt\n",
    ],
)
def test_a_name_that_the_file_binds_in_another_way_is_found(body: str, tmp_path: Path) -> None:
    written(tmp_path, body)
    assert callable(load_function(f"{tmp_path / 'mine.py'}:sqrt"))


@pytest.mark.parametrize(
    "body, message",
    [
        (
            "import no_such_helper\nscore = 0\n",
            r"ModuleNotFoundError: No module named 'no_such_helper' at .*mine\.py:1",
        ),
        ("score = 1\nscore / 0\n", r"ZeroDivisionError: division by zero at .*mine\.py:2"),
        ("import os\ndef score(:\n", r"SyntaxError: invalid syntax at .*mine\.py:2$"),
        ("import ast\nscore = ast.literal_eval('1 +')\n", r"SyntaxError: invalid syntax at .*mine\.py:2$"),
    ],
)
def test_a_file_that_does_not_import_tells_the_cause(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=message):
        load_function(written(tmp_path, body))


def test_a_module_that_lacks_another_tells_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lacking_module.py").write_text("import no_such_helper\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RewardError, match=r"importing .*'lacking_module' failed.*'no_such_helper'"):
        load_function("lacking_module:score")


def test_a_misspelled_argument_is_told_before_any_training(tmp_path: Path) -> None:
    target = written(tmp_path, "def score(prompts, completions, references, *, lexicon): ...")
    with pytest.raises(RewardError, match="lexicn"):
        FunctionReward(target, {"lexicn": "x"}, tokenizer())
    forms = r"Write score\(prompts, completions, references\).* score\(completions, COLUMN, \*\*kwargs\)"
    with pytest.raises(RewardError, match=f"missing a required argument: 'lexicon'.*{forms}"):
        FunctionReward(target, {}, tokenizer())
    with pytest.raises(RewardError, match=r"'prompts' is given .* already"):
        FunctionReward(target, {"lexicon": "x", "prompts": []}, tokenizer())
    FunctionReward(target, {"lexicon": "x"}, tokenizer())


def test_a_file_may_define_dataclasses(tmp_path: Path) -> None:
    """They look their module up by name."""
    target = written(
        tmp_path,
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
        "def score(prompts, completions, references):\n    return [A(2).x for _ in prompts]\n",
    )
    assert FunctionReward(target, {}, tokenizer())(three()).values.tolist() == [2.0, 2.0, 2.0]


@pytest.fixture
def alarms() -> Iterator[list[float]]:
    """The times at which SIGALRM arrives at a handler of the user's own."""
    times: list[float] = []
    previous = signal.signal(signal.SIGALRM, lambda *_: times.append(time.monotonic()))
    yield times
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, previous)


def test_a_timer_that_is_set_goes_on_after_a_call(alarms: list[float]) -> None:
    assert run_with_timeout(5.0, lambda: 1) == 1
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)  # none was set, none is
    signal.setitimer(signal.ITIMER_REAL, 1000.0, 7.0)
    run_with_timeout(5.0, lambda: time.sleep(0.1))
    left, interval = signal.getitimer(signal.ITIMER_REAL)
    assert 900.0 < left <= 999.95  # the time of the call counts
    assert interval == 7.0
    with pytest.raises(TimeLimitExceeded):
        run_with_timeout(0.05, lambda: time.sleep(5))
    assert 900.0 < signal.getitimer(signal.ITIMER_REAL)[0] < left


def test_a_timer_that_came_due_meanwhile_fires_after_the_call(alarms: list[float]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    assert run_with_timeout(5.0, lambda: (time.sleep(0.2), list(alarms))[1]) == []
    time.sleep(0.05)
    assert len(alarms) == 1


def trl(tmp_path: Path, body: str, rows: list[dict[str, Any]], **kwargs: Any) -> list[float]:
    """The scores of three completions of these rows by a function in TRL's form."""
    batch = replace(three(), references=tuple(rows))
    return FunctionReward(written(tmp_path, body), kwargs, tokenizer())(batch).values.tolist()


SOLVED: list[dict[str, Any]] = [
    {"prompt": "a", "solution": "t14", "level": 1},
    {"prompt": "b", "solution": "no", "level": 2},
    {"prompt": "c"},
]


def test_columns_are_keyword_arguments_in_the_form_of_trl(tmp_path: Path) -> None:
    body = (
        "def score(completions, solution, **kwargs):\n"
        "    assert sorted(kwargs) == ['level', 'prompts'], kwargs\n"
        "    assert kwargs['level'] == [1, 2, None]\n"
        "    return [float(s is not None and s in c) for c, s in zip(completions, solution)]\n"
    )
    assert trl(tmp_path, body, SOLVED) == [1.0, 0.0, 0.0]


def test_only_the_columns_that_are_named_are_given(tmp_path: Path) -> None:
    body = "def score(prompts, completions, level, bonus=0):\n    return [bonus + (n or 0) for n in level]\n"
    assert trl(tmp_path, body, SOLVED) == [1.0, 2.0, 0.0]
    assert trl(tmp_path, body, SOLVED, bonus=3) == [4.0, 5.0, 3.0]


def test_conversations_are_messages_in_the_form_of_trl_and_texts_in_ours(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]
    rows = [{"prompt": "<u>hello", "prompt_messages": messages, "prompt_is_conversation": True}] * 3
    body = (
        "def score(prompts, completions, **kwargs):\n"
        "    assert not kwargs, kwargs\n"
        "    assert prompts[0] == [{'role': 'user', 'content': 'hello'}]\n"
        "    return [len(completion[0]['content'].split()) for completion in completions]\n"
    )
    assert trl(tmp_path, body, rows) == [2.0, 3.0, 0.0]
    ours = "def score(prompts, completions, references):\n    return [len(c.split()) for c in completions]\n"
    (tmp_path / "ours").mkdir()
    assert trl(tmp_path / "ours", ours, rows) == [2.0, 3.0, 0.0]


def test_a_text_prompt_is_given_as_its_row_has_it(tmp_path: Path) -> None:
    """Without chat template and system prompt, in both forms and in the row; a prompt that was cut as it is left."""
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    rows = [{"prompt": "<s>be brief<u>hello", "prompt_messages": messages}] * 2 + [{"prompt": "lo"}]
    body = (
        "def score(prompts, completions, **kwargs):\n"
        "    assert prompts == ['hello', 'hello', 'lo'], prompts\n"
        "    return [float(isinstance(c, str)) for c in completions]\n"
    )
    assert trl(tmp_path, body, rows) == [1.0, 1.0, 1.0]
    ours = (
        "def score(prompts, completions, references):\n"
        "    assert prompts == [row['prompt'] for row in references] == ['hello', 'hello', 'lo'], prompts\n"
        "    return [1.0 for _ in prompts]\n"
    )
    (tmp_path / "ours").mkdir()
    assert trl(tmp_path / "ours", ours, rows) == [1.0, 1.0, 1.0]


def test_a_column_that_the_rows_do_not_have_is_named(tmp_path: Path) -> None:
    body = "def score(completions, solutoin): ...\n"
    with pytest.raises(RewardError, match=r"argument 'solutoin'.*did you mean solution\?.*level, solution.*kwargs"):
        trl(tmp_path, body, SOLVED)


def test_none_leaves_a_completion_to_the_other_functions_of_an_ensemble(tmp_path: Path) -> None:
    target = written(tmp_path, "def score(completions, level, **kwargs):\n    return [n and n / 2 for n in level]\n")
    batch = replace(three(), references=tuple(SOLVED))
    scores = FunctionReward(target, {}, tokenizer(), may_abstain=True)(batch).values
    assert scores[:2].tolist() == [0.5, 1.0]
    assert math.isnan(scores[2])
    with pytest.raises(RewardError, match="only a source in an ensemble"):
        FunctionReward(target, {}, tokenizer())(batch)


def test_a_file_is_parsed_again_after_a_fault_of_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPython 3.11 raises it at random: a garbage collection falls into the parsing."""
    file = tmp_path / "reward.py"
    file.write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    parse, calls = ast.parse, []

    def faulty(*args: Any, **kwargs: Any) -> ast.AST:
        calls.append(args)
        if len(calls) == 1:
            raise SystemError("AST constructor recursion depth mismatch (before=195, after=215)")
        return parse(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("rlhf.user_code.ast.parse", faulty)
        check_target(f"{file}:score", what="reward", error=RewardError)
    assert len(calls) == 2
