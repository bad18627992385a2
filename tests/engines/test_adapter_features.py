"""What an engine's class can show is found by signature; nothing here needs the engine."""

import pytest

from hybridkv_ref.adapters import sglang_features as sglang
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


class OldTree:
    """A radix cache that stores a request by two calls and locks no window that is gone."""

    def match_prefix(self, params: object) -> None: ...

    def inc_lock_ref(self, node: object) -> None: ...

    def dec_lock_ref(self, node: object, params: object = None) -> None: ...

    def evict(self, params: object) -> None: ...

    def resolve_node_handle(self, node_handle: object) -> None: ...

    def cache_unfinished_req(self, req: object) -> None: ...

    def cache_finished_req(self, req: object) -> None: ...


class NewTree(OldTree):
    """One whose locks may span such nodes."""

    def inc_lock_ref(self, node: object, skip_lock_components: object = ()) -> None: ...


def test_what_a_tree_lacks_is_named() -> None:
    missing = sglang.missing_features(OldTree)
    assert missing["eviction for an allocation"] == ["evict_for_alloc"]
    assert missing.keys() == sglang.OPTIONAL.keys()
    assert sglang.OF_WINDOW not in sglang.missing_features(OldTree, window=False)


@pytest.mark.parametrize("call", [*sglang.NEEDED, "cache_finished_req"])
def test_a_tree_that_cannot_be_watched_is_refused(call: str) -> None:
    kept = {name: value for name, value in vars(OldTree).items() if name != call and not name.startswith("__")}
    with pytest.raises(InputError, match=call):
        sglang.missing_features(type("Less", (), kept))


def test_a_rule_that_changed_is_found_by_signature() -> None:
    assert not sglang.rules_of(OldTree).locked_tombstones
    assert sglang.rules_of(NewTree).locked_tombstones
