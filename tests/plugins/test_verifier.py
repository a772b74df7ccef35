"""A verifier with settings of its own, in a file of the user: its children import the file, too."""

from __future__ import annotations

from pathlib import Path

from tiny_models import EOS, completions_of, tokenizer

from rlhf.config.load import validate
from rlhf.plugins import load_plugins
from rlhf.rewards.verifier import VerifierReward, VerifierSource

PLUGIN = '''
from typing import Literal

from rlhf.verifiers.grader import Grader, GradeFunction


class FewWords(Grader):
    """Grades 1 if there are few words."""

    type: Literal["few_words"] = "few_words"
    words: int = 5
    """The most words."""

    def start(self) -> GradeFunction:
        return lambda completion, row: float(0 < len(completion.split()) <= self.words)
'''


def test_a_verifier_of_a_plugin_grades_in_children(tmp_path: Path) -> None:
    (tmp_path / "few_words.py").write_text(PLUGIN)
    load_plugins({"plugins": [str(tmp_path / "few_words.py")]})
    source = validate(VerifierSource, {"type": "verifier", "name": "few_words", "words": 1, "workers": 1})
    scores = VerifierReward(source, tokenizer())(completions_of([[7], [7]], [[3, EOS], [3, 4, EOS]]))
    assert scores.values.tolist() == [1, 0]
    assert scores.parts["few_words"].tolist() == [1, 0]
