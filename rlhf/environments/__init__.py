"""Environments: what answers the policy's actions with observations and rewards, over several turns.

`protocol.py` says what an environment is, `section.py` how a run is given one, `pool.py` runs many of them, here or in
worker processes. The files of adapters make environments of other libraries usable by a prefix: `gym:ID`.
"""
