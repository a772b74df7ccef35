"""Bytes and floating-point operations of one model: weights, the tensors of a pass, the key-value cache.

The formulas follow the written-out layers (rlhf.models.kernels.llama.forward), the chunked head (rlhf.models.logprobs)
and the sampler (rlhf.sampling.fast). N is the tokens of a pass, M those that are predicted, D the hidden width, F the
intermediate one, H and G heads of queries and keys of width d, V the vocabulary, L the layers, b the bytes of a number
in the arithmetic and w in the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhf.planning.shapes import Shape

Bytes = int | float
"""A size in bytes, or a number of operations."""

FLOAT = 4  # bytes
SIZES = {"float64": 8.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0}
SIZES["nf4"] = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight; nf4 has an 8-bit scale for each block of 64, and a float32 scale for 256 of these."""
MOMENTS = {"adamw": 2 * 4.0, "adamw_8bit": 2 * (1 + 4 / 256), "sgd": 0.0}
"""Bytes of the optimizer's moments per trained float32 parameter; in 8 bits a block of 256 has a float32 scale."""
WIDENED_MOMENTS = 5
"""Float32 matrices that an 8-bit step of one matrix holds on a CPU: two moments, a gradient, a root and a quotient."""
CHUNK_TOKENS = {"cpu": 256, "cuda": 4096}
CHUNK_LOGITS = {"cpu": 2**23, "cuda": 2**26}
KEPT_PROBABILITIES = {"cpu": 2**24, "cuda": 2**27}
"""As in rlhf.models.logprobs."""
WORKSPACE = 2**25
WORKSPACES, RECORDED_WORKSPACES = 3, 3
"""Bytes that cuBLAS keeps for a thread and a stream of an H100 or H200; how many there are, and how many more beside
recorded steps, as measured (benchmarks/results/plan_h200.json)."""
CACHE_COLUMNS = 64  # the cache of recorded steps has a multiple of them: rlhf.sampling.fast.recorded
SHORT_ROW = 256  # keys up to which attention in 16 bits on a CPU keeps its probabilities
SHARED_FROM = 0.1  # share of the tokens from which a prompt's rows share it


@dataclass(frozen=True, kw_only=True)
class PassRows:
    """The rows of a pass, at the length that the plan assumes."""

    rows: int
    prompts: int
    """Distinct prompts among them."""
    prompt: int
    """Tokens of a prompt."""
    completion: int
    """Tokens of a completion."""
    read: int | None = None
    """Tokens of a row whose output is read; None: the tokens of the completion."""

    @property
    def is_shared(self) -> bool:
        """Return whether the rows of a prompt share its tokens."""
        saved = (self.rows - self.prompts) * self.prompt
        return saved >= SHARED_FROM * self.rows * self.length and saved > 0

    @property
    def length(self) -> int:
        """Return the tokens of a row."""
        return self.prompt + self.completion

    @property
    def tokens(self) -> int:
        """Return the tokens that the layers see."""
        if self.is_shared:
            return self.prompts * self.prompt + self.rows * self.completion
        return self.rows * self.length

    @property
    def chosen(self) -> int:
        """Return the tokens whose output is read."""
        return self.rows * (self.completion if self.read is None else self.read)

    def of(self, rows: int) -> PassRows:
        """Return a pass over so many of the rows, with prompts in proportion."""
        return replace(self, rows=rows, prompts=max(1, -(-rows * self.prompts // self.rows)))


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """The arithmetic of a model."""

    wide: int = 4
    """Bytes of a number of the residual stream, and of float32 results."""
    low: int = 4
    """Bytes of a number in a matrix product."""
    device: str = "cpu"
    written_out: bool = True
    chunked: bool = True
    """Whether logits are made a few tokens at a time."""
    keeps_probabilities: bool = True
    """Whether the head may keep probabilities for its backward pass; with an entropy bonus it may not."""

    @property
    def is_half(self) -> bool:
        """Return whether products are in 16 bits."""
        return self.low == 2


def layer_activations(shape: Shape, rows: PassRows, how: Arithmetic, tokens: int | None = None) -> Bytes:
    """Return the bytes that one layer keeps for its backward pass.

    Written out:  N (2 w D + 2 b F + b (2 H + 2 G) d + 4 H + 8), and if prompts are shared a copy of the keys and
    values of each row, and its mask. On a CPU in 16 bits the probabilities of short rows take the place of 4 H. Through
    the modules: N (2 (2 w + b) D + 4 b F + b (3 H + 2 G) d + 4 H). `tokens` are for the feed-forward half.
    """
    n, m = rows.tokens, rows.tokens if tokens is None else tokens
    width, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    if not how.written_out:
        norms = 2 * (2 * how.wide + how.low) * shape.hidden
        attention = how.low * (3 * width + 2 * keys) + FLOAT * shape.heads
        return n * (norms + attention) + m * (3 + shape.is_gated) * how.low * shape.intermediate
    norms = 2 if shape.family.startswith("gemma") else 0
    stream = n * how.wide * shape.hidden + m * (1 + norms) * how.wide * shape.hidden + 8 * n
    heads = n * how.wide * (width + keys) if shape.family in ("qwen3", "gemma3", "gemma3_text", "olmo2") else 0
    half = m * 2 * how.low * shape.intermediate
    return stream + heads + half + n * how.low * (2 * width + 2 * keys) + _attention_kept(shape, rows, how)


def _attention_kept(shape: Shape, rows: PassRows, how: Arithmetic) -> Bytes:
    """Return the bytes that attention keeps beyond queries, keys, values and its output."""
    keys = shape.groups * shape.head_dim
    copied = 0
    if rows.is_shared:
        copied = rows.rows * rows.length + (rows.prompts * rows.prompt if how.device == "cuda" and how.is_half else 0)
        copied -= rows.rows * rows.completion if how.is_half and how.device == "cpu" else 0
    if how.device == "cpu" and how.is_half and rows.length <= SHORT_ROW:
        pairs = rows.rows * rows.length**2
        if rows.is_shared:
            pairs = rows.prompts * rows.prompt**2 + rows.rows * rows.completion * rows.length
        return copied * 2 * keys * how.low + pairs * shape.heads * how.low
    mask = rows.rows * rows.completion * rows.length * how.low if rows.is_shared and not _any_length(how) else 0
    return copied * 2 * keys * how.low + mask + rows.tokens * FLOAT * shape.heads


def _any_length(how: Arithmetic) -> bool:
    """Return whether attention takes rows of any length, without a mask."""
    return how.device == "cuda" and how.is_half


def activations(shape: Shape, rows: PassRows, how: Arithmetic, *, checkpointed: bool = False) -> Bytes:
    """Return the bytes that the layers keep for the backward pass; with checkpointing each keeps its input alone."""
    if checkpointed:
        return shape.layers * rows.tokens * how.wide * shape.hidden
    last = layer_activations(shape, rows, how, rows.chosen if how.written_out else None)
    return (shape.layers - 1) * layer_activations(shape, rows, how) + last


def layer_working(shape: Shape, rows: PassRows, how: Arithmetic, *, trained: bool) -> Bytes:
    """Return the bytes that the backward pass of a layer needs besides: N (4 b F + 4 w D), and a layer's gradients."""
    gradients = how.wide * 3 * shape.hidden * shape.intermediate if trained else 0
    return rows.tokens * (4 * how.low * shape.intermediate + 4 * how.wide * shape.hidden) + gradients


def forward_working(shape: Shape, rows: PassRows, how: Arithmetic, *, adapted: bool = False) -> Bytes:
    """Return the bytes of a layer in a pass without gradient: N (3 b F + (3 w + b) D + b (3 H + 2 G) d).

    `adapted`: through peft's modules, which widen the input of an adapter: w F takes the place of b F.
    """
    width, keys = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    inner = 2 * how.low + (how.wide if adapted else how.low)
    token = inner * shape.intermediate + (3 * how.wide + how.low) * shape.hidden
    return rows.tokens * (token + how.low * (3 * width + 2 * keys)) + _attention_kept(shape, rows, how)


@dataclass(frozen=True)
class Head:
    """Bytes of the LM head in a pass: kept until its backward pass, needed besides in the forward and in that pass."""

    kept: Bytes
    forward: Bytes
    backward: Bytes


def head(shape: Shape, rows: PassRows, how: Arithmetic, *, trained: bool) -> Head:
    """Return the bytes of the LM head.

    Kept are the last hidden states, 2 w M D, and up to a limit the probabilities, 4 M V. Logits are made and
    differentiated a chunk of c tokens at a time: 4 c V once if all probabilities are kept, else three times; in the
    backward pass 4 V min(M, 2 c), and the gradient of the head, w V D. All at once the logits take (b + 12) M V.
    """
    m, v = rows.chosen, shape.vocabulary
    states = m * shape.hidden * (2 * how.wide + (how.low if how.low != how.wide else 0))
    gradient = how.wide * shape.embedding if trained else 0
    if not how.chunked:
        return Head(states + m * v * (how.low + 2 * FLOAT), m * v * FLOAT, m * v * FLOAT + gradient)
    size = min(m, max(1, min(CHUNK_TOKENS[how.device], CHUNK_LOGITS[how.device] // v)))
    limit = KEPT_PROBABILITIES[how.device] if how.keeps_probabilities else 0
    kept = m if m * v <= limit else limit // (size * v) * size
    chunk = size * v * max(FLOAT, how.wide)
    forward = chunk if kept == m else 3 * chunk
    two = min(m, 2 * size) * v * max(FLOAT, how.wide)  # two chunks' gradients: the former chunk's are freed late
    return Head(states + kept * v * max(FLOAT, how.wide), forward, two + m * shape.hidden * how.wide + gradient)


def key_value_cache(shape: Shape, tokens: int, size: Bytes) -> Bytes:
    """Return the bytes of keys and values of so many tokens: 2 G d L numbers each."""
    return tokens * 2 * shape.groups * shape.head_dim * shape.layers * size


def forward_operations(shape: Shape, tokens: int, pairs: Bytes, predicted: int) -> Bytes:
    """Return the operations of a forward pass: 2 for each weight of the layers and each token, the scores, the logits.

    The scores take 4 H d for each pair of a query and a key that it sees.
    """
    scores = 4.0 * shape.heads * shape.head_dim * shape.layers * pairs
    return 2.0 * shape.linear * tokens + scores + 2.0 * shape.embedding * predicted


def pass_operations(shape: Shape, rows: PassRows, *, reads_logits: bool = True) -> Bytes:
    """Return the operations of a forward pass over rows; half of each row's square is masked."""
    return forward_operations(shape, rows.tokens, rows.rows * rows.length**2 / 2, rows.chosen if reads_logits else 0)
