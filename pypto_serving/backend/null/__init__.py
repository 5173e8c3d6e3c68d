"""The null backend: a device of simulated pages that proves what schedulers and block tables do.

Every page row remembers which token at which position was written to it. The next token of a sequence is a hash of what
is read back through the block tables of every group, so a wrong, stale or freed block changes the output or is noticed
at once. Steps take virtual time. Its traits are those of the configuration: it acts as a CPU program, as a pair of
compiled programs, as a captured graph, or as a model that drafts.
"""
