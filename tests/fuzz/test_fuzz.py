"""For any file: a valid object, or our own error; never another exception, never a hang. More: run.py here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzz_cases import CONFIGURATION, DATA_FILE, check_configuration, check_data_file
from hypothesis import HealthCheck, example, given, settings
from made_tokenizers import CHATML, byte_tokenizer
from transformers import PreTrainedTokenizerBase

FEW = settings(max_examples=80, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    made = byte_tokenizer(eos="<|im_end|>", pad="<|pad|>", extra=("<|im_start|>",))
    made.chat_template = CHATML
    return made


@example(case=(b"arms: {a: !!binary gA==}", []))  # 80 draws met such bytes, the first 40 do not
@given(case=CONFIGURATION)
@settings(FEW, max_examples=40)
def test_any_configuration(case: Any, tmp_path: Path) -> None:
    check_configuration(case, tmp_path)


@given(case=DATA_FILE)
@FEW
def test_any_data_file(case: Any, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    check_data_file(case, tmp_path, tokenizer)
