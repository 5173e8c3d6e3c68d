"""How released checkpoints store quantised weights: their sections of config.json, their tensors, their values."""
