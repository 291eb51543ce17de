"""Studies: sets of runs that answer one question, their statistics and their report."""
