"""Adapters: what a real engine does, as events. Each runs in its engine's own environment and process."""
