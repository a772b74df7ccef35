"""Label completions by a judge: preference pairs or rankings, and how far the judge agrees with people.

data.py     completions, grouped by prompt, from a file
judges.py   the family of judges: scores of single completions, or comparisons of two
label.py    label the groups, write the rows for `rlhf reward` and DPO, compare with people's labels
"""
