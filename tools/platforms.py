"""Try minigen on another system: `python -m tools.platforms FOLDER NAME [STEP ...]`.

Each platform is a separate Debian in a folder under FOLDER, created with debootstrap and entered
with chroot. A platform for another processor runs in QEMU's user emulation. The last commit is
cloned there, and each step installs or tries it in turn. This needs Linux and root. The package
registries are those that this machine's pip and apt use. docs/platforms.md records the results.
"""

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.environment import ROOT

PACKAGES = "ca-certificates,gcc,git,libc6-dev,make,python3,python3-dev,python3-venv"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
OURS = [Path("/etc/hosts"), Path("/etc/resolv.conf"), Path("/etc/pip.conf")]
OURS += [Path("/root/.config/pip/pip.conf"), Path("/etc/ssl/certs/ca-certificates.crt")]
OUR_VARIABLES = re.compile(
    r"PIP_(?!FIND_LINKS)\w+|\w*SSL_CERT\w+|\w+_CA_BUNDLE|\w+_(?:proxy|PROXY)|TORCH_INDEX"
)
PYTHON = ".venv/bin/python"
GREEDY = "--temperature 0 --max-tokens 8 'The capital of France is'"


@dataclass(frozen=True)
class Platform:
    """A Debian suite for one kind of processor, with Debian's names for both."""

    suite: str
    architecture: str


PLATFORMS = {
    "trixie": Platform("trixie", "amd64"),
    "sid": Platform("sid", "amd64"),
    "trixie-arm64": Platform("trixie", "arm64"),
}
STEPS = {
    "install": "python3 -m tools.environment cpu server notebooks test",
    "pull": f"{PYTHON} -m minigen pull",
    "doctor": f"{PYTHON} -m minigen doctor",
    "float32": f"{PYTHON} -m minigen generate --weights float32 {GREEDY}",
    "compile": f"{PYTHON} -m minigen compile int4",
    "int4": f"{PYTHON} -m minigen generate --weights int4 {GREEDY}",
    "golden": f"{PYTHON} -m pytest -q tests/test_17_golden.py",
    "chapters": f"{PYTHON} -m pytest -q -n 2 tests/test_1?_*.py tests/test_2?_*.py",
    "no-model": f"{PYTHON} -m pytest -q -m 'not model and not long and not browser' "
    "tests/test_1?_*.py tests/test_2?_*.py",
    "kernels": f"{PYTHON} -m pytest -q tests/test_34_*.py",
    "tests": f"{PYTHON} -m pytest -q -n 2",
    "notebooks": f"{PYTHON} -m tools.notebooks --check 11 16 25",
}
USUAL = ["install", "pull", "doctor", "float32", "compile", "int4", "golden", "chapters"]


def main() -> None:
    """Create the platform if it does not exist, and run the steps; exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the platforms: 2 to 12 GB each")
    parser.add_argument("name", choices=PLATFORMS)
    parser.add_argument("steps", nargs="*", metavar="step", help=", ".join(STEPS))
    options = parser.parse_args()
    unknown = sorted(set(options.steps) - set(STEPS))
    if unknown:
        parser.error(f"there is no step {', '.join(unknown)}; choose from {', '.join(STEPS)}")
    chosen = PLATFORMS[options.name]
    lacking = what_lacks(chosen)
    if lacking is not None:
        sys.exit(lacking)
    system = options.folder.resolve() / options.name
    _make(system, chosen)
    _clone(system)
    failed = [step for step in options.steps or USUAL if not _take(system, step)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def what_lacks(chosen: Platform) -> str | None:
    """Return why the platform cannot be created here, with the remedy, or None."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        return "Platforms need Linux and root: run this on Linux with sudo."
    if shutil.which("debootstrap") is None:
        return "debootstrap is not installed; run apt-get install debootstrap."
    machine = MACHINES[chosen.architecture]
    if machine != platform.machine() and not _emulated(machine):
        return (
            f"This machine cannot run programs for {machine}: apt-get install qemu-user-static "
            "binfmt-support, and mount binfmt_misc if /proc/sys/fs/binfmt_misc is empty."
        )
    return None


def _emulated(machine: str) -> bool:
    return Path(f"/proc/sys/fs/binfmt_misc/qemu-{machine}").exists()


def _make(system: Path, chosen: Platform) -> None:
    """Fill the folder with debootstrap, from the first mirror in this machine's apt sources."""
    if not (system / "made").exists():
        system.parent.mkdir(parents=True, exist_ok=True)
        packages = f"--include={PACKAGES}"
        made = ["debootstrap", "--variant=minbase", f"--arch={chosen.architecture}", packages]
        subprocess.run([*made, chosen.suite, str(system), *_mirror()], check=True)
        (system / "made").touch()
    for path in filter(Path.exists, OURS):
        there = system / path.relative_to("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_bytes(path.read_bytes())


def _mirror() -> list[str]:
    """Return Debian's package address from apt's configuration; nothing on other systems."""
    if shutil.which("apt-get") is None:
        return []
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Label: Debian"]
    listed = subprocess.run(command, capture_output=True, encoding="utf-8")
    return listed.stdout.split()[:1]


def _clone(system: Path) -> None:
    """Update the clone in the platform to the commit that is checked out here."""
    clone = system / "minigen"
    if not clone.exists():
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    for command in ("fetch -q origin HEAD", "reset -q --hard FETCH_HEAD"):
        subprocess.run(["git", "-C", str(clone), *command.split()], check=True)


def _take(system: Path, step: str) -> bool:
    """Run a step in the platform and return whether it succeeded."""
    print(f"== {step}: {STEPS[step]}", flush=True)
    started = time.perf_counter()
    code = subprocess.run(_inside(system, STEPS[step], os.environ.items())).returncode
    verdict = "failed" if code else "ok"
    print(f"== {step}: {verdict}, {time.perf_counter() - started:.0f} s", flush=True)
    return code == 0


def _inside(system: Path, command: str, variables: Iterable[tuple[str, str]]) -> list[str]:
    """Return a command that runs in the platform, with its own mounts that end with it."""
    kept = [f"{name}={value}" for name, value in variables if OUR_VARIABLES.fullmatch(name)]
    kept += ["HOME=/root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"]
    there, cache = shlex.quote(str(system)), shlex.quote(str(system.parent / "pip"))
    script = (
        f"mount -t proc proc {there}/proc && mount --rbind /sys {there}/sys && "
        f"mount --rbind /dev {there}/dev && mkdir -p {cache} {there}/root/.cache/pip && "
        f"mount --bind {cache} {there}/root/.cache/pip && "
        f"exec chroot {there} env -i {shlex.join(kept)} "
        f"sh -c {shlex.quote(f'cd /minigen && {command}')}"
    )
    return ["unshare", "--mount", "sh", "-c", script]


if __name__ == "__main__":
    main()
