"""A KV connector without a store, for vLLM's real Scheduler: it offers tokens by chance and says what became of them.

Only the scheduler's half of the engine's interface is here; the driver, which runs the steps, moves the bytes. The
engine imports this module by its name.
"""

import random
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA


@dataclass
class Load:
    """Tokens [lo, hi) of a request that come from elsewhere, into its tables; ``later``: not before the next step."""

    request: Any
    tokens: list[int]
    tables: list[list[int]]
    lo: int
    hi: int
    later: bool

    @property
    def name(self) -> str:
        """The request's."""
        return str(self.request.request_id)


class ChanceConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Offers whole units of ``align`` tokens, never a prompt's last token; ``offers`` are where they end.

    ``begun``: loads of the step that is being scheduled. ``loading``: requests that wait for theirs. ``sending``:
    requests that ended and whose blocks are still read.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        told = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.chance, self.align = random.Random(told["seed"]), int(told["align"])
        self.offers: dict[str, tuple[int, bool]] = {}
        self.begun: list[Load] = []
        self.loading: set[str] = set()
        self.sending: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """The same answer until it is used; not known at once, sometimes."""
        name, c = request.request_id, self.chance
        if name not in self.offers:
            if c.random() < 0.1:
                return None, False
            units = (request.num_tokens - 1) // self.align
            self.offers[name] = c.randint(0, units) * self.align if c.random() < 0.5 else 0, c.random() < 0.5
        end, later = self.offers[name]
        count = max(min(end, request.num_tokens - 1) - num_computed_tokens, 0)
        return count, later and count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The blocks are there: a load begins."""
        end, later = self.offers.pop(request.request_id, (0, False))
        if num_external_tokens:
            tables = [[b.block_id for b in group] for group in blocks.blocks]
            tokens, lo = list(request.all_token_ids), end - num_external_tokens
            self.begun.append(Load(request, tokens, tables, lo, end, later))
            if later:
                self.loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Nothing that a worker needs."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Keeps the blocks of some requests for a while, to send them."""
        name = request.request_id
        self.offers.pop(name, None)
        keep = name not in self.loading and any(block_ids) and self.chance.random() < 0.3
        if keep:
            self.sending.add(name)
        return keep, None

    # The worker's half, which nobody calls here.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Left to the driver."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Left to the driver."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Left to the driver."""

    def wait_for_save(self) -> None:
        """Left to the driver."""
