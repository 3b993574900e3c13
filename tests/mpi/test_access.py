"""Whole parameters and optimizer states by name: the owners' bits, on all ranks, and back again."""

from __future__ import annotations

import numpy as np
import pytest
from agreement import check_everywhere
from zero_cases import SHAPES, STAGES, build, gradients_of, node_maps, same_bits, values

from hpczero.errors import ConfigError, MismatchError
from hpczero.optim import AdamW
from hpczero.topology import Topology


def steps(zero, rank, count, first=0):
    for step in range(first, first + count):
        zero.accumulate(gradients_of(zero.params, 100 * step + rank, np.float32))
        zero.step()


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_got_is_what_was_set_and_training_goes_on_from_there(comm, stage):
    suffix = ".w" if stage == 3 else ""
    for node_map in node_maps(comm.size)[:2]:
        with Topology(comm, node_map) as topology:
            one = build(stage, values(SHAPES, 0), AdamW(lr=0.1), topology, reduce_bucket_size="600 elements")
            steps(one, comm.rank, 3)
            parts = {part: one.get_full(part=part) for part in ("parameter", "exp_avg", "exp_avg_sq")}
            held = comm.allgather({part: {name: value.tobytes() for name, value in found.items()}
                                   for part, found in parts.items()})
            check_everywhere(comm, held == [held[0]] * comm.size, "ranks differ")
            whole = one.full_parameters()
            named = {name.removesuffix(suffix): value for name, value in parts["parameter"].items()}
            check_everywhere(comm, same_bits(dict(sorted(named.items())), whole), f"{topology}")

            # Another one, in other buckets, is given the same state: it goes on as the first does.
            other = build(stage, values(SHAPES, 5), AdamW(lr=0.1), topology, share_parameters=False)
            for part, found in parts.items():
                other.set_full(found, part)
            other_updater = other.engine._updater if stage == 3 else other._updater
            other_updater.step = 3
            steps(one, comm.rank, 2, 3)
            steps(other, comm.rank, 2, 3)
            check_everywhere(comm, same_bits(one.full_parameters(), other.full_parameters()), f"stage {stage} {topology}")
            one.close()
            other.close()


def test_bits_survive_signs_of_zero_nan_and_shapes(comm):
    with Topology(comm) as topology:
        zero = build(2, values(SHAPES, 0), AdamW(), topology)
        odd = np.array([-0.0, np.nan, np.inf, -np.inf, 1e-45], np.float32)
        zero.set_full({"five": odd, "scalar": np.float32(-0.0)})
        found = zero.get_full(["scalar", "five", "empty"])
        ok = found["five"].tobytes() == odd.tobytes() and found["scalar"].shape == () and np.signbit(found["scalar"])
        check_everywhere(comm, ok and found["empty"].shape == (0, 4), f"{found}")
        check_everywhere(comm, np.signbit(zero.params["scalar"]), "the view")
        zero.close()


@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_wrong_on_one_rank_is_raised_on_all(comm, stage):
    last = comm.rank == comm.size - 1
    with Topology(comm) as topology:
        zero = build(stage, values(SHAPES, 0), AdamW(), topology)
        before = zero.full_parameters()
        cases = [
            (ConfigError, "did you mean five", lambda: zero.get_full(["fife" if last else "five"])),
            (ConfigError, "did you mean exp_avg", lambda: zero.get_full(["five"], "exp_avgs" if last else "exp_avg")),
            (ConfigError, "twice", lambda: zero.get_full(["five", "five"] if last else ["five"])),
            (ConfigError, "a list of names", lambda: zero.get_full("five" if last else ["five"])),
            (ConfigError, "numbers are needed", lambda: zero.set_full({"five": np.zeros(6 if last else 5)})),
            (ConfigError, "a dict", lambda: zero.set_full(None if last else {"five": np.zeros(5)})),
        ]
        if comm.size > 1:
            cases.append((MismatchError, "digest", lambda: zero.set_full({"five": np.full(5, float(last))})))
        for kind, said, call in cases:
            with pytest.raises(kind, match=said):
                call()
        check_everywhere(comm, same_bits(before, zero.full_parameters()), "something was written")
        zero.close()
