"""The account of an instance's memory: what a model will take and what it took. Pure: no torch, no I/O."""
