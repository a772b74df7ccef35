"""Environments, which answer the policy's actions with observations and rewards, over several turns.

The module protocol defines an environment, section its settings in a run; pool runs many of them, here or in
worker processes. The files of adapters make environments of other libraries usable by a prefix: `gym:ID`.
"""
