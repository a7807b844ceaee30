"""The environments: what each one changes, where its clone is, which parts it tries."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.portability.store import Cell

ROOT = Path(__file__).resolve().parent.parent.parent
SHARED = "shared"
LONG = 190  # characters in a path
PARTS = ("setup", "installed", "checks", "tests", "golden", "demo", "notebooks")
FRESH = ("setup", "installed", "checks", "tests", "golden", "notebooks")
UNWRITTEN = tuple(part for part in PARTS if part != "installed")  # pip writes to the clone
RUN = ("tests", "golden", "notebooks")
COMPUTED = ("golden", "notebooks")  # what depends on the order of sums

READ_ONLY = """
mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$0" && exec "$@"
"""
LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    SIOCSIFFLAGS, IFF_UP = 0x8914, 1
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
os.execvp(sys.argv[1], sys.argv[1:])
"""
NOWHERE = "http://127.0.0.1:9"
PROXIES = {
    name: value
    for variable in ("http_proxy", "https_proxy", "all_proxy")
    for name, value in ((variable, NOWHERE), (variable.upper(), NOWHERE))
} | dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1")
THREADS = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")

KEPT_ELSEWHERE = {
    "VENV_DIR": "{elsewhere}/venv",
    "BUILD_DIR": "{elsewhere}/build",
    "MINIGEN_HOME": "{elsewhere}/minigen",
    "PYTHONPYCACHEPREFIX": "{elsewhere}/pycache",
    "RUFF_CACHE_DIR": "{elsewhere}/ruff",
    "MYPY_CACHE_DIR": "{elsewhere}/mypy",
    "HYPOTHESIS_STORAGE_DIRECTORY": "{elsewhere}/hypothesis",
    "NUMBA_CACHE_DIR": "{elsewhere}/numba",
    "TRITON_CACHE_DIR": "{elsewhere}/triton",
    "PYTEST_ADDOPTS": "-p no:cacheprovider",
}
AT_HOME_ELSEWHERE = {
    "HOME": "{elsewhere}/home",
    "XDG_CACHE_HOME": "{elsewhere}/cache",
    "XDG_CONFIG_HOME": "{elsewhere}/config",
    "XDG_DATA_HOME": "{elsewhere}/data",
    "XDG_RUNTIME_DIR": "{elsewhere}/runtime",
    "JUPYTER_CONFIG_DIR": "{elsewhere}/jupyter",
    "JUPYTER_DATA_DIR": "{elsewhere}/jupyter",
    "JUPYTER_RUNTIME_DIR": "{elsewhere}/runtime",
    "IPYTHONDIR": "{elsewhere}/ipython",
    "MPLCONFIGDIR": "{elsewhere}/matplotlib",
    "TMPDIR": "{elsewhere}/tmp",
}


def _instructions(torch: str, onednn: str, numba: str, features: str = "") -> dict[str, str]:
    """Return the variables for a processor that LLVM knows as `numba`.

    `features` are those of its instructions that minigen asks for; LLVM knows the others.
    """
    return {
        "ATEN_CPU_CAPABILITY": torch,
        "ONEDNN_MAX_CPU_ISA": onednn,
        "NUMBA_CPU_NAME": numba,
        "NUMBA_CPU_FEATURES": features,  # without the variable, Numba takes this machine's
    }


SSE4 = "+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt"
AVX2 = "+avx2,+fma,+f16c"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
SSE4_ALONE = _instructions("default", "SSE41", "tremont", SSE4)  # as laptops without AVX
AVX2_ALONE = _instructions("avx2", "AVX2", "haswell", AVX2)
WITH_VNNI = _instructions("avx2", "AVX2_VNNI", "haswell", f"{AVX2},+avxvnni")
AVX512_ALONE = _instructions("avx512", "AVX512_CORE", "skylake-avx512", AVX512)
WITH_VNNI_512 = _instructions(
    *("avx512", "AVX512_CORE_BF16", "cooperlake"), f"{AVX512},+avx512vnni,+avx512bf16"
)


@dataclass(frozen=True)
class Environment:
    """One environment. In values of variables, `{elsewhere}` is a folder beside the clone."""

    name: str
    about: str
    parts: tuple[str, ...] = RUN
    place: str = SHARED
    inside: tuple[str, ...] = ("minigen",)  # the clone's path inside the place's folder
    kept: Mapping[str, str] = field(default_factory=dict)  # also during its set-up
    variables: Mapping[str, str] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    umask: int = -1
    read_only: bool = False
    loaded: bool = False
    random_order: bool = False
    lacking: str = ""  # why it cannot be tried on this machine

    @property
    def cells(self) -> list[Cell]:
        """The cells of this environment, in order."""
        return [Cell(self.name, part) for part in self.parts]


def environments(folder: Path) -> list[Environment]:
    """Return all environments for clones below `folder`.

    `lacking` says why this machine cannot try one.
    """
    missing = [tool for tool in ("git", "make") if shutil.which(tool) is None]
    lacking = f"there is no {' and no '.join(missing)} here" if missing else ""
    padding = "a-folder-with-a-long-name-in-which-a-minigen-lies"
    times = max(1, -(-(LONG - len(str(folder))) // (len(padding) + 1)))
    network = _without_network()
    return [
        Environment(
            "long",
            f"a clone called minigen, its path longer than {LONG - 10} characters",
            FRESH,
            "long",
            (*[padding] * times, "minigen"),
            lacking=lacking,
        ),
        Environment(
            "strange",
            "spaces, an apostrophe and a letter outside ASCII in the clone's path, another locale, "
            "the time zone Pacific/Kiritimati, umask 077, 40 columns, a hash seed, tests in a "
            "random order whose seed is the commit",
            FRESH,
            "strange",
            ("mein schöner Ordner", "Zoe's mini gen"),
            variables={
                **dict.fromkeys(("LANG", "LC_ALL"), _locale()),
                **{"TZ": "Pacific/Kiritimati", "COLUMNS": "40", "PYTHONHASHSEED": "7"},
            },
            umask=0o077,
            random_order=True,
            lacking=lacking,
        ),
        Environment(
            "readonly",
            "a clone that cannot be written, its environment, caches and home elsewhere; after one "
            f"set-up without a network ({'a namespace of its own' if network else 'proxies'})",
            UNWRITTEN,
            "readonly",
            kept=KEPT_ELSEWHERE,
            variables=AT_HOME_ELSEWHERE | ({} if network else PROXIES),
            prefix=network,
            read_only=True,
            lacking=lacking or _no_read_only_mount(),
        ),
        Environment(
            "load",
            "beside one busy loop per core",
            loaded=True,
            lacking=lacking,
        ),
        Environment(
            "oldest",
            "instructions of the oldest 64-bit processors, one thread, one core",
            COMPUTED,
            kept={"MINIGEN_HOME": "{elsewhere}/oldest"},
            variables={
                **_instructions("default", "SSE41", "generic"),
                **dict.fromkeys(THREADS, "1"),
            },
            prefix=_one_core(),
            lacking=lacking,
        ),
        Environment(
            "avx2",
            "AVX2 and no more, two threads",
            COMPUTED,
            kept={"MINIGEN_HOME": "{elsewhere}/avx2"},
            variables={
                **AVX2_ALONE,
                **dict.fromkeys(THREADS, "2"),
            },
            lacking=lacking or _no_instructions("avx2"),
        ),
        Environment(
            "avx512",
            "AVX-512 as its first processors had it",
            COMPUTED,
            kept={"MINIGEN_HOME": "{elsewhere}/avx512"},
            variables=AVX512_ALONE,
            lacking=lacking or _no_instructions("avx512bw"),
        ),
    ]


def read_only(tree: Path) -> tuple[str, ...]:
    """Return a command prefix that mounts `tree` read-only for that command alone."""
    return (*_unshare("--mount"), "sh", "-c", READ_ONLY, str(tree))


def _unshare(namespace: str) -> tuple[str, ...]:
    as_root = () if hasattr(os, "geteuid") and os.geteuid() == 0 else ("--map-root-user",)
    return ("unshare", *as_root, namespace)


def _works(command: tuple[str, ...]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True).returncode == 0


def _no_read_only_mount() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = (*read_only(Path(folder)), "sh", "-c", "! touch written")
        return "" if _works(command) else "this machine does not allow a read-only mount"


def _without_network() -> tuple[str, ...]:
    prefix = (*_unshare("--net"), sys.executable, "-c", LOOPBACK_UP)
    return prefix if _works((*prefix, "true")) else ()


def _one_core() -> tuple[str, ...]:
    if shutil.which("taskset") is None or not hasattr(os, "sched_getaffinity"):
        return ()
    return ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))))


def _locale() -> str:
    if shutil.which("locale") is None:
        return "C"
    listed = subprocess.run(("locale", "-a"), capture_output=True).stdout.decode(errors="replace")
    return next((name for name in listed.split() if name.startswith("tr_TR.")), "C")


def _no_instructions(name: str) -> str:
    """Return why these instructions cannot be tried here, or an empty string."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"/proc/cpuinfo is missing, so it is unknown whether {platform.machine()} has {name}"
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return "" if name in flags else f"this processor has no {name}"
