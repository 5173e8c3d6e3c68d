"""Load generator with the metric names and definitions of `vllm bench serve`."""
