"""A child process: it answers, and whatever becomes of it, or of who asks, costs no more than that one answer."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from tileops.core.errors import BackendError, TileOpsError
from tileops.core.tune.child import Child, Rejected, Stopped

FUNCTIONS = """
import os, signal, subprocess, sys, time
from tileops.core.errors import TileOpsError
from tileops.core.tune.child import Rejected

def do(what, *arguments):
    yield from globals()[what](*arguments)

def twice(*values):
    yield from (2 * v for v in values)

def pid():
    yield os.getpid()

def hang(log=None):
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    if log:
        with open(log, "w") as f:
            f.write(f"{os.getpid()} {helper.pid} ")
    time.sleep(60)
    yield

def crash():
    print("illegal something", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    yield

def reject(spoilt):
    raise Rejected("it is wrong", spoilt)
    yield

def fail(error):
    raise error
    yield
"""


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    (tmp_path / "child_functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def asked():
    with Child("child_functions:do") as asked:
        yield asked


def pid_of(asked: Child) -> int:
    (pid,) = asked.ask("pid")
    return pid


def gone(pid: int) -> bool:
    """Whether a process ends within a while; one that nobody has waited for is as good as gone."""
    until = time.monotonic() + 4
    while time.monotonic() < until:
        try:
            if re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_one_process_gives_all_answers(asked):
    assert list(asked.ask("twice", 1, 2, 3)) == [2, 4, 6]
    assert pid_of(asked) == pid_of(asked) != os.getpid()


def test_silence_costs_it_its_life_and_that_of_what_it_started(asked, tmp_path):
    log = tmp_path / "log"
    start = time.monotonic()
    with pytest.raises(Rejected, match=r"no answer within 0.5 s: its process was killed"):
        list(asked.ask("hang", str(log), deadline=0.5))
    assert time.monotonic() - start < 30
    assert all(gone(int(pid)) for pid in log.read_text().split())
    assert list(asked.ask("twice", 4)) == [8], "another one goes on"


def test_a_crash_is_told_with_its_last_words(asked):
    with pytest.raises(Rejected, match=r"its process died: SIGSEGV, illegal something"):
        list(asked.ask("crash"))
    assert list(asked.ask("twice", 4)) == [8]


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_rejection_spares_the_process_unless_that_is_spoilt(asked, spoilt):
    first = pid_of(asked)
    with pytest.raises(Rejected, match="it is wrong"):
        list(asked.ask("reject", spoilt))
    assert (pid_of(asked) != first) is spoilt


@pytest.mark.parametrize(
    ("error", "message"), [(TileOpsError("so it is"), "so it is"), (ValueError("no"), "ValueError: no")]
)
def test_other_errors_are_no_rejections(asked, error, message):
    with pytest.raises(TileOpsError, match=f"^{message}$"):
        list(asked.ask("fail", error))
    assert list(asked.ask("twice", 4)) == [8]


def test_what_can_not_be_started_says_why():
    with pytest.raises(BackendError, match=r"no_such_module:f can't be started: .*No module named 'no_such_module'"):
        list(Child("no_such_module:f").ask())


def test_another_thread_can_stop_it(asked):
    first = pid_of(asked)
    timer = threading.Timer(0.2, asked.stop)
    timer.start()
    with pytest.raises(Stopped):
        list(asked.ask("hang"))
    assert gone(first)
    with pytest.raises(Stopped):
        list(asked.ask("pid"))


def _ask(log: str) -> None:
    list(Child("child_functions:do").ask("hang", log))


def test_it_does_not_outlive_who_asks(tmp_path):
    log = tmp_path / "log"
    asking = multiprocessing.get_context("fork").Process(target=_ask, args=(str(log),))
    asking.start()
    while not (log.exists() and log.read_text().endswith(" ")):
        time.sleep(0.02)
    assert asking.pid
    os.kill(asking.pid, signal.SIGKILL)
    asking.join()
    assert all(gone(int(pid)) for pid in log.read_text().split())


def test_it_does_not_run_the_script_that_asks(tmp_path):
    """As multiprocessing's would, where a script has no guard around what it does."""
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        "print('run')\nfrom tileops.core.tune.child import Child\n"
        "with Child('child_functions:do') as c: print(*c.ask('twice', 1))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["run", "2"], done.stderr
