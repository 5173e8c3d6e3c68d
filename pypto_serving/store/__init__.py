"""Stores: keep the bytes of KV blocks below the device. `kv.tiers` decides which blocks."""
