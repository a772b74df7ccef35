"""Guard a run: refuse unsafe settings with reasons, see trouble while it happens, keep the best checkpoint.

    lint.py           checks a configuration against the table of rules: `rlhf lint`, and the start of every run
    rules_*.py        the rules: of online runs, of runs on data, of both
    rule.py           what a rule is, and what it needs to know besides the configuration: the size of the model
    alarm.py          what an alarm is: a function of the history of the metrics
    alarms.py         the table of alarms; rlhf/training/health.py decides when one goes off, and acts
    best.py           whether an evaluation beats the best one so far by more than noise

The tables are what docs/lint.md and docs/health.md are made from.
"""
