"""The null backend: a simulated device that tests schedulers and block tables.

Every row of a page records its token and position. The next token of a sequence is a hash of the rows read back through
the block tables of every group, so a wrong, stale or freed block changes the output or raises. Steps take virtual time.

Traits come from the configuration: the backend acts as a CPU program, a pair of compiled programs, a captured graph, or
a model that drafts.
"""
