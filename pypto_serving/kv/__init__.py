"""All decisions about KV blocks, and no bytes: groups, pools, keys, prefix matches, block tables, tiers."""
