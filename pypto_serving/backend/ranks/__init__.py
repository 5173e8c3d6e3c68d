"""Ranks: the processes that compute one model together, on one host or two. docs/ranks.md lists all related files.

- `supervisor`: starts and watches the other ranks of this host
- `rank_process`: the main function of such a process
- `shared_steps`: the memory that ranks share, and how the leader publishes steps to them
- `torch_ranks`: the same for torch programs, over sockets
- `serving_host`, `joining_host`: the two sides of connecting two hosts
- `host_connections`: their handshake; progress, faults and heartbeats
- `split_blocks`: KV blocks split over two hosts
"""
