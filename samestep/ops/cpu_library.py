"""The compiled `cpu_kernels.c`: made with the C compiler of this machine on first use, and kept in the user's cache."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("cpu_kernels.c")
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"),
    # What vectors need. Not -ffast-math: it may drop infinities and NaN, and lets a whole process flush tiny numbers.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    # Compilers prefer half of AVX-512, lest old processors lower their clock; MKL's products use all of it anyway.
    *(["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []),
)

_SECONDS = 120
"""A compiler that takes longer hangs."""
_PROCESSOR = ("model name", "flags", "Features", "CPU implementer", "CPU variant", "CPU part")
"""Lines of /proc/cpuinfo, of x86 and of ARM."""


@functools.cache
def library() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and the reason why there is none. `SAMESTEP_CPU_KERNELS=0` in the environment asks for
    none; `CC` is the command of another compiler than `cc`."""
    if os.environ.get("SAMESTEP_CPU_KERNELS", "1") == "0":
        return None, "SAMESTEP_CPU_KERNELS is 0"
    if os.name != "posix":
        return None, "they are for Linux and macOS"
    try:
        program, *options = shlex.split(os.environ.get("CC", "")) or ["cc"]
        compiler = shutil.which(program)
        if compiler is None:
            return None, f"no C compiler: {program} is not a program"
        return _load([compiler, *options, *FLAGS]), ""
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        return None, f"{compiler} failed: {next((line for line in lines if 'error' in line), lines[0])}"
    except subprocess.TimeoutExpired:
        return None, f"{compiler} took more than {_SECONDS} seconds"
    except (OSError, ValueError) as error:
        return None, str(error)


def _load(command: list[str]) -> ctypes.CDLL:
    name, folders = f"kernels-{_fingerprint(command)}.so", _folders()
    for folder in folders:
        if _is_trusted(folder) and (folder / name).exists():
            try:
                return ctypes.CDLL(str((folder / name).absolute()))
            except OSError:
                pass  # a damaged file: it is made anew
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_trusted(folder) and os.access(folder, os.W_OK):
            return ctypes.CDLL(str(_compile(command, folder / name).absolute()))
    raise PermissionError(f"neither {folders[0]} nor {folders[-1]} is a folder that only this user may write to")


def _compile(command: list[str], path: Path) -> Path:
    # Under a name of its own and then moved: another process may be loading, or compiling the same.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="compiling-") as folder:
        made = Path(folder) / path.name
        command = [*command, "-o", str(made), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=_SECONDS)
        with made.open("rb") as file:
            os.fsync(file.fileno())  # a file that lost its end in a crash of the system would bring down who loads it
        return made.replace(path)


def _folders() -> list[Path]:
    """Where it may lie: the user's cache, and where there is none, a folder for temporary files."""
    found = [Path(tempfile.gettempdir()) / f"samestep-{os.getuid()}"]
    with contextlib.suppress(RuntimeError):  # nobody knows a home
        found.insert(0, Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "samestep")
    return found


def _is_trusted(folder: Path) -> bool:
    """Whether nobody else may put a library there, to be run by this process."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022


def _fingerprint(command: list[str]) -> str:
    """Of all that decides what is compiled: several machines may share a home, with processors of several kinds."""
    tool = Path(command[0]).resolve()
    parts = [SOURCE.read_text(), *command, str(tool), str(tool.stat().st_mtime_ns), platform.machine()]
    info = Path("/proc/cpuinfo")
    if info.exists():
        parts += sorted({line for line in info.read_text().splitlines() if line.startswith(_PROCESSOR)})
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
