"""Environments: what answers the policy's actions with observations and rewards, over several turns.

The module protocol says what an environment is, section how a run is given one; pool runs many of them, here or in
worker processes. The files of adapters make environments of other libraries usable by a prefix: `gym:ID`.
"""
