"""What the ranks of an MPI run wrote down becomes one verdict per test."""

from __future__ import annotations

import json

import pytest
from rank_report import Verdict, left_out, verdicts


def start(test):
    return {"what": "start", "test": test}


def end(test, outcome, **rest):
    return {"what": "end", "test": test, "outcome": outcome, **rest}


def failed(test, cause, text):
    return {"what": "failed", "test": test, "cause": cause, "text": text}


def passed(test):
    return [start(test), end(test, "passed")]


@pytest.fixture
def told(tmp_path):
    """Writes the lines of each rank, and reads them together."""

    def write(*ranks):
        for rank, lines in enumerate(ranks):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (tmp_path / f"rank-{rank}.jsonl").write_text(text)
        return verdicts(tmp_path, len(ranks))

    return write


def test_what_passed_on_every_rank_passed(told):
    both = passed("a") + passed("b")
    assert told(both, both) == [Verdict("a", "passed"), Verdict("b", "passed")]


def test_what_every_rank_skipped_was_skipped_with_the_reason(told):
    skipped = [start("a"), end("a", "skipped", text="no GPU")]
    assert told(skipped, skipped) == [Verdict("a", "skipped", "no GPU")]


def test_what_one_rank_skipped_and_another_ran_is_a_failure(told):
    (verdict,) = told([start("a"), end("a", "skipped", text="no GPU")], passed("a"))
    assert verdict.outcome == "failed" and "ranks disagree" in verdict.text


def test_ranks_that_failed_for_the_same_cause_are_shown_once(told):
    same = [start("a"), failed("a", "assert 1 == 2", "line 7: assert 1 == 2"), end("a", "failed")]
    other = [start("a"), failed("a", "KeyError: 5", "line 9: KeyError: 5"), end("a", "failed")]
    (verdict,) = told(same, other, same, passed("a"))
    assert verdict.text == "ranks 0, 2 of 4: line 7: assert 1 == 2\nrank 1 of 4: line 9: KeyError: 5"


def test_a_rank_that_did_not_end_a_test_is_named_with_its_stacks(told, tmp_path):
    (tmp_path / "rank-1.stacks").write_text("in wait_for_ever")
    (verdict,) = told(passed("a"), [start("a")])
    assert verdict.outcome == "failed"
    assert verdict.text == "rank 1 of 2: did not come to the end of this test.\nin wait_for_ever"


def test_a_rank_that_wrote_nothing_never_began(told, tmp_path):
    (verdict,) = told(passed("a"), [])
    assert verdict.text.startswith("rank 1 of 2: never began this test")


def test_a_rank_killed_in_the_middle_of_a_line_is_read_up_to_there(told, tmp_path):
    told(passed("a"), passed("a"))
    with open(tmp_path / "rank-1.jsonl", "a") as lines:
        lines.write('{"what": "start", "te')
    assert verdicts(tmp_path, 2) == [Verdict("a", "passed")]


def test_a_file_that_cannot_be_imported_is_a_failure(told):
    broken = {"what": "broken", "test": "tests/mpi/test_x.py", "cause": "cannot be collected", "text": "SyntaxError"}
    (verdict,) = told([broken], [broken])
    assert verdict == Verdict("tests/mpi/test_x.py", "failed", "ranks 0, 1 of 2: SyntaxError")


def test_collected_tests_that_a_rank_did_not_begin_are_counted(told, tmp_path):
    collected = {"what": "collected", "test": "", "count": 3}
    told([collected, *passed("a"), *passed("b")], [collected, *passed("a")])
    assert left_out(tmp_path, 2) == 2
