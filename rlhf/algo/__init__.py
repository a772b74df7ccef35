"""The mathematics: tensors in, tensors out; every function's equation is in its docstring."""
