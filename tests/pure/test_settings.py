"""Settings: what is taken, what is refused and in which words, and which of four places wins."""

from __future__ import annotations

import json
import pickle
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from hpczero.errors import ConfigError
from hpczero.settings import Settings, Size, closest, number, resolve


class Bench(Settings):
    lr: Annotated[float, Field(gt=0)] = 1e-3
    steps: Annotated[int, Field(ge=1)] = 10
    stage: Literal[0, 1, 2] = 2
    share: Literal["auto", True, False] = "auto"
    bucket: Size = "25MiB"
    verbose: bool = False
    fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    name: str | None = None
    limit: Annotated[int, Field(ge=1)] | None = None


def refused(**values) -> str:
    with pytest.raises(ConfigError) as caught:
        Bench(**values)
    return str(caught.value)


def read(key: str, text: str):
    """What `text` becomes, having checked that file, environment and command line agree on it."""
    by_flag = getattr(resolve(Bench, "bench", flags={key: text}).settings, key)
    by_variable = getattr(resolve(Bench, "bench", environ={f"HPCZERO_BENCH_{key.upper()}": text}).settings, key)
    assert by_flag == by_variable and type(by_flag) is type(by_variable)
    return by_flag


def in_file(tmp_path, text: str) -> Bench:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return resolve(Bench, "bench", file=path).settings


# Sizes


@pytest.mark.parametrize(
    ("text", "count", "unit"),
    [
        ("25MiB", 25 * 2**20, "bytes"),
        ("64KB", 64_000, "bytes"),
        ("64 KiB", 65_536, "bytes"),
        ("1.5KiB", 1536, "bytes"),
        ("7B", 7, "bytes"),
        ("4096", 4096, "bytes"),
        ("1_000", 1000, "bytes"),
        ("1e6", 1_000_000, "bytes"),
        ("2TiB", 2 * 2**40, "bytes"),
        (4096, 4096, "bytes"),
        ("4M elements", 4_000_000, "elements"),
        ("4Ki elements", 4096, "elements"),
        ("1 element", 1, "elements"),
        ("500 elements", 500, "elements"),
    ],
)
def test_a_size_is_a_number_of_bytes_or_of_elements(text, count, unit):
    assert Size.parse(text) == Size(count, unit)


@pytest.mark.parametrize(
    "value",
    ["", "MiB", "-1MiB", "0", 0, -3, 1.5, True, None, "25mib", "25 M", "4M", "1.5B", "4MB elements", "nan", "1 2"],
)
def test_what_is_no_size_is_refused_with_examples(value):
    assert 'allowed is a size above 0, such as "25MiB"' in refused(bucket=value)


def test_a_size_in_elements_takes_as_many_bytes_as_the_elements_do():
    assert Size.parse("4M elements").bytes(itemsize=2) == 8_000_000
    assert Size.parse("25MiB").bytes(itemsize=2) == 25 * 2**20
    assert Size.parse("10B").elements(itemsize=4) == 2
    assert Size.parse("1B").elements(itemsize=4) == 1


def test_a_size_shows_what_the_user_wrote():
    assert str(Bench(bucket="4M elements").bucket) == "4M elements"
    assert str(Bench().bucket) == "25MiB"


# Values handed over in Python


def test_settings_cannot_be_changed():
    with pytest.raises(Exception, match="frozen"):
        Bench().lr = 2.0


@pytest.mark.parametrize(
    "values", [{"lr": "1e-3"}, {"steps": 10.0}, {"steps": True}, {"stage": True}, {"share": 1}, {"verbose": 1}]
)
def test_python_values_of_another_type_are_not_converted(values):
    (key,) = values
    assert refused(**values).startswith(f"{key} = ")


def test_a_refusal_names_the_key_the_value_and_what_is_allowed():
    assert refused(lr=-1.0) == "lr = -1.0: allowed is a number above 0"
    assert refused(steps=0) == "steps = 0: allowed is a whole number of at least 1"
    assert refused(stage=7) == "stage = 7: allowed is one of 0, 1, 2"
    assert refused(share="atuo") == "share = 'atuo': allowed is one of auto, true, false; did you mean auto?"
    assert refused(fraction=1.0) == "fraction = 1.0: allowed is a number of at least 0 and below 1"
    assert refused(limit=0) == "limit = 0: allowed is a whole number of at least 1"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_must_be_finite(value):
    assert "allowed is a number above 0" in refused(lr=value)


def test_an_unknown_key_is_refused_with_the_nearest_one():
    assert refused(stpes=3) == "stpes = 3: no such setting; did you mean steps?"
    assert refused(learning_rate=3) == "learning_rate = 3: no such setting; did you mean lr?"
    assert "settings are lr, steps, stage" in refused(zzzzzz=3)


def test_every_problem_is_told_at_once():
    assert len(refused(lr=0.0, stage=9, nonsense=1).splitlines()) == 3


def test_names_are_close_by_spelling_or_by_initials():
    names = ["lr", "batch", "sequence_length"]
    assert closest("batch_size", names) == "batch"
    assert closest("seq-length", names) == "sequence_length"
    assert closest("learning-rate", names) == "lr"
    assert closest("xyz", names) is None


# One rule for numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("0.001", 1e-3), (".001", 1e-3), ("1_000", 1000.0), (" 2 ", 2.0), ("+3", 3.0), ("0x10", 16.0)],
)
def test_text_is_the_same_number_from_file_environment_and_command_line(text, value, tmp_path):
    assert read("lr", text) == value
    assert in_file(tmp_path, f'lr = "{text}"').lr == value


@pytest.mark.parametrize(
    ("text", "value"), [("1000", 1000), ("1_000", 1000), ("1e3", 1000), ("1000.0", 1000), ("0x3e8", 1000)]
)
def test_a_whole_number_may_be_written_as_any_number_is(text, value, tmp_path):
    assert read("steps", text) == value and isinstance(read("steps", text), int)
    assert in_file(tmp_path, f"steps = {text}").steps == value
    assert in_file(tmp_path, f'steps = "{text}"').steps == value


@pytest.mark.parametrize("text", ["1.5", "1e-3", "nan", "inf", "ten", "", "true", "1,000", "0b2"])
def test_what_is_no_whole_number_is_refused_as_text_too(text):
    with pytest.raises(ConfigError, match="allowed is a whole number of at least 1"):
        read("steps", text)


@given(st.integers(-(10**30), 10**30))
def test_whole_numbers_of_any_size_stay_exact(value):
    assert number(str(value)) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_survive_being_printed_and_read(value):
    assert number(repr(value)) == value


def test_words_and_choices_are_read_from_text(tmp_path):
    assert read("stage", "1") == 1
    assert read("share", "true") is True
    assert read("share", "False") is False
    assert read("share", "auto") == "auto"
    assert read("verbose", "true") is True
    assert read("name", "2024") == "2024"
    assert read("limit", "1_0") == 10
    assert in_file(tmp_path, "share = true").share is True
    with pytest.raises(ConfigError, match="one of auto, true, false"):
        read("share", "1")
    with pytest.raises(ConfigError, match="one of 0, 1, 2"):
        in_file(tmp_path, "stage = true")


def test_a_truth_value_in_a_file_is_no_number(tmp_path):
    with pytest.raises(ConfigError, match="whole number"):
        in_file(tmp_path, "steps = true")


# Four places


def test_later_places_win_and_each_value_knows_its_place(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[bench]\nlr = 1.0\n\nsteps = 20\nstage = 1\n")
    found = resolve(
        Bench,
        "bench",
        file=path,
        environ={"HPCZERO_BENCH_STEPS": "30", "HPCZERO_BENCH_STAGE": "0", "HPCZERO_NODE_MAP": "0,0"},
        flags={"stage": "2"},
    )
    assert (found.settings.lr, found.settings.steps, found.settings.stage, found.settings.name) == (1.0, 30, 2, None)
    report = found.report()
    assert report["lr"] == {"value": 1.0, "origin": "file", "place": f"{path}, line 2"}
    assert report["steps"] == {"value": 30, "origin": "environment", "place": "variable HPCZERO_BENCH_STEPS"}
    assert report["stage"] == {"value": 2, "origin": "command line", "place": "flag --stage"}
    assert report["bucket"] == {"value": "25MiB", "origin": "default"}
    assert json.loads(json.dumps(report)) == report
    assert list(report) == list(Bench.model_fields)


def test_a_refusal_names_the_line_the_variable_or_the_flag(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("# a comment\n\nsteps = 0\n")
    with pytest.raises(ConfigError) as caught:
        resolve(Bench, "bench", file=path, environ={"HPCZERO_BENCH_SATGE": "1"}, flags={"lr": "fast"})
    assert sorted(str(caught.value).splitlines()) == [
        "lr = 'fast' (from flag --lr): allowed is a number above 0",
        "satge = '1': no such setting (from variable HPCZERO_BENCH_SATGE); did you mean stage?",
        f"steps = 0 (from {path}, line 3): allowed is a whole number of at least 1",
    ]


def test_one_file_can_serve_several_commands(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("lr = 0.5\n[bench]\nsteps = 3\n[train]\nnonsense = 1\n")
    settings = resolve(Bench, "bench", file=path, commands=("bench", "train")).settings
    assert (settings.lr, settings.steps) == (0.5, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = \nsteps = 1", "not valid TOML: Invalid value (at line 1, column 6)"),
        ("[bnech]\nlr = 1.0", "line 1: [bnech] is not a command; did you mean bench?"),
        ("lr = 1.0\n[bench]\nlr = 2.0", "line 3: lr is given twice, also at"),
        ("bench = 3", "[bench] must be a table, not 3"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_line(text, message, tmp_path):
    with pytest.raises(ConfigError) as caught:
        in_file(tmp_path, text)
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        resolve(Bench, "bench", file=tmp_path / "nowhere.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(ConfigError, match="not UTF-8"):
        resolve(Bench, "bench", file=tmp_path / "latin.toml")


def test_settings_and_their_errors_can_be_sent_to_other_ranks():
    found = resolve(Bench, "bench", flags={"steps": "3", "bucket": "4M elements"})
    assert pickle.loads(pickle.dumps(found)) == found
    error = pickle.loads(pickle.dumps(ConfigError("words")))
    assert isinstance(error, ConfigError) and str(error) == "words"


def test_a_variable_that_nobody_reads_is_refused_with_the_nearest_that_is():
    from hpczero.settings import refuse_unknown_variables

    known, commands = ("HPCZERO_NODE_MAP",), ("train", "doctor")
    refuse_unknown_variables({"HPCZERO_NODE_MAP": "0", "HPCZERO_TRAIN_LR": "1", "HOME": "/"}, known, commands)
    for wrong, meant in [("HPCZERO_TRIAN_LR", "HPCZERO_TRAIN_LR"), ("HPCZERO_NODEMAP", "HPCZERO_NODE_MAP")]:
        with pytest.raises(ConfigError, match=f"{wrong}: .* did you mean {meant}"):
            refuse_unknown_variables({wrong: "1"}, known, commands)
    with pytest.raises(ConfigError, match="HPCZERO_LR"):
        refuse_unknown_variables({"HPCZERO_LR": "1"}, known, commands)
