# SPDX-License-Identifier: Apache-2.0
"""What a process does before it computes on a CPU: XLA asks for its scratch memory at every step.

By default each of these large blocks is mapped, cleared by the kernel page by page and unmapped
again, which costs a small model a fifth of its time or more.
"""

import contextlib
import ctypes

import jax

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # malloc.h
MADV_HUGEPAGE = 14  # sys/mman.h
PAGE = 4096


def tune_cpu(reserve_bytes: int = 1 << 30) -> bool:
    """Nothing given back to the system, huge pages, and steps that run on the calling thread.

    Call it on the main thread, before JAX starts its back end. In glibc the heap of the main thread
    alone grows without limit; those of others end at 64 MiB, and an empty one is unmapped. So the
    main thread runs the steps, instead of one that the back end keeps for them, and the workers
    pack their matrices on heaps of their own, where they do not wait for each other.

    Memory that was used once stays with the process. Elsewhere than on glibc nothing happens.

    Args:
      reserve_bytes: Address space to mark for huge pages; it is taken from the system as it is
        used.

    Returns:
      Whether everything was set.

    Source: mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        settings = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 64 << 20}
        # mallopt answers 1 where it set the value; a list, so that each is tried.
        if not all([libc.mallopt(name, value) for name, value in settings.items()]):
            return False
        jax.config.update("jax_cpu_enable_async_dispatch", False)
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
