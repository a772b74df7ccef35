"""The suite checks shapes and types: a wrong value is refused at the call that passes it."""

from __future__ import annotations

import pytest
import torch
from beartype.roar import BeartypeCallHintParamViolation, BeartypeCallHintReturnViolation
from shape_checks import CHECKED_CALLS, begin_test, decorate

from rlhf.algo.masked import Mean, masked_mean
from rlhf.errors import install_hint
from rlhf.models.logprobs import TokenStatistics

MASK = torch.ones(2, 3, dtype=torch.bool)


def test_two_arguments_of_one_shape() -> None:
    assert masked_mean(torch.ones(2, 3), MASK) == 1.0
    with pytest.raises(BeartypeCallHintParamViolation) as refused:
        masked_mean(torch.ones(2, 4), MASK)
    assert "shape" in "".join(refused.value.__notes__)  # jaxtyping's: the sizes so far
    with pytest.raises(BeartypeCallHintParamViolation):
        masked_mean(torch.ones(2, 3), MASK.long())


def test_methods() -> None:
    assert Mean.of(torch.ones(2, 3), MASK).value == 1.0
    with pytest.raises(BeartypeCallHintParamViolation):
        Mean.of(torch.ones(2, 3), MASK.long())


def test_what_names_no_shape_has_types_all_the_same() -> None:
    with pytest.raises(BeartypeCallHintParamViolation):
        install_hint(3)  # type: ignore[arg-type]


def test_what_is_returned_and_shapes_with_a_name() -> None:
    def statistics(rows: int) -> TokenStatistics:
        return torch.ones(rows, 2)

    checked = decorate(statistics)
    assert checked(3).shape == (3, 2)
    with pytest.raises(BeartypeCallHintReturnViolation):
        checked(2)


def test_the_first_calls_of_each_test_are_checked() -> None:
    def length(text: str) -> int:
        return len(text)

    checked = decorate(length)
    for _ in range(2):
        begin_test()
        for _ in range(CHECKED_CALLS):
            with pytest.raises(BeartypeCallHintParamViolation):
                checked([1])
        assert checked([1]) == 1
