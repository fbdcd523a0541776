"""Leave what was imported before this out of every collection of garbage, here and in processes
that are forked from here: a collection would copy the memory of all of it."""

import gc

gc.collect()
gc.freeze()
