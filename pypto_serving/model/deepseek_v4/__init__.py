"""DeepSeek V4: hyper-connections, shared-latent attention with compressed history, hash and score routing."""
