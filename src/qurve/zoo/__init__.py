"""Comparators from other papers, as kinds beside our own: each in a file that cites its source and states its size.

Importing this package registers them. No torch here: modules stand in files of their own.
"""

from qurve.zoo import projections as projections
