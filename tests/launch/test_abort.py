"""However one rank ends, all end: within 10 seconds, with one story, and a status that says so."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from launcher import ROOT, Result, ahead, command_line, descendants, environment, mpirun, mpirun_path, run

ENDS = Path(__file__).with_name("ends.py")
NAMES = [name for name in re.findall(r"^def (\w+)\(comm\):", ENDS.read_text(), re.MULTILINE) if name != "work"]
SLACK_S = 10.0  # to start three interpreters and MPI, on a machine that others use too

pytestmark = pytest.mark.skipif(mpirun_path() is None, reason="no mpirun; pip install '.[mpich]' brings one")


def end_on_three_ranks(name: str) -> Result:
    done = mpirun(3, [sys.executable, ENDS, name], timeout=60.0)
    assert done.status is not None, f"was still running\n{done}"
    assert done.seconds < 10.0 + SLACK_S, done
    return done


@pytest.fixture(scope="module")
def end():
    """How the command of that name in ends.py ended on three ranks."""
    # Four at once, as about half of them are waiting for a grace of three seconds.
    with ahead({name: partial(end_on_three_ranks, name) for name in NAMES}, workers=4) as end:
        yield end


def test_when_all_is_well_the_status_is_0_and_nothing_is_said(end):
    done = end("all_well")
    assert (done.status, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("name", ["exception", "exception_while_others_compute"])
def test_an_exception_on_one_rank_ends_all_with_its_traceback_once(name, end):
    done = end(name)
    assert done.status == 1, done
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "rank 1 of 3 on " in done.stderr and 'raise ZeroDivisionError("only here")' in done.stderr


def test_an_exception_on_all_ranks_is_told_once(end):
    done = end("exception_everywhere")
    assert done.status == 1, done
    assert done.stderr.count("Traceback") == 1 and "rank" not in done.stderr.partition("Traceback")[0]


def test_an_exception_that_raise_together_spread_is_told_by_the_rank_that_had_it(end):
    done = end("exception_that_others_hear_of")
    assert done.status == 1, done
    assert done.stderr.count("ZeroDivisionError: only here") == 1 and "rank 1 of 3: Traceback" in done.stderr


def test_an_exception_on_a_rank_whose_others_are_done_fails_all(end):
    done = end("exception_after_the_others_are_done")
    assert done.status == 1, done
    assert done.stderr.count("Traceback") == 1 and "rank 1 of 3: " in done.stderr


@pytest.mark.parametrize(("name", "status"), [("exit_5", 5), ("exit_0", 1)])
def test_sys_exit_on_one_rank_ends_all_with_a_line_that_says_so(name, status, end):
    done = end(name)
    assert done.status == status, done
    assert "rank 1 of 3 on " in done.stderr and "called sys.exit(" in done.stderr and "Traceback" not in done.stderr


def test_sys_exit_on_all_ranks_is_an_end_like_any_other(end):
    done = end("exit_0_everywhere")
    assert (done.status, done.stdout, done.stderr) == (0, "", "")
    done = end("exit_with_words_everywhere")
    assert done.status == 1 and done.stderr.count("called sys.exit('some words')") == 1, done


def test_a_keyboard_interrupt_on_one_rank_ends_all(end):
    done = end("interrupt")
    assert done.status == 130, done
    assert done.stderr.count("Traceback") == 1 and "rank 1 of 3 on " in done.stderr


def test_a_signal_to_a_rank_that_is_blocked_inside_mpi_ends_all_and_shows_where_it_was(end):
    done = end("signal_to_a_rank_inside_mpi")
    assert done.status == 130, done
    assert (
        "rank 1 of 3 on " in done.stderr
        and "interrupted (Ctrl-C) in" in done.stderr
        and "comm.Barrier()" in done.stderr
    )


def test_our_own_error_on_one_rank_ends_all_with_its_message_and_host(end):
    done = end("our_error")
    assert done.status == 2, done
    assert done.stderr.count("nobody came") == 1 and "rank 1 of 3 on " in done.stderr and "Traceback" not in done.stderr


def test_our_own_error_on_all_ranks_is_one_message_without_a_traceback_or_an_abort(end):
    done = end("our_error_everywhere")
    assert done.status == 2, done
    assert "hpczero: first line\n         second line\n" in done.stderr
    assert (
        done.stderr.count("first line") == 1 and "Traceback" not in done.stderr and "abort" not in done.stderr.lower()
    )


@pytest.mark.parametrize("name", ["finalize", "finalize_everywhere"])
def test_finalizing_mpi_too_early_is_one_clear_message_with_the_line(name, end):
    done = end(name)
    assert done.status == 2, done
    assert done.stderr.count("MPI.Finalize() was called in ") == 1
    line = next(number for number, text in enumerate(ENDS.read_text().splitlines(), 1) if "MPI.Finalize()" in text)
    assert f"{ENDS}, line {line if name == 'finalize' else line + 7}," in done.stderr


def test_a_rank_that_is_killed_takes_the_others_with_it(end):
    done = end("killed")
    assert done.status not in (0, None), done


def test_one_rank_without_mpirun_ends_in_the_same_ways():
    assert run([sys.executable, ENDS, "all_well"]).status == 0
    done = run([sys.executable, ENDS, "exception_everywhere"])
    assert done.status == 1 and done.stderr.count("Traceback") == 1, done
    done = run([sys.executable, ENDS, "our_error_everywhere"])
    assert (done.status, done.stderr) == (2, "hpczero: first line\n         second line\n")


def test_importing_hpczero_and_starting_mpi_installs_no_hook():
    program = (
        "import signal, sys, threading\n"
        "hooks = lambda: (sys.excepthook, threading.excepthook, signal.getsignal(signal.SIGINT))\n"
        "before = hooks()\n"
        "import hpczero, hpczero.topology; from mpi4py import MPI\n"
        "[getattr(hpczero, name) for name in hpczero.__all__]\n"
        "assert before == hooks()\n"
        "assert signal.set_wakeup_fd(-1) == -1 and 'hpczero.cli.abort' not in sys.modules; print('as before')"
    )
    done = run([sys.executable, "-c", program])
    assert done.stdout == "as before\n", done


# The helper that starts all of this


def test_the_launcher_ends_every_process_it_started_at_its_time_limit():
    began = time.time()
    done = mpirun(2, [sys.executable, "-c", f"import time; time.sleep({began % 1000 + 600})"], timeout=3.0)
    assert done.status is None and done.seconds < 3.0 + 15.0
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"time.sleep({began % 1000 + 600})" not in listed


def test_jobs_started_ahead_give_their_results_and_those_nobody_waits_for_are_ended():
    began = time.monotonic()
    sleeping = partial(run, [sys.executable, "-c", "import time; time.sleep(300)"], 300.0)
    with ahead({"sleeping": sleeping, "failing": lambda: 1 // 0, "right": lambda: 5, "later": sleeping}) as result:
        assert result("right") == 5
        with pytest.raises(ZeroDivisionError):
            result("failing")
    assert time.monotonic() - began < 30.0


def test_a_program_imports_this_checkout_whatever_path_the_test_asks_for():
    program = "import hpczero, sys; print(hpczero.__file__); print('/elsewhere' in sys.path)"
    done = run([sys.executable, "-c", program], env={"PYTHONPATH": "/elsewhere"}, cwd="/")
    assert done.stdout == f"{ROOT / 'hpczero' / '__init__.py'}\nTrue\n", done


def test_ctrl_c_to_mpirun_ends_all():
    process = subprocess.Popen(
        command_line(2, [sys.executable, ENDS, "work"]), env=environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        family = descendants(process.pid)
        assert len(family) >= 2
        process.send_signal(signal.SIGINT)
        assert process.wait(10.0) != 0
        end = time.monotonic() + 10.0
        while left := [pid for pid in family if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < end, f"{left} are still there"
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()
