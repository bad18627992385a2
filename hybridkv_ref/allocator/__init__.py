"""The reference allocator: the tables on real memory.  Importing it imports torch."""

from hybridkv_ref.allocator.admission import NotAdmitted, demand, size_caps
from hybridkv_ref.allocator.allocator import HeterogeneousAllocator
from hybridkv_ref.allocator.geometry import Geometry, GroupGeometry, build
from hybridkv_ref.allocator.records import CacheSegment, Hit, HitLease, Lease, Request, StatePointer, Verdict

__all__ = [
    "CacheSegment",
    "Geometry",
    "GroupGeometry",
    "HeterogeneousAllocator",
    "Hit",
    "HitLease",
    "Lease",
    "NotAdmitted",
    "Request",
    "StatePointer",
    "Verdict",
    "build",
    "demand",
    "size_caps",
]
