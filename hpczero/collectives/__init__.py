"""Collective operations written here, over MPI messages and node-shared memory.

Schedules (`ring`, `tree`, `butterfly`, `pairwise`, `hierarchical`) say who sends what when; `transport` and `window` do
it; `api` is what programs call. Read `schedule` first.
"""
