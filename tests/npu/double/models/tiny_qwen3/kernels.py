"""Prefill and decode of a dense Qwen3 in numpy: each token by itself, so that no bit depends on what is beside it."""

from __future__ import annotations

from typing import Any

import numpy as np

PAGE, EPS = 128, 1e-6
Array = np.ndarray
_floats: dict[int, Array] = {}


def prefill(**args: Array) -> None:
    """Compute the tokens of each row in order; write the logits of its last one."""
    table = args["block_table"].reshape(len(args["seq_lens"]), -1)
    for row, (length, count, start) in enumerate(
        zip(args["seq_lens"], args["chunk_lens"], args["chunk_offsets"], strict=True)
    ):
        hidden = None
        for place in range(start, start + count):
            x = _embedded(args, args.get("input_ids", ())[place : place + 1], place)
            hidden = _token(args, x, length - count + place - start, args["slot_mapping"][place], table[row])
        if hidden is not None:
            args["out"][row] = _logits(args, hidden)


def decode(**args: Array) -> None:
    """Compute one token of each row; write logits, and the greedy ids where there is a place for them."""
    table = args["block_table"].reshape(len(args["seq_lens"]), -1)
    for row, length in enumerate(args["seq_lens"]):
        ids = args["sampled_ids_in"][row, :1] if "sampled_ids_in" in args else ()
        x = _embedded(args, ids, row)
        args["out"][row] = _logits(args, _token(args, x, length - 1, args["slot_mapping"][row], table[row]))
    if "sampled_ids" in args:
        args["sampled_ids"][...] = 0
        args["sampled_ids"][:, 0] = args["out"].argmax(axis=1)


def _embedded(args: dict[str, Array], ids: Any, place: int) -> Array:
    rows = args["hidden_states"][place] if "hidden_states" in args else args["embed_weight"][ids[0]]
    return _float(rows)


def _token(args: dict[str, Array], x: Array, position: int, slot: int, pages: Array) -> Array:
    layers, dim = args["q_norm_weight"].shape
    heads, kv_heads = args["wq"].shape[1] // dim, args["wk"].shape[1] // dim
    cos, sin = args["rope_cos"][position], args["rope_sin"][position]
    for layer in range(layers):
        normed = _norm(x, args["input_rms_weight"][layer])
        q, k, v = (normed @ _matrix(args[name], layer, layers) for name in ("wq", "wk", "wv"))
        q = _rope(_norm(q.reshape(heads, dim), args["q_norm_weight"][layer], False), cos, sin)
        k = _rope(_norm(k.reshape(kv_heads, dim), args["k_norm_weight"][layer], False), cos, sin)
        keys, values = (_cache(args, name, layer, layers, kv_heads) for name in ("k_cache", "v_cache"))
        keys[slot // PAGE, slot % PAGE], values[slot // PAGE, slot % PAGE] = _bits(k), _bits(v.reshape(kv_heads, dim))
        context = np.arange(position + 1)
        where = pages[context // PAGE], context % PAGE
        known, read = _float(keys[where]), _float(values[where])
        attended = np.empty((heads, dim), np.float32)
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = (known[:, group] @ _rounded(q[head])) * np.float32(dim**-0.5)
            weights = np.exp(scores - scores.max())
            attended[head] = (weights @ read[:, group]) / weights.sum()
        x = _added(args, x, _rounded(attended.reshape(-1)) @ _matrix(args["wo"], layer, layers))
        normed = _norm(x, args["post_rms_weight"][layer])
        gate, up = (normed @ _matrix(args[name], layer, layers) for name in ("w_gate", "w_up"))
        x = _added(args, x, _rounded(gate / (1 + np.exp(-gate)) * up) @ _matrix(args["w_down"], layer, layers))
    return x


def _added(args: dict[str, Any], x: Array, change: Array) -> Array:
    """Add a change, of which each of several devices has a part."""
    for part in args["exchange"](change) if "exchange" in args else [change]:
        x = x + part
    return x


def _logits(args: dict[str, Array], x: Array) -> Array:
    return _matrix(args["lm_head_weight"], 0, 1) @ _norm(x, args["final_norm_weight"][0])


def _cache(args: dict[str, Array], name: str, layer: int, layers: int, kv_heads: int) -> Array:
    """View a layer of a pool as [page, token, head, dim]."""
    pool = args[name]
    own = pool.reshape(layers, -1, pool.shape[1])[layer]
    if "hidden_states" in args:
        return own.reshape(-1, kv_heads, PAGE, pool.shape[1]).transpose(0, 2, 1, 3)
    return own.reshape(-1, PAGE, kv_heads, pool.shape[1])


def _matrix(weights: Array, layer: int, layers: int) -> Array:
    """Return a layer's matrix in float32; weights never change."""
    address = weights.ctypes.data
    if address not in _floats:
        _floats[address] = _float(weights)
    return _floats[address].reshape(layers, -1, weights.shape[1])[layer]


def _norm(x: Array, weight: Array, rounded: bool = True) -> Array:
    normed = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(EPS)) * weight
    return _rounded(normed) if rounded else normed


def _rope(x: Array, cos: Array, sin: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    return x * cos + np.concatenate([-second, first], axis=-1) * sin


def _bits(x: Array) -> Array:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _float(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _rounded(x: Array) -> Array:
    return _float(_bits(x))
