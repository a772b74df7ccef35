"""Decoder layers of Llama, Mistral, Qwen, Phi-3, OLMo 2, Gemma 3 and others, written out with their gradients.

- `families`: the one list of families, and the places of their weights.
- `forward`: the whole body over packed rows, each layer as two autograd functions.
- `elementwise`: norms, RoPE and gates.
"""
