"""Run cases by their seeds and compare them with the reference: `python -m grammar 1234`."""

import sys

from grammar import case
from grammar.comparison import compare

seeds = [int(each) for each in sys.argv[1:]]
for seed in seeds:
    print(case(seed))
tally = compare(seeds)
print(tally)
sys.exit(bool(tally.failures))
