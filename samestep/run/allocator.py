"""How the C library hands out the memory of a process that trains on a CPU."""

from __future__ import annotations

import ctypes
import platform

# Names and numbers of glibc's malloc.h; the values are near the largest that `mallopt` takes, a C int.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 2**31 - 1, 2**30


def keep_freed_memory() -> bool:
    """Let this process keep the memory that tensors free, for the tensors after them.

    Without it glibc maps every block of more than 32 MiB on its own, and hands the free end of the heap back as well.
    The system then clears each page anew when it is touched again, which can take as long as the arithmetic on it.
    Holds until the process ends; the resident set stays near its peak.

    Returns:
        Whether it took effect: only glibc has these settings.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    set_option = ctypes.CDLL(None).mallopt
    return bool(set_option(MMAP_THRESHOLD, _MMAP_BYTES) and set_option(TRIM_THRESHOLD, _TRIM_BYTES))
