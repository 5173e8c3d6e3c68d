"""All decisions about KV blocks, without their bytes: groups, pools, keys, prefix matches, block tables, tiers."""
