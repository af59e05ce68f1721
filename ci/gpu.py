"""Run the GPU suite on a host that has torch and TileLang but no network, and write one JSON document.

    python3 ci/gpu.py OUT.json [--family F]... [-- arguments of pytest]

The packages run from the tree. Exit code: 0 if every test passed, 1 if one failed or none ran.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
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
        suites[family] = suite(family, more, environment)
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    for family, s in suites.items():
        print(f"{family}: {s['passed']} passed, {s['failed']} failed, {s['skipped']} skipped in {s['seconds']} s")
        for failure in s["failures"][:20]:
            print(f"  {failure['test']}: {failure['message']}")
    return 0 if all(s["passed"] and not s["failed"] for s in suites.values()) else 1


def suite(family: str, more: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """One family's tests that need a GPU; their programs are compiled first, on all cores."""
    start = time.monotonic()
    build = [sys.executable, "-m", "tileops.core.cli", "cache", "build", "--family", family]
    subprocess.run(build, cwd=ROOT, env=environment, check=False)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", f"packages/tileops-{family}/tests"]
        subprocess.run([*command, f"--junitxml={report}", *more], cwd=ROOT, env=environment, check=False)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failures = []
    for case in cases:
        for fault in (*case.iter("failure"), *case.iter("error")):
            message = (fault.get("message") or "").strip().splitlines()
            failures.append(
                {"test": f"{case.get('classname')}::{case.get('name')}", "message": " ".join(message)[:500]}
            )
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = len({f["test"] for f in failures})
    return {
        "passed": len(cases) - failed - skipped,
        "failed": failed,
        "skipped": skipped,
        "seconds": round(time.monotonic() - start, 1),
        "failures": failures,
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
