"""How payloads travel on one pair: `base` is the promise, the others keep it over gloo, over NCCL or inside a process."""
