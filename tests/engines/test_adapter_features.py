"""What an engine's class can show is found by signature; nothing here needs the engine."""

import pytest

from hybridkv_ref.adapters.vllm_features import NEEDED, OPTIONAL, missing_features
from hybridkv_ref.errors import InputError


class Old:
    """A manager of an older release: no look-ahead, no connector."""

    def get_computed_blocks(self, request: object) -> None: ...

    def allocate_slots(
        self, request: object, num_new_tokens: int, num_new_computed_tokens: int = 0, new_computed_blocks: object = None
    ) -> None: ...

    def free(self, request: object) -> None: ...

    def take_events(self) -> None: ...

    def reset_prefix_cache(self) -> None: ...


def test_what_is_missing_is_named() -> None:
    missing = missing_features(Old)
    assert missing["look-ahead"] == ["allocate_slots(num_lookahead_tokens)"]
    assert missing["eviction by block"] == ["evict_blocks"]
    assert "reset" not in missing
    assert missing.keys() < OPTIONAL.keys()


@pytest.mark.parametrize("call", NEEDED)
def test_what_cannot_be_watched_is_refused(call: str) -> None:
    kept = {name: value for name, value in vars(Old).items() if name in NEEDED and name != call}
    with pytest.raises(InputError, match=call):
        missing_features(type("Less", (), kept))
