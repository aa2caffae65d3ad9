"""The decisions of KV transfer as pure state machines: no torch, no sockets, no clock of their own.

`actions` names what goes in and comes out, `receiver` and `sender` are the two ends of one transfer, `pairing` opens and
closes pair groups, `credits` shares staging slots, `slices` says which rank sends what to whom.
"""
