"""Guard a run: refuse unsafe settings with reasons, see trouble while it happens, keep the best checkpoint.

    lint.py           checks a configuration against the table of rules: `rlhf lint`, and the start of every run
    rules_*.py        the rules: of online runs, of runs on data, of both
    facts.py          what a rule needs to know besides the configuration: the size of the model
    alarms.py         the table of alarms: functions of the history of the metrics
    watch.py          when an alarm goes off, and until when it is silent
    best.py           whether an evaluation beats the best one so far by more than noise

The tables are what docs/lint.md and docs/health.md are made from.
"""
