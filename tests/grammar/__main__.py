"""Run cases by their seeds and compare them with the reference: `python -m grammar 1234`.

Before the seeds, the name of a grammar may be given: `python -m grammar exact 1234`.
"""

import sys

from grammar.comparison import GRAMMARS, compare, module_of

grammar = "trainer"
given = sys.argv[1:]
if given[0] in GRAMMARS:
    grammar = given.pop(0)
seeds = [int(each) for each in given]
for seed in seeds:
    print(module_of(grammar).draw(seed))
tally = compare(seeds, grammar)
print(tally)
sys.exit(bool(tally.failures))
