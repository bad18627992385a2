"""Which media an allocator has below its device."""

from hybridkv_ref.allocator.media import Files, HostMemory, Medium
from hybridkv_ref.allocator.media_direct import DirectFiles
from hybridkv_ref.errors import InputError

STORE_IO = {"buffered": Files, "direct": DirectFiles}


def media_of(host_bytes: int, store: str | None, store_io: str) -> dict[str, Medium]:
    """Media by the tables' names: host memory first, then files; a store that is not local is an object store.

    ``store_io``: "buffered" or "direct", how the files are read and written.  InputError for anything else, and for a
    store that takes no direct I/O.
    """
    if store_io not in STORE_IO:
        raise InputError(f"allocator:store_io: expected {' or '.join(STORE_IO)}, got {store_io!r}")
    media: dict[str, Medium] = {}
    if host_bytes:
        media["HOST"] = HostMemory()
    if store is not None:
        files = STORE_IO[store_io](store)
        media["DISK" if files.local else "OBJECT"] = files
    elif store_io == "direct":
        raise InputError("allocator:store_io: direct I/O needs a store")
    return media
