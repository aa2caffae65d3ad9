"""Estimated seconds: the one currency in which queues, cached prefixes, transfers and busy decodes are compared."""

from __future__ import annotations

from kvferry_server.routing.snapshot import EngineSnapshot, RoutedRequest

ASSUMED_PREFILL_TOKENS_PER_S = 2000.0
"""Until an engine has measured its own."""
ASSUMED_TRANSFER_BYTES_PER_S = 500e6
HANDSHAKE_S = 0.01
"""PREFILL, START and GRANT, each up to one turn of a core loop."""
EXPECTED_OUTPUT_TOKENS = 128
"""Longest output that an estimate counts on; most requests stop long before their max_tokens."""
DAMAGE_PER_DECODE = 0.125
"""Seconds of harm per second of prompt computed beside one running sequence: eight weigh as much as the wait itself."""


def prefill_rate(engine: EngineSnapshot) -> float:
    """Tokens per second of prompt computation."""
    return engine.load.prefill_tokens_per_s or ASSUMED_PREFILL_TOKENS_PER_S


def queue_s(engine: EngineSnapshot) -> float:
    """Seconds until the prompt tokens queued before this request are computed."""
    return engine.load.waiting_tokens / prefill_rate(engine)


def uncached_tokens(engine: EngineSnapshot, request: RoutedRequest) -> int:
    """Tokens the engine must compute before the first output token, at least 1."""
    return max(1, request.num_prompt_tokens - engine.cached_tokens)


def local_prefill_s(engine: EngineSnapshot, request: RoutedRequest) -> float:
    """Queue and prompt on the engine itself."""
    return queue_s(engine) + uncached_tokens(engine, request) / prefill_rate(engine)


def damage_s(engine: EngineSnapshot, num_tokens: int) -> float:
    """What computing `num_tokens` of prompt does to the sequences that are decoding beside it."""
    return num_tokens / prefill_rate(engine) * engine.load.num_running * DAMAGE_PER_DECODE


def transfer_s(sender: EngineSnapshot, receiver: EngineSnapshot, num_tokens: int) -> float:
    """Seconds to ferry the KV of `num_tokens`, at the slower side's measured rate."""
    rates = [rate for rate in (sender.load.transfer_bytes_per_s, receiver.load.transfer_bytes_per_s) if rate > 0]
    return num_tokens * receiver.kv_bytes_per_token / min(rates, default=ASSUMED_TRANSFER_BYTES_PER_S)


def decode_s(engine: EngineSnapshot, request: RoutedRequest) -> float:
    """What sharing the engine costs over the expected output: step time, and the wait for a seat or room if none is free."""
    load = engine.load
    num_others = load.num_in_flight
    output_s = min(request.max_tokens, EXPECTED_OUTPUT_TOKENS) * load.decode_step_s
    shared_s = output_s * num_others / (num_others + 1)
    num_lacking_seats = max(0, num_others + request.num_sequences - engine.max_num_seqs)
    seat_s = output_s * num_lacking_seats / engine.max_num_seqs
    num_blocks_needed = -(-request.num_prompt_tokens // engine.block_size)
    lacks_room = load.used_blocks > 0 and load.free_blocks < num_blocks_needed
    return shared_s + seat_s + (output_s if lacks_room else 0.0)


def remote_prefill_s(sender: EngineSnapshot, receiver: EngineSnapshot, request: RoutedRequest, upto: int) -> float:
    """Seconds until `receiver` has its first token when `sender` computes the prompt's first `upto` tokens.

    Transfer runs beside the computation, except for the last chunk.
    """
    compute_s = max(0, upto - sender.cached_tokens) / prefill_rate(sender)
    num_ferried = upto - receiver.cached_tokens
    ferry_s = transfer_s(sender, receiver, num_ferried)
    last_chunk_s = transfer_s(sender, receiver, min(num_ferried, sender.max_num_batched_tokens))
    overlapped_s = max(compute_s + last_chunk_s, ferry_s)
    tail_s = (request.num_prompt_tokens - upto) / prefill_rate(receiver)
    return HANDSHAKE_S + queue_s(sender) + overlapped_s + tail_s
