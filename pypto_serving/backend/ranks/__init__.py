"""Ranks: the processes that compute one model together, on one host or two. docs/ranks.md names what else there is.

- `supervisor`: starts and watches the other ranks of this host
- `rank_process`: what such a process does
- `shared_steps`: the memory that ranks share, and how the leader publishes steps to them
- `torch_ranks`: the same for torch programs, over sockets
- `serving_host`, `joining_host`: how two hosts come together
- `host_connections`: how they prove who they are; progress, faults and heartbeats
- `split_blocks`: KV blocks of which each host holds parts
"""
