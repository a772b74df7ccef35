"""The mathematics of the algorithms: pure functions from tensors to tensors, with each equation in its docstring.

The modules, roughly in the order in which a training step uses them:

    kl               KL estimators and the controllers of the KL coefficients
    advantages       token rewards, GAE, rewards-to-go, group baselines
    selection        best-of-n rows, best-against-worst pairs, weights of completions sampled with a hint
    policy_loss      importance ratios, surrogate losses, aggregation over tokens
    value_loss       the clipped value loss and the explained variance
    objective        combines the above as an algorithm's configuration asks: start reading here

The offline losses (DPO, IPO, SimPO, ORPO, KTO, ...) are in rlhf.algorithms. Import from these modules directly.
"""
