"""Several algorithms, one start, one budget, one judge: plan, run each arm and seed, judge, results, page."""
