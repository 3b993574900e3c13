"""Every collective by every algorithm against MPI's own, on numbers whose sums are exact."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from agreement import check_everywhere

from hpczero.collectives import selection
from hpczero.collectives.api import all_gather, all_reduce, broadcast, reduce, reduce_scatter, shard_slice
from hpczero.collectives.order import balanced, canonical
from hpczero.collectives.transport import Transport
from hpczero.errors import ConfigError, MismatchError
from hpczero.topology import Topology

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64, np.uint8]
UFUNCS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


def node_maps(size):
    maps = {tuple([0] * size), tuple(rank % 2 for rank in range(size))}
    if size < 5:
        maps |= {tuple(range(size)), (0, *[1] * (size - 1))}
    if size == 5:
        maps.add((0, 0, 1, 1, 2))
    return sorted(maps)


class Findings:
    """What went wrong on this rank, told to all ranks once at the end: agreeing after every call takes longer than it."""

    def __init__(self, comm):
        self.comm, self.wrong = comm, []

    def check(self, ok, message):
        if not ok:
            self.wrong.append(str(message))

    def agree(self):
        check_everywhere(self.comm, not self.wrong, "; ".join(self.wrong[:5]))


@pytest.fixture
def findings(comm):
    gathered = Findings(comm)
    yield gathered
    gathered.agree()


@pytest.fixture
def topologies(comm):
    made = [Topology(comm, node_map) for node_map in node_maps(comm.size)]
    yield made
    for topology in made:
        topology.close()


def counts(size):
    return sorted({0, 1, size - 1, size, size + 1, 1000, 65539})


def algorithms(operation, topology):
    for name in selection.ALGORITHMS[operation]:
        facts = selection.Call(operation, 0, topology.map, "any")
        if selection.why_not(facts, name) is None:
            yield name
    yield "adaptive"


def whole_numbers(rank, count, dtype):
    """Small whole numbers, different on every rank: sums are exact in every dtype up to 8 ranks."""
    return ((np.arange(count) * 7 + rank * 3) % 11).astype(dtype)


def everyones(comm, count, dtype):
    return np.stack([whole_numbers(rank, count, np.float64) for rank in range(comm.size)])


@pytest.mark.eight_ranks
@pytest.mark.time_limit(120)
def test_all_reduce_by_every_algorithm_is_the_sum_of_mpi(comm, topologies, findings):
    for topology, count in itertools.product(topologies, counts(comm.size)):
        mine = whole_numbers(comm.rank, count, np.float64)
        expected = np.empty_like(mine)
        comm.Allreduce(mine, expected)
        for name in algorithms("all_reduce", topology):
            array = mine.copy()
            returned = all_reduce(array, topology, algorithm=name)
            findings.check(returned is array and np.array_equal(array, expected), f"{name} {topology} {count}")
            out = np.full_like(mine, -1)
            all_reduce(mine, topology, algorithm=name, out=out)
            findings.check(np.array_equal(out, expected) and np.array_equal(
                mine, whole_numbers(comm.rank, count, np.float64)), f"{name} {topology} {count} out of place")


@pytest.mark.eight_ranks
@pytest.mark.time_limit(120)
def test_reduce_scatter_by_every_algorithm_leaves_the_shard_of_the_sum(comm, topologies, findings):
    for topology, count in itertools.product(topologies, counts(comm.size)):
        mine = whole_numbers(comm.rank, count, np.float32)
        shard = shard_slice(count, comm.rank, comm.size)
        expected = everyones(comm, count, np.float32).sum(0)[shard]
        for name in algorithms("reduce_scatter", topology):
            array = mine.copy()
            view = reduce_scatter(array, topology, algorithm=name)
            findings.check(np.array_equal(view, expected), f"{name} {topology} {count}")
            findings.check(view.size == 0 or np.shares_memory(view, array), "the shard is a view")
            out = np.empty_like(expected, dtype=np.float32)
            reduce_scatter(mine, topology, algorithm=name, out=out)
            findings.check(np.array_equal(out, expected), f"{name} {topology} {count} out of place")


@pytest.mark.eight_ranks
@pytest.mark.time_limit(120)
def test_all_gather_by_every_algorithm_puts_the_shards_together(comm, topologies, findings):
    for topology, count in itertools.product(topologies, counts(comm.size)):
        expected = whole_numbers(5, count, np.int32)
        shard = shard_slice(count, comm.rank, comm.size)
        for name in algorithms("all_gather", topology):
            array = np.full(count, -1, np.int32)
            array[shard] = expected[shard]
            all_gather(array, topology, algorithm=name)
            findings.check(np.array_equal(array, expected), f"{name} {topology} {count}")
            out = np.full(count, -1, np.int32)
            all_gather(expected[shard].copy(), topology, algorithm=name, out=out)
            findings.check(np.array_equal(out, expected), f"{name} {topology} {count} out of place")


@pytest.mark.eight_ranks
@pytest.mark.time_limit(120)
def test_broadcast_and_reduce_work_from_and_to_every_root(comm, topologies, findings):
    for topology, root in itertools.product(topologies, range(comm.size)):
        for count, name in itertools.product((0, 1, 1001, 70001), algorithms("broadcast", topology)):
            array = whole_numbers(comm.rank, count, np.float32)
            broadcast(array, topology, root=root, algorithm=name)
            findings.check(np.array_equal(array, whole_numbers(root, count, np.float32)), f"{name} {root}")
        for count, name in itertools.product((0, 1, 1001, 70001), algorithms("reduce", topology)):
            array = whole_numbers(comm.rank, count, np.float32)
            result = reduce(array, topology, root=root, algorithm=name)
            at_root = comm.rank == root
            total = everyones(comm, count, np.float32).sum(0)
            expected = total if at_root else whole_numbers(comm.rank, count, np.float32)
            findings.check(np.array_equal(array, expected) and (result is array) == at_root, f"{name} {root}")


@pytest.mark.time_limit(240)      # compiles every kernel for every dtype when the cache is cold
def test_every_dtype_and_operation_by_every_algorithm(comm, topologies, findings):
    topology = topologies[-1]
    for dtype, op, count in itertools.product(DTYPES, ("sum", "mean", "prod", "min", "max"), (3, 1001)):
        integer = np.dtype(dtype).kind in "iu"
        if op == "mean" and integer:
            continue
        rows = everyones(comm, count, dtype)
        rows = np.where(rows % 2 == 0, 1.0, 2.0) if op == "prod" else rows
        mine = rows[comm.rank].astype(dtype)
        expected = rows.mean(0) if op == "mean" else UFUNCS[op].reduce(rows, axis=0)
        for name in algorithms("all_reduce", topology):
            if name == "system" and np.dtype(dtype) in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
                continue
            array = mine.copy()
            all_reduce(array, topology, op=op, algorithm=name)
            findings.check(np.array_equal(array.astype(np.float64), expected.astype(dtype).astype(np.float64)),
                             f"{name} {op} {np.dtype(dtype)} {count}: {array[:3]} for {expected[:3]}")


def test_ten_thousand_half_ones_sum_to_the_number_of_ranks(comm, topologies, findings):
    for topology, dtype in itertools.product(topologies, (np.float16, ml_dtypes.bfloat16)):
        array = np.ones(10_000, dtype)
        all_reduce(array, topology)
        findings.check(bool((array.astype(np.float32) == comm.size).all()), f"{np.dtype(dtype)}")


def test_half_sums_are_rounded_once_and_overflow_to_infinity(comm, topologies, findings):
    for topology in topologies:
        values = np.float32(2048) if comm.rank == 0 else np.float32(1)      # 2048 + 1 is no float16
        array = np.full(7, values, np.float16)
        all_reduce(array, topology, order="canonical")
        expected = np.float16(np.float32(2048) + np.float32(comm.size - 1))
        findings.check(bool((array == expected).all()), f"{array[0]} for {expected}")
        large = np.full(3, 60000, np.float16)
        all_reduce(large, topology)
        findings.check(bool((large == (60000 if comm.size == 1 else np.inf)).all()), f"{large}")


def in_order(tree, rows):
    return rows[tree] if isinstance(tree, int) else in_order(tree[0], rows) + in_order(tree[1], rows)


def test_canonical_and_world_order_are_the_trees_they_claim_whatever_the_algorithm_and_the_cut(comm, topologies, findings):
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((comm.size, 1003)).astype(np.float32) * 10.0 ** rng.integers(-3, 4, (comm.size, 1003))
    rows = rows.astype(np.float32)
    for topology, order in itertools.product(topologies, ("canonical", "world")):
        nodes = topology.map.nodes if order == "canonical" else [range(comm.size)]
        expected = in_order(canonical(nodes), rows)
        assert order == "canonical" or canonical(nodes) == balanced(range(comm.size))
        for name in selection.ALGORITHMS["all_reduce"]:
            facts = selection.Call("all_reduce", 0, topology.map, order)
            if selection.why_not(facts, name) is not None:
                continue
            whole = rows[comm.rank].copy()
            all_reduce(whole, topology, algorithm=name, order=order)
            parts = rows[comm.rank].copy()
            all_reduce(parts[:500], topology, algorithm=name, order=order)
            all_reduce(parts[500:], topology, algorithm=name, order=order)
            findings.check(whole.tobytes() == expected.tobytes() == parts.tobytes(), f"{name} {order} {topology}")


def test_all_ranks_hold_the_same_bits_by_every_algorithm(comm, topologies):
    rng = np.random.default_rng(comm.rank)
    mine = rng.standard_normal(4097).astype(np.float32)
    for topology in topologies:
        for name in algorithms("all_reduce", topology):
            first, second = mine.copy(), mine.copy()
            all_reduce(first, topology, algorithm=name)
            all_reduce(second, topology, algorithm=name)
            held = comm.allgather(first.tobytes())
            check_everywhere(comm, held == [held[0]] * comm.size, f"{name} {topology}")
            if name != "system":
                check_everywhere(comm, first.tobytes() == second.tobytes(), f"{name} {topology} on a second run")


def test_strided_arrays_are_packed_and_written_back(comm, topologies, findings):
    for topology in topologies:
        for view in (lambda a: a[::2], lambda a: a.T, lambda a: a[:, 1], lambda a: a[::-1]):
            whole = np.arange(60.0).reshape(6, 10) + comm.rank
            untouched = whole.copy()
            expected = view(sum(np.arange(60.0).reshape(6, 10) + rank for rank in range(comm.size)))
            result = all_reduce(view(whole), topology)
            findings.check(np.array_equal(result, expected) and np.array_equal(view(whole), expected), "strided")
            view(untouched)[...] = expected
            findings.check(np.array_equal(whole, untouched), "elements outside the view changed")


def test_arrays_of_other_libraries_are_reduced_in_their_own_memory(comm, topologies):
    import array as standard

    values = standard.array("d", [1.0, 2.0, 3.0])
    all_reduce(values, topologies[0])
    check_everywhere(comm, list(values) == [comm.size, 2 * comm.size, 3 * comm.size], f"{values}")
    scalar = np.array(2.0)
    all_reduce(scalar, topologies[0])
    check_everywhere(comm, scalar.shape == () and scalar == 2 * comm.size, f"{scalar}")


def sent_by(topology, call):
    """Bytes by link that this rank sends, or reads of its neighbours' memory, in one call."""
    before = dict(Transport.of(topology).bytes_sent)
    call()
    return {link: count - before[link] for link, count in Transport.of(topology).bytes_sent.items()}


def test_node_shared_arrays_are_reduced_without_a_message_inside_the_node(comm, topologies):
    for topology in topologies:
        array = topology.empty(30011, np.float32)
        array[:] = whole_numbers(comm.rank, 30011, np.float32)
        name = "window" if topology.num_nodes == 1 else "hierarchical"
        sent = sent_by(topology, lambda: all_reduce(array, topology, algorithm=name))      # noqa: B023 - called at once
        expected = everyones(comm, 30011, np.float32).sum(0)
        check_everywhere(comm, np.array_equal(array, expected), f"{topology}")
        check_everywhere(comm, sent["node"] == 0, f"{sent}")


def test_every_network_card_carries_no_more_than_the_bound_for_every_collective(comm, topologies, findings):
    count = 60060      # divisible by whatever there is: the bound can be met exactly
    for topology in topologies:
        nodes, num_nodes = topology.map.nodes, topology.num_nodes
        whole, share = 4 * count, 4 * count // comm.size * topology.ranks_per_node[topology.node_index]
        calls = {
            "all_reduce": (all_reduce, 2 * (num_nodes - 1) * whole // num_nodes),
            # A node sends its sums of what others own; and what it owns to all others.
            "reduce_scatter": (reduce_scatter, whole - share),
            "all_gather": (all_gather, (num_nodes - 1) * share),
        }
        for between, (name, (call, bound)) in itertools.product(("", ":ring", ":circulant"), calls.items()):
            array = whole_numbers(comm.rank, count, np.float32)
            sent = sent_by(topology, lambda: call(array, topology, algorithm=f"hierarchical{between}"))      # noqa: B023
            by_card = topology.node.allreduce(sent["network"])
            exact = not between or name == "all_reduce" or len(set(topology.ranks_per_node)) == 1
            findings.check(by_card == bound if exact else by_card <= 2 * bound, f"{name}{between} {nodes}: {by_card} {bound}")
        for call, name in ((broadcast, "broadcast"), (reduce, "reduce")):
            array = whole_numbers(comm.rank, count, np.float32)
            sent = sent_by(topology, lambda: call(array, topology, algorithm="hierarchical"))      # noqa: B023
            total = comm.allreduce(sent["network"])
            # Of a tree over the nodes: the vector reaches, or leaves, every node but the root's once.
            findings.check(total == (num_nodes - 1) * whole, f"{name} {nodes}: {total}")


def test_a_mismatch_is_raised_on_every_rank_and_names_the_odd_one(comm, topologies):
    if comm.size == 1:
        return
    odd = comm.size - 1
    wrong = [
        (lambda me: (np.zeros(1001 if me else 1000, np.float32), {}), "1001"),
        (lambda me: (np.zeros(8, np.float64 if me else np.float32), {}), "float64"),
        (lambda me: (np.zeros(8, np.float32), {"op": "max" if me else "sum"}), "max"),
        (lambda me: (np.zeros(8, np.float32), {"algorithm": "ring" if me else "tree"}), "ring"),
    ]
    for make, text in wrong:
        array, settings = make(comm.rank == odd)
        try:
            all_reduce(array, topologies[0], **settings)
            message = ""
        except MismatchError as error:
            message = str(error)
        expected = comm.size > 2 and f"rank {odd} of {comm.size}" in message and text in message
        check_everywhere(comm, expected or (comm.size == 2 and text in message), message)


def test_a_bad_argument_on_one_rank_is_an_error_on_all(comm, topologies):
    odd = comm.rank == comm.size - 1
    read_only = np.zeros(4)
    read_only.flags.writeable = False
    cases = [
        lambda: all_reduce([1.0, 2.0] if odd else np.zeros(2), topologies[0]),
        lambda: all_reduce(np.zeros(2, np.complex128) if odd else np.zeros(2), topologies[0]),
        lambda: all_reduce(read_only if odd else np.zeros(4), topologies[0]),
        lambda: all_reduce(np.zeros(4), topologies[0], op="average" if odd else "sum"),
        lambda: all_reduce(np.zeros(4), topologies[0], algorithm="rings" if odd else "ring"),
        lambda: all_reduce(np.zeros(4, np.int32), topologies[0], op="mean"),
        lambda: all_reduce(np.zeros(4), topologies[0], out=np.zeros(5 if odd else 4)),
        lambda: broadcast(np.zeros(4), topologies[0], root=comm.size),
    ]
    for case in cases:
        try:
            case()
            raised = False
        except ConfigError:
            raised = True
        check_everywhere(comm, raised, "no ConfigError")


def test_an_output_that_overlaps_in_part_is_refused_and_the_same_array_is_in_place(comm, topologies):
    buffer = np.arange(10.0)
    with pytest.raises(ConfigError, match="overlaps"):
        all_reduce(buffer[:8], topologies[0], out=buffer[2:])
    array = np.full(5, float(comm.rank))
    all_reduce(array, topologies[0], out=array)
    check_everywhere(comm, bool((array == sum(range(comm.size))).all()), f"{array}")


def test_counts_beyond_the_message_limit_travel_in_pieces(comm, monkeypatch):
    monkeypatch.setenv("HPCZERO_MAX_COUNT", "1000")
    with Topology(comm) as topology:
        for name in ("ring", "tree", "pairwise", "halving"):
            array = whole_numbers(comm.rank, 5003, np.float32)
            all_reduce(array, topology, algorithm=name)
            check_everywhere(comm, np.array_equal(array, everyones(comm, 5003, np.float32).sum(0)), name)


@pytest.mark.parametrize("blocks", [False, True])
def test_the_systems_collectives_are_made_in_pieces_of_at_most_the_limit(comm, monkeypatch, blocks):
    for limit in ("1000", "7", "1"):
        monkeypatch.setenv("HPCZERO_MAX_COUNT", limit)
        count = 2003 if limit == "1000" else 13
        with Topology(comm) as topology:
            topology.is_oversubscribed = not blocks
            mine, total = whole_numbers(comm.rank, count, np.float32), everyones(comm, count, np.float32).sum(0)
            shard, last = shard_slice(count, comm.rank, comm.size), comm.size - 1
            ok = [np.array_equal(all_reduce(mine.copy(), topology, algorithm="system"), total),
                  np.array_equal(reduce_scatter(mine.copy(), topology, algorithm="system"), total[shard]),
                  np.array_equal(all_gather(total[shard].copy(), topology, algorithm="system", out=np.empty(count)), total),
                  np.array_equal(broadcast(mine.copy(), topology, algorithm="system", root=last),
                                 whole_numbers(last, count, np.float32))]
            back = reduce(mine.copy(), topology, algorithm="system", root=last)
            ok.append(back is None if comm.rank != last else np.array_equal(back, total))
            check_everywhere(comm, all(ok), f"limit {limit}: {ok}")


def test_more_calls_than_tags_never_run_out_of_tags(comm):
    from hpczero.collectives.transport import Transport

    with Topology(comm) as topology:
        transport = Transport.of(topology)
        transport._last_tag = 100
        for _ in range(250):
            array = np.ones(3)
            all_reduce(array, topology, algorithm="tree")
            assert array[0] == comm.size
        assert 0 < transport._tag <= 100


def test_vectors_larger_than_the_shared_rows_go_in_pieces(comm, monkeypatch):
    from hpczero.collectives import slots, stripes, window

    for module, name in ((window, "STAGING_BYTES"), (stripes, "PIECE_BYTES"), (window, "BLOCK_BYTES"), (window, "LEAST_BYTES")):
        monkeypatch.setattr(module, name, 4096)
    monkeypatch.setattr(slots, "ROWS_BYTES", 0)
    for node_map in ([0] * comm.size, [rank % 2 for rank in range(comm.size)]):
        with Topology(comm, node_map) as topology:
            shared = topology.empty(20000, np.float64)
            for _ in range(2):
                shared[:] = whole_numbers(comm.rank, 20000, np.float64)
                all_reduce(shared, topology, algorithm="hierarchical")
                total = everyones(comm, 20000, np.float64).sum(0)
                check_everywhere(comm, np.array_equal(shared, total), f"{node_map}: shared")
            for count, turn in itertools.product((5003, 1024, 3, 20000), range(2)):
                mine, total = whole_numbers(comm.rank, count, np.float64), everyones(comm, count, np.float64).sum(0)
                shard, last = shard_slice(count, comm.rank, comm.size), comm.size - 1
                result = all_reduce(mine.copy(), topology, algorithm="hierarchical")
                ok = [np.array_equal(result, total),
                      np.array_equal(reduce_scatter(mine.copy(), topology, algorithm="hierarchical"), total[shard]),
                      np.array_equal(all_gather(total[shard].copy(), topology, algorithm="hierarchical",
                                                out=np.empty_like(total)), total)]
                if topology.num_nodes == 1:
                    ok.append(np.array_equal(broadcast(mine.copy(), topology, algorithm="window", root=last),
                                             whole_numbers(last, count, np.float64)))
                    kept = mine.copy()
                    back = reduce(kept, topology, algorithm="window", root=last)
                    ok.append(np.array_equal(back, total) if comm.rank == last else np.array_equal(kept, mine))
                check_everywhere(comm, all(ok), f"{node_map} {count} {turn}: {ok}")
            assert window.Staging.of(topology).nbytes <= 8192 and stripes.Stripes.of(topology).nbytes <= 8192


def test_a_rank_that_never_calls_is_named_after_the_time_limit(comm):
    from hpczero.collectives.transport import Transport
    from hpczero.errors import StallError

    if comm.size == 1:
        return
    topology = Topology(comm)
    Transport.of(topology).timeout_s = 0.3
    if comm.rank == comm.size - 1:
        raised = True
    else:
        try:
            all_reduce(np.zeros(4), topology)
            raised = False
        except StallError as error:
            raised = "all_reduce" in str(error) and f"no word from rank {comm.size - 1} for" in str(error)
    check_everywhere(comm, raised, "no StallError")
    # The topology is left as it is: a collective nobody finished cannot be closed together.


def test_the_smaller_zero_is_the_negative_one_on_every_rank_by_every_algorithm(comm, topologies, findings):
    for topology, dtype in itertools.product(topologies, (np.float32, np.float16)):
        mine = np.array([0.0 if comm.rank == 0 else -0.0, -0.0 if comm.rank == 0 else 0.0, 0.0, -0.0], dtype)
        mixed = comm.size > 1
        for name in algorithms("all_reduce", topology):
            if name == "system":
                continue
            small, large = mine.copy(), mine.copy()
            all_reduce(small, topology, op="min", algorithm=name)
            all_reduce(large, topology, op="max", algorithm=name)
            findings.check(np.signbit(small).tolist() == [mixed, True, False, True], f"{name} min {small}")
            findings.check(np.signbit(large).tolist() == [False, not mixed, False, True], f"{name} max {large}")


def test_half_sums_in_canonical_order_have_the_same_bits_by_every_algorithm_that_claims_it(comm, topologies, findings):
    rows = np.random.default_rng(3).standard_normal((comm.size, 501)).astype(np.float16)
    for topology in topologies:
        expected = in_order(canonical(topology.map.nodes), rows.astype(np.float32)).astype(np.float16)
        for name in ("adaptive", *selection.ALGORITHMS["all_reduce"]):
            facts = selection.Call("all_reduce", 0, topology.map, "canonical", is_half=True)
            if name == "adaptive" or selection.why_not(facts, name) is None:
                array = rows[comm.rank].copy()
                all_reduce(array, topology, algorithm=name, order="canonical")
                findings.check(array.tobytes() == expected.tobytes(), f"{name} {topology}")


def test_arrays_of_different_windows_or_of_none_are_a_mismatch(comm):
    if comm.size == 1:
        return
    count = 200000      # too many for the slots of a node, through which arrays go from anywhere
    with Topology(comm) as topology:
        first, second = topology.empty(count), topology.empty(count)
        other = second if comm.rank == 1 else np.zeros(count, np.float32)
        for mine in ((first if comm.rank == 0 else second), (first if comm.rank == 0 else other)):
            with pytest.raises(MismatchError, match="window"):
                all_reduce(mine, topology, algorithm="window")
            mine[:8] = 1
            assert (all_reduce(mine[:8], topology, algorithm="window") == comm.size).all()


def test_read_only_arrays_are_refused_on_every_rank_where_they_would_be_written(comm, topologies):
    fixed = np.zeros(100)
    fixed.flags.writeable = comm.rank != 0
    for call in (lambda: reduce_scatter(fixed, topologies[0]), lambda: reduce(fixed, topologies[0], root=0),
                 lambda: broadcast(fixed, topologies[0])):
        with pytest.raises(ConfigError, match="read-only"):
            call()
    shard = shard_slice(100, comm.rank, comm.size)
    reduce_scatter(fixed, topologies[0], out=np.empty(shard.stop - shard.start))
    reduce(fixed, topologies[0], root=0, out=np.empty(100))
