"""Bugs seeded in the quick ways of a forward pass: chunks of logits, rows without padding, shared prompts."""

from __future__ import annotations

from mutant import Mutant

HEAD = ("tests/models/test_head.py",)

FORWARD = [
    Mutant(
        name="chunk-forgets-temperature-in-backward",
        file="rlhf/models/head.py",
        before="d_logits = d_logits.div_(ctx.temperature).to(hidden.dtype)",
        after="d_logits = d_logits.to(hidden.dtype)",
        why="values are right, gradients are off by the temperature: nothing but the step shows it",
        tests=HEAD,
    ),
    Mutant(
        name="chunk-entropy-slope",
        file="rlhf/models/head.py",
        before="slope = slope - d_entropy[part, None] * (logs + entropy[part, None])",
        after="slope = slope - d_entropy[part, None] * logs",
        why="the entropy bonus pushes along a wrong gradient, by a constant that softmax does not forgive",
        tests=HEAD,
    ),
    Mutant(
        name="softcap-lost",
        file="rlhf/models/head.py",
        before="    if given.shape != expected.shape or not torch.equal(given, expected):",
        after="    if given.shape != expected.shape:",
        why="a model that caps its logits is trained on log-probs of another distribution than it samples from",
        tests=HEAD,
    ),
    Mutant(
        name="sampler-logprobs-unchecked",
        file="rlhf/rollout.py",
        before="return bool(difference <= AGREE.get(trainer.dtype, AGREE_ELSE))",
        after="return bool(difference < 1e9)",
        why="ratios are against another policy than the one that is updated, and nothing says so",
        tests=("tests/sampling/test_old_logprobs.py",),
    ),
    Mutant(
        name="shared-rows-see-padding",
        file="rlhf/models/rows.py",
        before="before = torch.arange(width) < asked[prompt_of][:, None]",
        after="before = torch.arange(width) < asked.max()",
        why="a completion of a short prompt attends to dead places beside it",
        tests=("tests/models/test_rows.py",),
    ),
    Mutant(
        name="shared-positions-restart-at-zero",
        file="rlhf/models/rows.py",
        before="+ [int(asked[u]) + torch.arange(int(n)) for u, n in zip(prompt_of, said, strict=True)]",
        after="+ [torch.arange(int(n)) for u, n in zip(prompt_of, said, strict=True)]",
        why="completions that share a prompt stand on top of it",
        tests=("tests/models/test_rows.py",),
    ),
    Mutant(
        name="rows-not-causal",
        file="rlhf/models/rows.py",
        before="is_causal=mask is None,",
        after="is_causal=False,",
        why="tokens see what comes after them: log-probs of copied text",
        tests=("tests/models/test_rows.py",),
    ),
    Mutant(
        name="leak-trusted",
        file="rlhf/models/rows.py",
        before='return f"rows of {name} without padding give other numbers"',
        after="pass",
        why="a model that cannot do without padding is not found out",
        tests=("tests/models/test_rows.py",),
    ),
]
