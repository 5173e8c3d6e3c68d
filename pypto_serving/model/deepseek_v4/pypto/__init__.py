"""pypto-lib's programs of DeepSeek V4 Flash, revision 2026-08. Nothing runs them yet: they need eight NPUs.

Attention is data-parallel: each rank has requests and pools of its own, and is one partition of a step. Experts are
split over all ranks, so every dispatch has all partitions, also those without tokens.

| module    | what it holds                                                             |
|-----------|---------------------------------------------------------------------------|
| arguments | their order, dtypes, shapes and roles                                     |
| pools     | their seven pools in terms of our six KV groups                           |
| steps     | inputs of a dispatch, and where its logits and accepted drafts are found  |
| weights   | what becomes of each tensor of a W8A8 checkpoint                          |
"""
