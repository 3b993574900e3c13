"""The command line on one rank, as a user starts it: `python -m hpczero …` in a process of its own, without mpirun."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from launcher import ROOT, Result, ahead, run

import hpczero
from hpczero.cli import COMMANDS, launch, parse
from hpczero.cli.train_settings import TrainSettings
from hpczero.errors import ConfigError

HEAVY = ("mpi4py", "numpy", "numba", "pydantic", "rich", "cupy", "matplotlib")
SMALL = ("--steps", "3", "--width", "16", "--depth", "1", "--heads", "2", "--sequence-length", "16", "--batch", "4")


def command(*arguments: str, cwd: Path, timeout: float = 60.0, **env: str | None) -> Result:
    return run([sys.executable, "-m", "hpczero", *arguments], timeout, {"OPENBLAS_NUM_THREADS": "1", **env}, cwd)


def refused(*arguments: str, cwd: Path, **env: str | None) -> str:
    """The message of a command that is refused, having checked that nothing else happened."""
    before = set(cwd.iterdir())
    done = command(*arguments, cwd=cwd, **env)
    assert done.status == 2, done
    assert "Traceback" not in done.stderr and not done.stdout
    assert set(cwd.iterdir()) == before, "a refused command has left something behind"
    return done.stderr


def processor_seconds(start: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


# Help and version


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("train", "--help"), ("doctor", "--help")])
def test_help_and_version_load_nothing_heavy_and_answer_in_half_a_second(arguments, tmp_path):
    traced = run([sys.executable, "-X", "importtime", "-m", "hpczero", *arguments], cwd=tmp_path)
    assert traced.status == 0, traced
    loaded = re.findall(r"\| +([\w.]+)$", traced.stderr, re.MULTILINE)
    assert "hpczero.cli" in loaded
    assert [name for name in loaded if name.split(".")[0] in HEAVY] == []
    # Processor time, since others may have the machine; compiled files are kept, as they are for every user.
    kept = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled")}
    assert min(processor_seconds(lambda: command(*arguments, cwd=tmp_path, **kept)) for _ in range(4)) < 0.5


def test_the_version_is_the_one_in_the_package(tmp_path):
    assert command("--version", cwd=tmp_path).stdout == f"hpczero {hpczero.__version__}\n"


def test_help_shows_every_setting_of_train_with_its_real_default(tmp_path):
    shown = " ".join(command("--help", cwd=tmp_path, COLUMNS="1000").stdout.split())
    for key, field in TrainSettings.model_fields.items():
        flag = f"--{key.replace('_', '-')} "
        assert flag in shown
        text = shown[shown.index(flag) :].partition(" --")[0]
        assert len(text) > len(flag) + 20, f"{flag} is not explained"
        if field.default is not None:
            assert f"(default: {field.default})" in text


def test_under_a_launcher_only_the_first_rank_prints_help(tmp_path):
    others = command("--help", cwd=tmp_path, PMI_RANK="1", PMI_SIZE="2")
    assert (others.status, others.stdout) == (0, "")


def test_importing_hpczero_loads_nothing_heavy_and_knows_all_its_names(tmp_path):
    program = (
        f"import sys, hpczero; print([m for m in sys.modules if m.split('.')[0] in {HEAVY}]); "
        "print(sorted(set(hpczero.__all__) - set(dir(hpczero)))); "
        "[getattr(hpczero, name) for name in hpczero.__all__]; print(hpczero.ConfigError.__module__)"
    )
    done = run([sys.executable, "-c", program], cwd=tmp_path)
    assert done.stdout.splitlines() == ["[]", "[]", "hpczero.errors"], done


def test_type_checkers_see_the_same_public_names():
    tree = ast.parse((ROOT / "hpczero" / "__init__.py").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported | {"__version__"} == set(hpczero.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        hpczero.nonsense  # noqa: B018


# Arguments


def test_without_a_command_it_trains():
    assert parse([]).command == "train"
    assert parse(["--steps", "3"]).command == "train"
    assert parse(["doctor"]).command == "doctor"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "'trian' is no command; did you mean train?"),
        (["--learning-rate", "1"], "--learning-rate: no such flag of train; did you mean --lr?"),
        (["--btach=3"], "--btach: no such flag of train; did you mean --batch?"),
        (["--ste", "3"], "--ste: no such flag of train; did you mean --steps?"),
        (["--lr"], "--lr: expected one argument"),
        (["train", "more"], "'more': train takes flags only"),
        (["doctor", "--lr", "1"], "--lr: no such flag of doctor"),
    ],
)
def test_arguments_that_are_not_understood_are_refused_with_the_nearest(arguments, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse(arguments)


def test_json_alone_means_standard_output():
    assert parse(["--json"]).json == "-"
    assert parse(["--json", "--steps", "3"]).json == "-"
    assert parse(["--json", "a.json"]).json == "a.json"
    assert parse([]).json is None


# Bad input: one clear message, status 2, nothing left behind


def test_bad_values_from_all_places_are_one_message(tmp_path):
    (tmp_path / "c.toml").write_text("[train]\nstage = 4\n")
    said = refused("--config", "c.toml", "--lr", "fast", cwd=tmp_path, HPCZERO_TRAIN_BATCH="0")
    assert "stage = 4 (from c.toml, line 2): allowed is one of 0, 1, 2, 3" in said
    assert (
        "batch = '0' (from variable HPCZERO_TRAIN_BATCH)" in said
        or "batch = 0 (from variable HPCZERO_TRAIN_BATCH)" in said
    )
    assert "lr = 'fast' (from flag --lr): allowed is a number above 0" in said


REFUSED = {
    ("--data", "nowhere.txt"): "nowhere.txt: no such file",
    ("--data", "empty.txt"): "empty.txt: is empty",
    ("--data", "short.txt"): "short.txt: is too short",
    ("--data", "table.csv"): "model = transformer: needs text, and table.csv is a table; take --model mlp",
    ("--model", "mlp"): "model = mlp: needs a table",
    ("--model", "transfomer"): "did you mean transformer?",
    ("--model", "no.such:build"): "there is no module no;",
    ("--model", "mine:nothing"): "mine.py has no nothing",
    ("--model", "mine:buidl"): "mine.py has no buidl; did you mean build?",
    ("--model", "mine:number"): "mine.py number is no function",
    ("--model", "mine:build"): "build returned dict; it must return a hpczero.Model(layers, loss)",
    ("--heads", "3"): "3 heads do not divide the width",
    ("--momentum", "0.9"): "momentum goes with optimizer = sgd",
    ("--name", "../up"): "name = '../up'",
    ("--out", "empty.txt"): "empty.txt is a file; name a folder",
    ("--out", "empty.txt/below"): "empty.txt is a file; name a folder",
    ("--json", "nowhere/x.json"): "cannot be written there",
    ("--config", "nowhere.toml"): "nowhere.toml: cannot be read",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the command with those arguments said when it was refused."""

    def job(arguments, folder):
        (folder / "empty.txt").touch()
        (folder / "short.txt").write_text("a few words")
        (folder / "table.csv").write_text("a,b\n" + "1.5,2.5\n" * 40)
        (folder / "mine.py").write_text("number = 3\ndef build(dataset, settings):\n    return {}\n")
        return refused(*SMALL, *arguments, cwd=folder, PYTHONDONTWRITEBYTECODE="1")

    with ahead({each: partial(job, each, tmp_path_factory.mktemp("refused")) for each in REFUSED}) as said:
        yield said


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_cannot_be_done_is_one_message_and_nothing_is_left_behind(arguments, said):
    assert REFUSED[arguments] in said(arguments)
    assert len(re.findall("^hpczero: ", said(arguments), re.MULTILINE)) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert "no permission to write in" in refused(*SMALL, "--out", "closed/runs", cwd=tmp_path)


def test_an_error_inside_the_users_model_keeps_its_traceback(tmp_path):
    (tmp_path / "mine.py").write_text("import nowhere\n")
    done = command(*SMALL, "--model", "mine:build", cwd=tmp_path)
    assert done.status == 1
    assert done.stderr.count("Traceback") == 1 and "No module named 'nowhere'" in done.stderr


def test_a_run_of_the_same_name_is_not_overwritten(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    said = refused(*SMALL, "--name", "a", cwd=tmp_path)
    assert "runs/a is there already; take another name" in said
    assert list((tmp_path / "runs" / "a").iterdir()) == []


def test_without_an_mpi_library_it_says_how_to_get_one(tmp_path):
    done = command(cwd=tmp_path, MPI4PY_LIBMPI=str(tmp_path / "libmpi.so"))
    assert done.status == 2, done
    assert "no MPI library can be loaded" in done.stderr and "pip install 'hpczero[mpich]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_processes_that_do_not_know_of_each_other_are_refused(tmp_path):
    # What the ranks of another MPI library's launcher look like: many by its variables, each alone in its world.
    said = refused(*SMALL, cwd=tmp_path, SLURM_STEP_ID="0", SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="4")
    assert "srun started 4 processes" in said and "each process would train alone" in said and "srun --mpi=pmix" in said


# What a run leaves


def test_a_run_leaves_its_metrics_its_settings_and_one_json_line(tmp_path):
    (tmp_path / "c.toml").write_text("[train]\nseed = 3\n")
    done = command(*SMALL, "--config", "c.toml", "--name", "a", "--json", cwd=tmp_path, HPCZERO_TRAIN_LR="1e-2")
    assert done.status == 0, done
    result = json.loads(done.stdout.splitlines()[-1])
    assert {"world_size", "stage", "device", "steps", "train_loss", "val_loss", "bits_per_byte", "bigram_bits_per_byte",
            "trigram_bits_per_byte", "tokens_per_s", "param_sha256", "bytes_per_rank", "formula_bytes_per_rank",
            "activation_bytes", "losses"} <= set(result)  # fmt: skip
    assert (result["world_size"], result["stage"], result["steps"], len(result["losses"])) == (1, 2, 3, 3)
    lines = [json.loads(line) for line in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == result["losses"]
    settings = json.loads((tmp_path / "runs/a/settings.json").read_text())
    assert settings["seed"] == {"value": 3, "origin": "file", "place": "c.toml, line 2"}
    assert settings["lr"] == {"value": 0.01, "origin": "environment", "place": "variable HPCZERO_TRAIN_LR"}
    assert settings["steps"]["origin"] == "command line"
    assert settings["dtype"] == {"value": "float32", "origin": "default"}
    assert set(settings) == set(TrainSettings.model_fields)
    picture = tmp_path / "runs/a/loss.png"
    assert picture.exists() and picture.read_bytes()[:4] == b"\x89PNG" or "pip install 'hpczero[plot]'" in done.stdout
    assert "step 3/3" in done.stderr and "MiB/rank" in done.stderr


def test_json_goes_into_a_file_when_one_is_named(tmp_path):
    done = command(*SMALL, "--json", "result.json", cwd=tmp_path)
    assert done.status == 0, done
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 3
    assert "{" not in done.stdout


def test_a_users_own_model_trains(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from hpczero import models\n"
        "def build(dataset, settings):\n"
        "    sizes = dict(num_inputs=dataset.num_inputs, num_outputs=dataset.num_outputs, width=settings.width)\n"
        "    return models.mlp.build(task=dataset.task, depth=1, **sizes)\n"
    )
    rows = "\n".join(f"{i},{i * i % 7},{2.0 * i + 1.0}" for i in range(50))
    (tmp_path / "table.csv").write_text(f"a,b,c\n{rows}\n")
    done = command(*SMALL, "--model", "mine:build", "--data", "table.csv", "--json", cwd=tmp_path)
    assert done.status == 0, done
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["bits_per_byte"] is None and result["mean_mse"] > 0
    assert len(result["param_sha256"]) == 64


@pytest.mark.parametrize("variable", ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_cache_folder_that_cannot_be_made_is_replaced_by_one_that_can(variable, tmp_path):
    (tmp_path / "file").touch()
    done = command(*SMALL, cwd=tmp_path, **{"NUMBA_CACHE_DIR": None, variable: str(tmp_path / "file" / "cache")})
    assert done.status == 0, done
    assert done.stderr.count("cannot be written; compiled kernels go to") == 1


# What the launcher's variables mean


@pytest.mark.parametrize(
    ("variables", "name", "rank", "size", "several_nodes"),
    [
        ({}, "none", None, None, False),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, "mpirun (MPICH or Intel MPI)", 1, 4, False),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, "mpirun (MPICH or Intel MPI)", 1, 4, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
          "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "8"}, "mpirun (Open MPI)", 0, 2, False),
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "8",
          "SLURM_STEP_NUM_NODES": "2", "SLURM_JOB_NUM_NODES": "2"}, "srun", 3, 4, True),
        # salloc's shell, sbatch's script and Slurm's interactive step: python is started by nobody's launcher
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "2"}, "none", None, None, True),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "none", None, None, False),
        ({"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "none", None, None, False),
    ],
)  # fmt: skip
def test_the_launcher_is_known_by_its_variables(variables, name, rank, size, several_nodes):
    assert launch.read(variables) == launch.Launch(name, rank, size, several_nodes)


def test_open_mpi_gets_defaults_that_the_user_can_override():
    alone, several, users = {}, {}, {"OMPI_MCA_osc": "rdma", "OMPI_MCA_btl": "tcp,self"}
    launch.before_mpi(alone, launch.Launch("none"))
    launch.before_mpi(several, launch.Launch("srun", 0, 4, several_nodes=True))
    launch.before_mpi(users, launch.Launch("none"))
    assert alone == {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl": "^ofi"}
    assert several == {"OMPI_MCA_osc": "^ucx"}
    assert users == {"OMPI_MCA_osc": "rdma", "OMPI_MCA_btl": "tcp,self"}


# doctor


def test_doctor_shows_what_it_finds(tmp_path):
    done = command("doctor", cwd=tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert done.status == 0, done
    for word in ("MPI ", "thread level", "launcher ", "ranks ", "cores ", "threads ", "device ", "kernel cache"):
        assert re.search(f"^{word}", done.stdout, re.MULTILINE), word
    assert f"{tmp_path / 'cache'}: writable, 0 entries" in done.stdout


def test_doctor_speaks_json_too(tmp_path):
    facts = json.loads(command("doctor", "--json", cwd=tmp_path, OMP_NUM_THREADS="7", OPENBLAS_NUM_THREADS=None).stdout)
    assert facts["world_size"] == 1 and facts["ranks_per_node"] == [1] and facts["launcher"] == "none"
    # The user has set one of the variables, so all are left alone.
    assert facts["ranks"][0]["threads"] == {
        "OPENBLAS_NUM_THREADS": None,
        "OMP_NUM_THREADS": "7",
        "NUMBA_NUM_THREADS": None,
    }
    assert facts["ranks"][0]["cores"] == len(os.sched_getaffinity(0))
    assert facts["thread_level"]["provided"] in ("single", "funneled", "serialized", "multiple")


def test_every_command_is_described():
    assert all((ROOT / "hpczero" / "cli" / f"{name}.py").exists() and text for name, text in COMMANDS.items())
