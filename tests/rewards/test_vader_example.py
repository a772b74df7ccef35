"""The example reward: by hand on a small lexicon, and on the real one if it is at hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import EOS, completions_of, tokenizer

from rlhf.rewards.function import FunctionReward, load_function

TARGET = f"{Path(__file__).resolve().parents[2] / 'examples' / 'vader_reward.py'}:score"


def scored(lexicon: Path, *texts: str, **more: object) -> list[float]:
    count = len(texts)
    scores = load_function(TARGET)(["sad. "] * count, list(texts), [{}] * count, lexicon=str(lexicon), **more)
    assert isinstance(scores, list)
    return scores


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "lexicon.txt"
    path.write_text("good\t2.0\t0.5\t[1]\nsad\t-1.0\t0.5\t[1]\nwon't\t-3.0\t0.1\t[1]\n:)\t4.0\t0.1\t[1]\n")
    return path


def test_scores_by_hand(small: Path) -> None:
    """The sums are 4, 0, -1, -3 and 0, each then over the root of its square + 15."""
    scores = scored(small, "Good, GOOD!", "a goodly thing", "sad :)", "I won't", "")
    assert scores == pytest.approx([4 / 31**0.5, 0.0, -1 / 16**0.5, -3 / 24**0.5, 0.0])


def test_the_prompt_counts_only_where_asked(small: Path) -> None:
    assert scored(small, "good", with_prompt=True) == pytest.approx([1 / 16**0.5])
    assert scored(small, "good", with_prompt=False) == pytest.approx([2 / 19**0.5])


def test_it_is_a_function_reward(tmp_path: Path) -> None:
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("t7\t1.0\t0\t[]\nt\t1.0\t0\t[]\n")
    reward = FunctionReward(TARGET, {"lexicon": str(lexicon)}, tokenizer())
    values = reward(completions_of([[5], [5]], [[7, EOS], [EOS]])).values
    assert values.tolist() == pytest.approx([0.25, 0.0])  # the word of "t7" is "t"


def test_the_real_lexicon(shared: Path) -> None:
    scores = scored(shared / "data" / "vader" / "vader_lexicon.txt", "She was happy.", "It was a terrible day.")
    assert scores == pytest.approx([2.7 / (2.7**2 + 15) ** 0.5, -2.1 / (2.1**2 + 15) ** 0.5])
