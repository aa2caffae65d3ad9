"""How the decode engine is chosen: one file per policy, all with the one method of `base.Policy`."""

from __future__ import annotations

import random

from kvferry_server.routing.policies.base import Candidate, Policy
from kvferry_server.routing.policies.kv_aware import KVAware
from kvferry_server.routing.policies.least_load import LeastLoad
from kvferry_server.routing.policies.round_robin import RoundRobin
from kvferry_server.routing.policies.session import Session
from kvferry_server.settings import RoutingPolicy

__all__ = ["Candidate", "KVAware", "LeastLoad", "Policy", "RoundRobin", "Session", "make_policy"]


def make_policy(name: RoutingPolicy, randomness: random.Random) -> Policy:
    """Return the policy of a setting; `randomness` breaks ties."""
    match name:
        case RoutingPolicy.KV_AWARE:
            return KVAware(randomness)
        case RoutingPolicy.LEAST_LOAD:
            return LeastLoad(randomness)
        case RoutingPolicy.ROUND_ROBIN:
            return RoundRobin()
        case RoutingPolicy.SESSION:
            return Session(LeastLoad(randomness))
