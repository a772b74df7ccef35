"""The costs of a run before anything is loaded: bytes by role, kind and phase, floating-point operations, and cures.

    shapes.py       the widths of a model, from its config.json or a table of published models
    arithmetic.py   bytes and operations of one model: weights, activations, key-value cache, logits
    layout.py       a configuration as roles (policy, critic, reference, reward model) and rows per pass
    memory.py       bytes of each role and kind in each phase; the peak
    cures.py        the changes for a run that does not fit, the cheapest first
    seconds.py      operations of a step, and seconds if the machine's rate was measured
    machine.py      the memory of the device, and the rate that `rlhf plan --probe` measured
    plan.py         all of these for one configuration
    text.py         the plan as text, and the message of a run that cannot fit
    options.py      the machine and the tokens that `rlhf plan` and `rlhf.plan` are asked for

Nothing here imports torch, except for a model of an unknown family, whose shapes transformers makes on the meta device.
"""
