"""Where bytes of KV blocks live below the device. Decisions about them are taken in `kv.tiers`."""
