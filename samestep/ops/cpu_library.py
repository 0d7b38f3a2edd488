"""The compiled `cpu_kernels.c`: made with the C compiler of this machine on first use, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu_kernels.c")
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"),
    # What vectors need. Not -ffast-math: it may drop infinities and NaN, and lets a whole process flush tiny numbers.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)

_SECONDS = 120
"""A compiler that takes longer hangs."""


@functools.cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason why there is none. `SAMESTEP_CPU_KERNELS=0` in the environment asks for
    none; `CC` is the command of another compiler than `cc`."""
    if os.environ.get("SAMESTEP_CPU_KERNELS", "1") == "0":
        return None, "SAMESTEP_CPU_KERNELS is 0"
    if os.name != "posix":
        return None, "they are for Linux and macOS"
    program, *options = shlex.split(os.environ.get("CC", "")) or ["cc"]
    compiler = shutil.which(program)
    if compiler is None:
        return None, f"no C compiler: {program} is not a program"
    try:
        command = [compiler, *options, *FLAGS]
        return _load(command, _cache() / f"kernels-{_fingerprint(command)}.so"), ""
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        return None, f"{compiler} failed: {lines[0] if lines else f'exit code {error.returncode}'}"
    except subprocess.TimeoutExpired:
        return None, f"{compiler} took more than {_SECONDS} seconds"
    except OSError as error:
        return None, str(error)


def _load(command: list[str], path: Path) -> ctypes.CDLL:
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            pass  # a damaged file: it is made anew
    # Under a name of its own and then moved: another process may be loading, or compiling the same.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="compiling-") as folder:
        made = Path(folder) / path.name
        command = [*command, "-o", str(made), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        with made.open("rb") as file:
            os.fsync(file.fileno())  # a file that lost its end in a crash of the system would bring down who loads it
        made.replace(path)
    return ctypes.CDLL(str(path))


def _cache() -> Path:
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # the latter where nobody knows a home
        pass
    # One folder a user, which nobody else may have made.
    folder = Path(tempfile.gettempdir()) / f"samestep-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return folder


def _fingerprint(command: list[str]) -> str:
    """Of all that decides what is compiled: several machines may share a home, with processors of several kinds."""
    tool = Path(command[0]).resolve()
    parts = [SOURCE.read_text(), *command, str(tool), str(tool.stat().st_mtime_ns), platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        parts += sorted({line for line in info.read_text().splitlines() if line.startswith(("model name", "flags"))})
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
