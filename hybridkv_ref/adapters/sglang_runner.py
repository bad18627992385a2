"""A model worker without a model: it writes fingerprints where SGLang's Scheduler has one write keys and values.

It knows of the cache what a real one knows: the rows of requests, the slots that a batch writes, where the window's
slots stand beside those of full attention, which states are copied or cleared. Each pool has a shadow of 8 bytes per
slot. What is written for a position stands for all tokens up to it; what a step reads is compared with what its
request is made of, and so are the input tokens. A batch runs when it is launched, in order, as on a device.
"""

from typing import Any

import numpy as np

from hybridkv_ref.adapters.vllm_runner import Known, WrongBytes


class Worker:
    """Stands where a Scheduler has its model worker; WrongBytes where a batch reads what its request is not made of.

    ``window``: tokens that a query reads before its own, 0 where a group has states.
    """

    def __init__(self, cache: Any, window: int) -> None:
        self.rows, self.slots, self.window = cache.req_to_token_pool, cache.token_to_kv_pool_allocator, window
        self.states = cache.supports_mamba()
        room = len(getattr(self.slots, "full_to_swa_index_mapping", ())) or self.slots.size + self.slots.page_size
        self.full = np.zeros(room + 1, np.uint64)
        self.second = np.zeros(room + 1, np.uint64)
        self.known: dict[str, Known] = {}
        self.bytes_written = self.bytes_read = 0
        self.model_runner: Any = None
        self.model_config: Any = None
        self.weight_load_time, self.graph_time_usage = 0.0, dict[str, float]()
        if self.states:
            self.second = np.zeros(self.rows.mamba_pool.size + 1, np.uint64)
            copy = self.rows.mamba_pool.copy_from

            def copied(source: Any, target: Any) -> None:
                copy(source, target)
                self.second[target.numpy()] = self.second[source.numpy()]

            self.rows.mamba_pool.copy_from = copied

    def forward_batch_generation(self, batch: Any, **_: Any) -> Any:
        """Runs a batch: all that it writes, then what its queries read; gives a token for each request."""
        import torch
        from sglang.srt.managers.utils import GenerationBatchResult

        ends = batch.seq_lens_cpu.tolist()
        decoding = batch.forward_mode.is_decode()
        begins = [end - 1 for end in ends] if decoding else list(batch.prefix_lens)
        if self.states and not decoding:
            self._copy(batch)
        jobs, at = [], 0
        for req, lo, hi in zip(batch.reqs, begins, ends, strict=True):
            known = self._known(req)
            known.upto(hi + 1)
            if batch.input_ids[at : at + hi - lo].tolist() != known.tokens[lo:hi]:
                raise WrongBytes(f"{req.rid} [{lo}, {hi}): other input tokens than its own")
            row = self.rows.req_to_token[req.kv.req_pool_idx, :hi].long()
            if batch.out_cache_loc[at : at + hi - lo].tolist() != row[lo:].tolist():
                raise WrongBytes(f"{req.rid} [{lo}, {hi}): its row has other slots than the batch writes")
            jobs.append((req, lo, hi, row))
            at += hi - lo
            before = self._state(req) if self.states else None
            if before is not None and lo and before != known.prints[lo - 1]:
                raise WrongBytes(f"{req.rid} [{lo}, {hi}): its state has other bytes than those of {lo} tokens")
            self._write(req, known.prints[lo:hi], row[lo:])
        for req, lo, hi, row in jobs:
            self._read(req, lo, hi, row)
        tokens = [self.known[req.rid].tokens[hi] for req, _, hi, _ in jobs]
        return GenerationBatchResult(next_token_ids=torch.tensor(tokens, dtype=torch.int64))

    def _known(self, req: Any) -> Known:
        if req.rid not in self.known:
            tokens = list(req.origin_input_ids)
            salt = hash((req.extra_key, req.cache_salt)) if req.extra_key or req.cache_salt else 0
            self.known[req.rid] = Known(tokens, salt, [], len(tokens), len(tokens))
        return self.known[req.rid]

    def _copy(self, batch: Any) -> None:
        if batch.mamba_cow_src_indices is not None:
            self.second[batch.mamba_cow_dst_indices.numpy()] = self.second[batch.mamba_cow_src_indices.numpy()]
        if batch.mamba_clear_indices is not None:
            self.second[batch.mamba_clear_indices.numpy()] = 0

    def _state(self, req: Any) -> int:
        return int(self.second[int(req.kv.mamba_pool_idx)])

    def _beside(self, slots: Any) -> Any:
        return self.slots.full_to_swa_index_mapping[slots].numpy()

    def _write(self, req: Any, prints: list[int], slots: Any) -> None:
        self.full[slots.numpy()] = prints
        if self.states:
            self.second[int(req.kv.mamba_pool_idx)] = prints[-1]
        else:
            self.second[self._beside(slots)] = prints
        self.bytes_written += 8 * (2 * len(prints) if not self.states else len(prints) + 1)

    def _read(self, req: Any, lo: int, hi: int, row: Any) -> None:
        prints = np.array(self.known[req.rid].prints[:hi], np.uint64)
        self._judge(req, lo, hi, "full attention", self.full[row.numpy()], prints)
        if not self.states:
            low = max(0, lo - self.window)
            self._judge(req, lo, hi, "the window", self.second[self._beside(row[low:])], prints[low:], low)

    def _judge(self, req: Any, lo: int, hi: int, group: str, found: Any, expected: Any, low: int = 0) -> None:
        self.bytes_read += 8 * len(found)
        if (bad := np.flatnonzero(found != expected)).size:
            raise WrongBytes(f"{req.rid} [{lo}, {hi}): {group} has other bytes at {low + int(bad[0])}")
