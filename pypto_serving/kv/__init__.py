"""All decisions about KV blocks, and no bytes: pools, keys, prefix matches, block tables."""
