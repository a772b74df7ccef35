"""Alignment evaluations that a user names: hh, persona, gsm8k, lab, and any task of lm-eval."""
