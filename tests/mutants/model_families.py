"""Bugs seeded where families of models differ: what ends a turn, what a window hides, which fast way is on."""

from __future__ import annotations

from mutant import Mutant

MODEL_FAMILIES = [
    Mutant(
        name="family-loses-its-written-out-layers",
        file="rlhf/models/kernels/llama/families.py",
        before="    Qwen3Model: _llama,\n",
        after="",
        why="nothing is wrong but the speed: a fast way that could be on is off, and no number shows it",
        tests=("tests/zoo/test_zoo.py::test_fast_ways_are_those_of_the_table",),
    ),
    Mutant(
        name="window-hides-nothing",
        file="rlhf/models/kernels/packing.py",
        before="return window is None or rows.longest <= window",
        after="return True",
        why="rows longer than a window go without padding, which cannot hide what the window hides",
        tests=("tests/zoo/test_zoo.py::test_log_probabilities_are_those_of_transformers",),
    ),
    Mutant(
        name="one-eos-of-several",
        file="rlhf/models/backbone.py",
        before="configured = eos if isinstance(eos, list) else [eos]",
        after="configured = eos[:1] if isinstance(eos, list) else [eos]",
        why="Llama 3, Qwen, Gemma and Phi end a turn with several tokens: sampling runs on past the others",
        tests=("tests/zoo/test_zoo.py::test_it_loads_as_published",),
    ),
]
