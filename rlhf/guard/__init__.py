"""Guard a run: refuse unsafe settings with reasons, see trouble while it happens, keep the best checkpoint.

    lint.py           checks a configuration against the table of rules: `rlhf lint`, and the start of every run
    rules_online.py   the rules of online runs; rules_run.py: of every run, and of runs on data
    rule.py           a broken rule, and the facts that rules read besides the configuration: the size of the model
    alarms            the alarms, each a function of the history of the metrics; rlhf/training/health.py acts on them
    best.py           whether an evaluation beats the best one so far by more than noise

docs/troubleshooting.md is made from the tables.
"""
