"""Measures ai-dynamo-runtime's radix index on the prompts of `loadtest.bench.router`. Runs in that peer's own venv.

Usage: radix_peer.py WORKERS BLOCKS PROMPTS. Prints one JSON object: seconds of wall time, since its tree has a
thread of its own. It imports nothing of ours.
"""

import importlib
import json
import resource
import sys
import time
from random import Random

_COMMON_BLOCKS, _OWN_BLOCKS, _PROMPT_BLOCKS = 64, 320, 512
_CHAINS_MAX = 2000


def main(num_workers: int, num_blocks: int, num_prompts: int) -> None:
    """Fill the tree, ask it, print what that took."""
    tree = importlib.import_module("dynamo.llm").RadixTree()
    rng, memory = Random(0), _resident_bytes()
    common = [rng.getrandbits(60) for _ in range(_COMMON_BLOCKS)]
    chains: list[list[int]] = []
    begin, stored = time.perf_counter(), 0
    for worker in range(num_workers):
        stored += _store(tree, worker, common, None)
    while stored < num_blocks:
        own = [rng.getrandbits(60) for _ in range(_OWN_BLOCKS)]
        pair = 2 * rng.randrange(num_workers // 2)
        for worker in (pair, pair + 1):
            stored += _store(tree, worker, own, common[-1])
        if len(chains) < _CHAINS_MAX:
            chains.append([*common, *own])
    tree.find_matches(common)  # all events are applied when this returns
    store_s = time.perf_counter() - begin
    grown = _resident_bytes() - memory
    held = [[*rng.choice(chains), *_unknown(rng, _PROMPT_BLOCKS - len(chains[0]))] for _ in range(num_prompts)]
    unknown = [_unknown(rng, _PROMPT_BLOCKS) for _ in range(num_prompts)]
    result = {
        "blocks": stored,
        "store_s": store_s,
        "block_bytes": grown / stored,
        "held_s": [_match(tree, held) for _ in range(5)],
        "unknown_s": [_match(tree, unknown) for _ in range(5)],
    }
    sys.stdout.write(json.dumps(result) + "\n")


def _store(tree: object, worker: int, hashes: list[int], parent: int | None) -> int:
    blocks = [{"block_hash": block, "tokens_hash": block} for block in hashes]
    event = {"event_id": 0, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}, "dp_rank": 0}
    tree.apply_event(worker, json.dumps(event).encode())  # type: ignore[attr-defined]  # a foreign class
    return len(hashes)


def _match(tree: object, prompts: list[list[int]]) -> float:
    begin = time.perf_counter()
    for prompt in prompts:
        tree.find_matches(prompt)  # type: ignore[attr-defined]  # a foreign class
    return (time.perf_counter() - begin) / len(prompts)


def _unknown(rng: Random, count: int) -> list[int]:
    return [rng.getrandbits(60) for _ in range(count)]


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
