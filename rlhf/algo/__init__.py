"""The mathematics of the algorithms: pure functions from tensors to tensors, with each equation in its docstring.

The modules, roughly in the order in which a training step uses them:

    kl               KL estimators
    advantages       token rewards, GAE, rewards-to-go, group baselines
    selection        best-of-n rows, best-against-worst pairs, weights of completions sampled with a hint
    policy_loss      importance ratios, aggregation over tokens
    trust_region     conjugate gradients and the line search of a natural gradient step

The losses, online and offline, are in rlhf/algorithms. Import from these modules directly.
"""
