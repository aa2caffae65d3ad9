"""Where a prompt is computed, on the decode engine itself or on a prefill engine, and why (a metric label).

Pure. The engine has the last word: it may keep a hinted prompt local, and it goes on locally when a transfer fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvferry_engine.wire.messages import PrefillHint, Role
from kvferry_server.routing import cost
from kvferry_server.routing.snapshot import EngineSnapshot, RoutedRequest
from kvferry_server.settings import Disaggregation

MIN_REMOTE_TOKENS = 256
"""Mode auto ferries no shorter uncached prefix: the handshake alone would eat the gain."""
MAX_HINTS = 3


class Reason(StrEnum):
    """Why a prompt is computed where it is."""

    COST = "cost"
    """Auto: the estimate decided (see `PrefillPlan.remote` for which way)."""
    ALWAYS = "always"
    NEVER = "never"
    SHORT = "short"
    CACHED = "cached"
    NO_PREFILL_ENGINE = "no_prefill_engine"
    PROMPT_LOGPROBS = "prompt_logprobs"
    HANDOFF = "handoff"
    """The draining engine that ran the request so far is the best source of its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlan:
    """How one decode engine would get the prompt, and the estimated seconds until its first token."""

    reason: Reason
    estimate_s: float
    hints: tuple[PrefillHint, ...] = ()
    force_remote: bool = False

    @property
    def remote(self) -> bool:
        return bool(self.hints)


def ferryable_tokens(num_prompt_tokens: int, block_size: int) -> int:
    """Return the tokens of the full blocks that can be computed elsewhere; at least one token stays for the receiver."""
    return max(0, num_prompt_tokens - 1) // block_size * block_size


def plan_prefill(
    receiver: EngineSnapshot,
    senders: Sequence[EngineSnapshot],
    request: RoutedRequest,
    *,
    mode: Disaggregation,
    handoff_from: EngineSnapshot | None = None,
) -> PrefillPlan:
    """Decide for one decode engine. `senders` are all engines that could compute the prompt for it, in any order.

    `handoff_from`: the draining engine that holds the request's blocks; it becomes the first hint whatever the mode.
    """
    local_s = cost.local_prefill_s(receiver, request)
    upto = ferryable_tokens(request.num_prompt_tokens, receiver.block_size)

    def local(reason: Reason) -> PrefillPlan:
        return PrefillPlan(reason=reason, estimate_s=local_s)

    if request.needs_local_prefill:
        return local(Reason.PROMPT_LOGPROBS)
    if upto == 0:
        return local(Reason.SHORT)
    if receiver.cached_tokens >= upto:
        return local(Reason.CACHED)
    if handoff_from is not None and _may_pair(handoff_from, receiver):
        estimate_s = cost.remote_prefill_s(handoff_from, receiver, request, upto)
        return PrefillPlan(
            reason=Reason.HANDOFF, estimate_s=estimate_s, hints=(_hint(handoff_from),), force_remote=True
        )
    if mode is Disaggregation.NEVER:
        return local(Reason.NEVER)
    ranked = _ranked_senders(receiver, senders, request, upto)
    if not ranked:
        return local(Reason.NO_PREFILL_ENGINE)
    hints = tuple(_hint(sender) for _, sender in ranked[:MAX_HINTS])
    best_s = ranked[0][0]
    if mode is Disaggregation.ALWAYS:
        return PrefillPlan(reason=Reason.ALWAYS, estimate_s=best_s, hints=hints, force_remote=True)
    if upto - receiver.cached_tokens < MIN_REMOTE_TOKENS:
        return local(Reason.SHORT)
    harm_s = cost.damage_s(receiver, upto - receiver.cached_tokens)
    if best_s >= local_s + harm_s:
        return local(Reason.COST)
    return PrefillPlan(reason=Reason.COST, estimate_s=best_s, hints=hints)


def _ranked_senders(
    receiver: EngineSnapshot, senders: Sequence[EngineSnapshot], request: RoutedRequest, upto: int
) -> list[tuple[float, EngineSnapshot]]:
    """Return (estimated seconds, sender), role prefill before both; engines of role decode compute for nobody else."""
    usable = [sender for sender in senders if sender.role is not Role.DECODE and _may_pair(sender, receiver)]
    timed = [(cost.remote_prefill_s(sender, receiver, request, upto), sender) for sender in usable]
    return sorted(timed, key=lambda entry: (entry[1].role is Role.BOTH, entry[0], entry[1].boot))


def _may_pair(sender: EngineSnapshot, receiver: EngineSnapshot) -> bool:
    return sender.boot != receiver.boot and sender.pair_hash == receiver.pair_hash


def _hint(sender: EngineSnapshot) -> PrefillHint:
    return PrefillHint(address=sender.address, boot=sender.boot, cached_tokens=sender.cached_tokens)
