"""Faults planted in SGLang at run time, one at a time, and the rules by which the oracle names each.

    python tests/engines/sglang_faults.py [--shorter] [NAME ...]

Runs in the engine's own environment; prints one line of JSON per fault: what was refused first, or that nothing was.
A fault that makes the engine itself stop before the oracle speaks counts as not caught. A fault whose place this
release does not have is left out. ``--shorter``: instead, hits that are made too short, and the group that is blamed.
"""

import functools
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybridkv_ref.adapters.sglang_build import MEMORY, cache_class, prepare
from hybridkv_ref.adapters.sglang_driver import Driver

Change = Callable[[Any], Any]
FAULTS: dict[str, tuple[str, set[str], list[tuple[str, str, str]], Change]] = {}
"""name -> (model, rules of which one must be named, places: module, class or nothing, attribute; old -> new)."""

SWA, UNIFIED = "swa_radix_cache", "unified_radix_cache"
SMALL, STATES, MAMBA = "gpt-oss-20b:9@1", "qwen3-next-80b-a3b@1", "mamba_radix_cache"
CORE, PARTS = "unified_cache.unified_tree_core", "unified_cache.components"


def fault(name: str, rules: str, *places: str, model: str = SMALL) -> Callable[[Change], Change]:
    """Enters a fault; it is planted at the first of its places that there is."""

    def enter(change: Change) -> Change:
        split = [tuple(place.split(":")) for place in places]
        FAULTS[name] = (model, set(rules.split()), split, change)  # type: ignore[assignment]
        return change

    return enter


@fault(
    "a lock is lost",
    "HKV-L1-004 HKV-S3-001",
    f"{SWA}:SWARadixCache:inc_lock_ref",
    f"{CORE}:UnifiedTreeCore:inc_lock_ref",
)
def _(old: Any) -> Any:
    results = importlib.import_module(f"{MEMORY}.base_prefix_cache").IncLockRefResult

    def lock(self: Any, node: Any, *args: Any) -> Any:
        handle = {"node_id": node} if isinstance(node, int) else {}
        return results(**handle)

    return lock


@fault("a lock leaves out the window", "HKV-L1-004 HKV-S3-001", f"{SWA}:SWARadixCache:inc_lock_ref",
       f"{PARTS}.swa:SWAComponent:acquire_component_lock")  # fmt: skip
def _(old: Any) -> Any:
    def lock(self: Any, *args: Any, **kwargs: Any) -> Any:
        span, self.sliding_window_size = self.sliding_window_size, 0
        try:
            return old(self, *args, **kwargs)
        finally:
            self.sliding_window_size = span

    return lock


@fault("a lock is never given back", "HKV-REF-005 HKV-REF-006 HKV-LIVE-006 HKV-LIVE-011",
       f"{SWA}:SWARadixCache:dec_lock_ref",
       f"{UNIFIED}:UnifiedRadixCache:dec_lock_ref")  # fmt: skip
def _(old: Any) -> Any:
    return lambda self, *args, **kwargs: None


@fault("a split forgets the lock of its upper half", "HKV-S3-009 HKV-REF-004 HKV-S3-004 HKV-S3-011 HKV-REF-003",
       f"{SWA}:SWARadixCache:_split_node", f"{PARTS}.full:FullComponent:redistribute_on_node_split")  # fmt: skip
def _(old: Any) -> Any:
    def split(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = old(self, *args, **kwargs)
        if result is not None:
            result.full_lock_ref = result.swa_lock_ref = 0
        else:
            (args[0] if args else kwargs["new_parent"]).component_data[0].lock_ref = 0
        return result

    return split


@fault(
    "slots of the window are freed two tokens early", "HKV-SWA-003 HKV-L1-004", "common::free_swa_out_of_window_slots"
)
def _(old: Any) -> Any:
    def slide(req: Any, at: int, *, sliding_window_size: int, **kwargs: Any) -> Any:
        return old(req, at, sliding_window_size=sliding_window_size - 2, **kwargs)

    return slide


@fault("a hit does not ask for its window", "HKV-SWA-001 HKV-L3-001", f"{SWA}:SWARadixCache:_match_prefix_helper",
       f"{PARTS}.swa:SWAComponent:create_match_validator")  # fmt: skip
def _(old: Any) -> Any:
    def match(self: Any, *args: Any, **kwargs: Any) -> Any:
        span, self.sliding_window_size = self.sliding_window_size, 1
        try:
            return old(self, *args, **kwargs)
        finally:
            self.sliding_window_size = span

    return match


@fault("duplicates are not freed when tokens are stored", "HKV-ACC-001", f"{SWA}::free_kv_row_segments",
       f"{UNIFIED}:UnifiedRadixCache:_apply_cache_action")  # fmt: skip
def _(old: Any) -> Any:
    def finish(self: Any, action: Any, **kwargs: Any) -> Any:
        return None if kwargs or type(action).__name__ == "FreeDeviceKV" else old(self, action)

    return finish


@fault("evicted pages are not given back", "HKV-ACC-001", f"{SWA}:SWARadixCache:_free_node_value",
       f"{UNIFIED}:UnifiedRadixCache:_drain_device_frees")  # fmt: skip
def _(old: Any) -> Any:
    def free(self: Any, what: Any, *args: Any) -> Any:
        if isinstance(what, dict):
            what.clear()
            return None
        return len(what.value), len(what.value)

    return free


@fault("an evicted window keeps its pages", "HKV-ACC-001", f"{SWA}:SWARadixCache:_tombstone_internal_node")
def _(old: Any) -> Any:
    def tombstone(self: Any, node: Any) -> None:
        old(self, node)
        taken = self.token_to_kv_pool_allocator.swa_attn_allocator
        taken.free_pages = taken.free_pages[:-1]

    return tombstone


@fault(
    "a page is freed twice",
    "HKV-ACC-001 HKV-REF-004",
    "allocator.paged:PagedTokenToKVPoolAllocator:free_page_ids",
    model="gpt-oss-20b:9@4",
)
def _(old: Any) -> Any:
    def free(self: Any, pages: Any) -> None:
        old(self, pages)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 10 == 0:
            old(self, pages[:1])

    return free


@fault("keys leave out adapter and salt", "HKV-KEY-002", "radix_cache:RadixKey:__init__")
def _(old: Any) -> Any:
    def make(
        self: Any, token_ids: Any, extra_key: Any = None, *args: Any, cache_salt: Any = None, **kwargs: Any
    ) -> None:
        old(self, token_ids, None, *args, **kwargs)

    return make


@fault("the last token may be hit", "HKV-L1-006", "managers.schedule_batch:Req:_compute_max_prefix_len")
def _(old: Any) -> Any:
    return lambda self, length: length


@fault("a row keeps the duplicates that were freed", "HKV-S3-011 HKV-L1-003 HKV-L3-004",
       "memory_pool:ReqToTokenPool:write")  # fmt: skip
def _(old: Any) -> Any:
    def write(self: Any, indices: Any, values: Any) -> None:
        if indices[1].start == 0:
            old(self, indices, values)

    return write


@fault("a locked leaf is evicted", "HKV-S3-009 HKV-REF-004 HKV-S3-004 HKV-S3-011", f"{SWA}:SWARadixCache:evict",
       f"{UNIFIED}:UnifiedRadixCache:evict")  # fmt: skip
def _(old: Any) -> Any:
    """Its pages go back to the pools; the tree goes on naming them."""

    def evict(self: Any, params: Any) -> Any:
        core = getattr(self, "tree_core", self)
        slots = self.token_to_kv_pool_allocator.full_attn_allocator
        for node in core._collect_all_nodes():
            lock = node.component_data[0].lock_ref if hasattr(node, "component_data") else node.full_lock_ref
            if node is not core.root_node and lock and not node.children and params.num_tokens:
                value = node.component_data[0].value if hasattr(node, "component_data") else node.value
                slots.free(value)
                break
        return old(self, params)

    return evict


@fault("a lock counts on a window that is gone", "HKV-S3-011", f"{SWA}:SWARadixCache:inc_lock_ref")
def _(old: Any) -> Any:
    """Legal in a later release, where a lock may span such nodes; here the engine's own comment forbids it."""

    def lock(self: Any, node: Any) -> Any:
        result = old(self, node)
        while node is not self.root_node:
            node.swa_lock_ref += node.swa_tombstone
            node = node.parent
        return result

    return lock


@fault("a lock leaves out the state", "HKV-L1-004 HKV-S3-001", f"{MAMBA}:MambaRadixCache:inc_lock_ref",
       f"{PARTS}.mamba:MambaComponent:acquire_component_lock", model=STATES)  # fmt: skip
def _(old: Any) -> Any:
    def lock(self: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return args[0] if args else kwargs["result"]
        result = old(self, node)
        if getattr(node, "mamba_value", None) is not None:
            node.mamba_lock_ref -= 1
        return result

    return lock


@fault("a hit does not ask for its state", "HKV-REC-001 HKV-POS-001 HKV-L3-001",
       f"{PARTS}.mamba:MambaComponent:create_match_validator", model=STATES)  # fmt: skip
def _(old: Any) -> Any:
    return lambda self, *args, **kwargs: lambda node: True


@fault("an evicted state keeps its slot", "HKV-ACC-001", f"{MAMBA}:MambaRadixCache:_free_mamba_value", model=STATES)
def _(old: Any) -> Any:
    return lambda self, value: None


def _place(module: str, owner: str, attribute: str) -> tuple[Any, str] | None:
    if module.startswith("unified") and cache_class().__name__ == "SWARadixCache":
        return None  # there, and not what is driven
    base = "sglang.srt" if module.startswith("managers.") else MEMORY
    if importlib.util.find_spec(f"{base}.{module}") is None:
        return None
    found: Any = importlib.import_module(f"{base}.{module}")
    found = getattr(found, owner, None) if owner else found
    return (found, attribute) if hasattr(found, attribute) else None


@contextmanager
def planted(name: str) -> Iterator[bool]:
    found = next((at for place in FAULTS[name][2] if (at := _place(*place)) is not None), None)
    if found is None:
        yield False
        return
    owner, attribute = found
    old = inspect.getattr_static(owner, attribute)
    changed = FAULTS[name][3](old)
    functools.update_wrapper(changed, old)
    setattr(owner, attribute, changed)
    try:
        yield True
    finally:
        setattr(owner, attribute, old)


def hunt(name: str, steps: int = 400, seeds: int = 8) -> dict[str, Any] | None:
    """Drives the engine with this fault until the oracle refuses something."""
    model, rules = FAULTS[name][:2]
    stopped, total = "", 0
    with planted(name) as there:
        if not there:
            return None
        for seed in range(1, seeds + 1):
            driver = Driver(model, seed)
            try:
                for _ in range(steps):
                    driver.step()
                    total += 1
                    if driver.refusals:
                        break
                else:
                    driver.end()
            except Exception as error:
                stopped = f"{type(error).__name__}: {error}"
            if driver.refusals:
                first = driver.refusals[0]
                named = sorted(rules & {r for f in driver.refusals if f.index == first.index for r in f.rules})
                return {"fault": name, "caught": True, "named": named, "first": str(first), "rules": first.rules,
                        "steps": total, "events": driver.events}  # fmt: skip
    return {"fault": name, "caught": False, "named": [], "steps": total, "stopped": stopped}


def shorter(steps: int = 300) -> dict[str, int]:
    """Tokens of legal reuse given up by the groups that cost them, where a hit asks for three windows."""
    owner, attribute = _place(SWA, "SWARadixCache", "_match_prefix_helper") or _place(
        f"{PARTS}.swa", "SWAComponent", "create_match_validator"
    )  # type: ignore[misc]
    old = getattr(owner, attribute)

    def match(self: Any, *args: Any, **kwargs: Any) -> Any:
        span, self.sliding_window_size = self.sliding_window_size, 3 * self.sliding_window_size
        try:
            return old(self, *args, **kwargs)
        finally:
            self.sliding_window_size = span

    setattr(owner, attribute, match)
    driver = Driver(SMALL, 1)
    try:
        while steps and not driver.lost and not driver.refusals:
            driver.step()
            steps -= 1
    finally:
        setattr(owner, attribute, old)
    return dict(driver.lost)


if __name__ == "__main__":
    prepare()
    if "--shorter" in sys.argv:
        print(json.dumps({"lost": shorter()}))
        sys.exit()
    for chosen in sys.argv[1:] or FAULTS:
        if (found := hunt(chosen)) is not None:
            print(json.dumps(found), flush=True)
