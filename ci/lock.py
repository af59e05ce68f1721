"""Renew the lock (`python ci/lock.py [arguments of uv lock]`) or hold it to its form (`python ci/lock.py --check`).

The committed `uv.lock` has versions and hashes but no download addresses, so that it serves any mirror;
`ci/constraints.txt` is the same set of versions for pip.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parents[1]
LOCK, CONSTRAINTS = "uv.lock", "ci/constraints.txt"
PLACEHOLDER = "https://index.invalid/simple"
EXPORT = ["export", "--frozen", "--all-packages", "--all-extras", "--all-groups", "--no-emit-workspace"]
PLAIN = ["--no-hashes", "--no-header", "--no-annotate", "--quiet"]


def strip(lock: str) -> str:
    """``lock`` without addresses: registries become a placeholder, files keep their names."""
    lock = re.sub(r'\bregistry = "[^"]*"', f'registry = "{PLACEHOLDER}"', lock)
    return re.sub(
        r'^(sdist = |    )\{ (?:url|path) = "(?:[^"]*/)?([^"/]+)"',
        lambda m: f'{m[1]}{{ filename = "{unquote(m[2])}"',
        lock,
        flags=re.MULTILINE,
    )


def uv(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # Beside the interpreter first: there pip puts it, on PATH or not.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("uv", path=path)
    if program is None:
        sys.exit("error: uv is not installed\n  mend: pip install uv")
    return subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True)


def reason(run: subprocess.CompletedProcess[str]) -> str:
    return run.stderr[max(run.stderr.find("error: "), 0) :].strip()


def constraints(workspace: Path) -> str:
    run = uv(*EXPORT, *PLAIN, cwd=workspace)
    if run.returncode:
        sys.exit(reason(run))
    return run.stdout


def renew(arguments: list[str]) -> None:
    # In a copy, so that the checkout never holds a lock with addresses, or half of the pair.
    with TemporaryDirectory() as folder:
        copy = Path(folder)
        for source in [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml"), ROOT / LOCK]:
            if source.exists():
                target = copy / source.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        run = uv("lock", *arguments, cwd=copy)
        if run.returncode:
            sys.exit(reason(run))
        (copy / LOCK).write_text(strip((copy / LOCK).read_text()))
        files = {LOCK: (copy / LOCK).read_text(), CONSTRAINTS: constraints(copy)}
    for name, text in files.items():
        fresh = ROOT / f"{name}.new"
        fresh.write_text(text)
        os.replace(fresh, ROOT / name)


def faults() -> list[str]:
    """What is wrong with the committed pair, one line each."""
    if not (ROOT / LOCK).exists():
        return [f"{LOCK} is missing"]
    found = []
    lock = (ROOT / LOCK).read_text()
    addresses = [n for n, line in enumerate(lock.splitlines(), 1) if strip(line) != line]
    if addresses:
        found.append(f"{LOCK}:{addresses[0]}: {len(addresses)} lines hold download addresses")
    run = uv("lock", "--check")
    if run.returncode:
        words = reason(run).removeprefix("error: ").splitlines()[0]
        what = "is stale against the pyproject files" if run.returncode == 1 else "can't be used: restore it from git"
        found.append(f"{LOCK} {what} (uv: {words})")
    elif not (ROOT / CONSTRAINTS).exists() or (ROOT / CONSTRAINTS).read_text() != constraints(ROOT):
        found.append(f"{CONSTRAINTS} differs from {LOCK}")
    return found


def main(arguments: list[str]) -> None:
    if arguments != ["--check"]:
        renew(arguments)
    elif found := faults():
        sys.exit("\n".join(f"error: {fault}\n  mend: python ci/lock.py" for fault in found))


if __name__ == "__main__":
    main(sys.argv[1:])
