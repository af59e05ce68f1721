"""Run the GPU suite on a host that has torch and TileLang but no network, and write one JSON document.

    python3 ci/gpu.py OUT.json [--family F]... [-- arguments of pytest]

The packages run from the tree. Each test's outcome is added to OUT.FAMILY.jsonl as it ends, so that a run which is
killed loses none. Exit code: 0 if every test passed, 1 if one failed, none ran or pytest ended early.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FAMILIES = ("gemm", "attention", "norm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, more = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    path = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    suites: dict[str, dict[str, Any]] = {}
    found = {"schema": "tileops.gpu/1", "environment": describe(environment), "suites": suites}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for family in given.family or FAMILIES:
        suites[family] = suite(family, given.out.with_suffix(f".{family}.jsonl"), more, environment)
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    for family, s in suites.items():
        ended = "" if s["exit"] in (0, 1) else f"; pytest ended with {s['exit']}: {s['reason']}"
        counts = f"{s['passed']} passed, {s['failed']} failed, {s['skipped']} skipped"
        print(f"{family}: {counts} in {s['seconds']} s{ended}")
        for failure in s["failures"][:20]:
            print(f"  {failure['test']}: {failure['message']}")
    return 0 if all(s["passed"] and s["exit"] == 0 for s in suites.values()) else 1


def suite(family: str, outcomes: Path, more: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """One family's tests that need a GPU; their programs are compiled first, on all cores."""
    start = time.monotonic()
    build = [sys.executable, "-m", "tileops.core.cli", "cache", "build", "--family", family]
    subprocess.run(build, cwd=ROOT, env=environment, check=False)
    outcomes.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", f"packages/tileops-{family}/tests"]
    command += [f"--outcomes={outcomes.resolve()}", *more]
    done = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, check=False)
    print(done.stderr, file=sys.stderr, end="")
    lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    last = {line["test"]: line for line in map(json.loads, lines)}  # a test that fails in its teardown has two
    count = Counter(line["outcome"] for line in last.values())
    failed = [line for line in last.values() if line["outcome"] == "failed"]
    return {
        "passed": count["passed"],
        "failed": count["failed"],
        "skipped": count["skipped"],
        "seconds": round(time.monotonic() - start, 1),
        "exit": done.returncode,
        "reason": (done.stderr.strip().splitlines() or [""])[-1],
        "failures": [{"test": line["test"], "message": line.get("message", "")} for line in failed],
    }


def describe(environment: dict[str, str]) -> Any:
    """What ``tileops doctor`` says of this host."""
    command = [sys.executable, "-m", "tileops.core.cli", "doctor", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        return done.stderr.strip().splitlines()[-1:]


if __name__ == "__main__":
    sys.exit(main())
