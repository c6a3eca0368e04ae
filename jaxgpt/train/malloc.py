# SPDX-License-Identifier: Apache-2.0
"""Make glibc keep what XLA's CPU back end frees: its scratch memory is asked for anew every step.

By default each of these large blocks is mapped, cleared by the kernel page by page and unmapped
again, which costs a small model a fifth of its time or more.
"""

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8  # malloc.h
MADV_HUGEPAGE = 14  # sys/mman.h
PAGE = 4096


def tune_malloc(reserve_bytes: int = 1 << 30) -> bool:
    """One arena, nothing given back to the system, huge pages: for a process that trains on CPU.

    Call it before the first computation: threads keep the arena they began with. Memory that was
    used once stays with the process. Elsewhere than on glibc nothing happens.

    Args:
      reserve_bytes: Address space to mark for huge pages; it is taken from the system as it is
        used.

    Returns:
      Whether everything was set.

    Source: mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        settings = {
            M_ARENA_MAX: 1,
            M_MMAP_MAX: 0,
            M_TRIM_THRESHOLD: 2**31 - 1,
            M_TOP_PAD: 64 << 20,
        }
        # mallopt answers 1 where it set the value; a list, so that each is tried.
        if not all([libc.mallopt(name, value) for name, value in settings.items()]):
            return False
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        block = libc.malloc(reserve_bytes)
        if block is None:
            return False
        start = -(-block // PAGE) * PAGE
        marked = libc.madvise(start, reserve_bytes - 2 * PAGE, MADV_HUGEPAGE) == 0
        libc.free(block)
        return marked
    return False
