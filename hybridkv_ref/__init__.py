"""Reference semantics for hybrid-attention KV caches."""
