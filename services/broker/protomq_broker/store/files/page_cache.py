"""Whether a part of a file is in the page cache: cachestat(2), Linux 6.5.

Where the kernel does not tell, all counts as cached: then what was checked once after a start is not checked again.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from typing import Any, Final

_NUMBER: Final = 451
"""Of the system call, on all architectures but Alpha."""
_RANGE: Final = struct.Struct("=QQ")
_RESULT: Final = struct.Struct("=QQQQQ")
_Result = ctypes.c_char * _RESULT.size
_PAGE_SIZE: Final = mmap.PAGESIZE

HELD_SIZE_MAX_BYTES: Final = 1 << 20
"""Up to here the interpreter is held: the call takes 2 to 70 microseconds, getting the interpreter back beside busy threads up to 5
milliseconds. It takes up to 70 milliseconds for 1 GiB that came in small appends."""


def _system_call(library: ctypes.CDLL) -> Any:
    function = library.syscall
    function.restype = ctypes.c_long
    function.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint)  # fmt: skip
    return function


_syscall_held = _system_call(ctypes.PyDLL(None))
_syscall = _system_call(ctypes.CDLL(None))


def is_cached(fd: int, offset: int, size_bytes: int) -> bool:
    """Whether all pages of [offset, offset + size_bytes) are in the page cache; True where the kernel does not tell."""
    result = _Result()
    call = _syscall_held if size_bytes <= HELD_SIZE_MAX_BYTES else _syscall
    if call(_NUMBER, fd, _RANGE.pack(offset, size_bytes), result, 0) != 0:
        return True
    pages = (offset + size_bytes - 1) // _PAGE_SIZE - offset // _PAGE_SIZE + 1
    cached: int = _RESULT.unpack(result.raw)[0]
    return cached >= pages
