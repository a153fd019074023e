"""The grammar of loops with `ls.exact`, as `comparison.py` uses it."""

from grammar.exact import draw
from grammar.in_exact import outcome_of
from grammar.loop_refusals import possible_refusals, refusals
from grammar.plain_exact import reference_of

__all__ = ["draw", "outcome_of", "possible_refusals", "reference_of", "refusals"]
