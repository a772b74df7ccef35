"""Optimizations that give the same numbers: each is verified against the model's own modules before it is used.

- `packing`: batches without padding, prompts shared by their completions. `attention`: within their rows, in
  rectangles or in one call for rows of any length.
- `cast`: 16-bit products on a CPU, each weight cast once an optimizer step.
- `llama`: decoder layers of Llama and similar models, written out.
"""
