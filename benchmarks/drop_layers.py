"""A smaller student from a model: every other layer is left out.   python benchmarks/drop_layers.py MODEL OUT --keep 15

The layers that stay are spread evenly, the first and the last among them. Vocabulary, EOS and chat template are the
model's own, so that the model can be the student's teacher.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer


def kept_layers(count: int, keep: int) -> list[int]:
    """Return the numbers of `keep` layers of `count`, evenly spread from the first to the last."""
    return [round(place * (count - 1) / (keep - 1)) for place in range(keep)]


def main() -> None:
    """Load the model, leave out layers, and save it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--keep", type=int, default=15)
    parsed = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(parsed.model)
    layers = model.model.layers
    numbers = kept_layers(len(layers), parsed.keep)
    model.model.layers = nn.ModuleList([layers[number] for number in numbers])
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = len(numbers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[number] for number in numbers]
    model.save_pretrained(parsed.out)
    AutoTokenizer.from_pretrained(parsed.model).save_pretrained(parsed.out)
    print(f"{parsed.out}: layers {numbers} of {len(layers)}")  # noqa: T201


if __name__ == "__main__":
    main()
