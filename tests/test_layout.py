"""The layout: every element has one place, every place is aligned, nothing overlaps, and it never depends on the machine."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zinf.layout import MASTERS, PAGE, PARAM_ALIGN, PIECE, STATE, WEIGHTS, Chunk, Model, Param, Place, Run, Shard, make_shard, mode, place

SPEC = [("a", (3, 5), "bf16", True), ("b", (64,), "bf16", True), ("c", (1,), "fp32", True), ("d", (7,), "bf16", False), ("e", (2,), "bf16", True)]

params = st.lists(
    st.tuples(st.lists(st.integers(1, 70), min_size=0, max_size=2).map(tuple), st.sampled_from(sorted(MASTERS)), st.booleans()), min_size=1, max_size=8
).map(lambda ps: [(f"p{i}", *p) for i, p in enumerate(ps)])
models = st.builds(
    lambda specs, pieces: Model(tuple(make_shard(f"s{i}", spec) for i, spec in enumerate(specs)), pieces * PIECE),
    st.lists(params, min_size=1, max_size=4),
    st.integers(1, 4),
)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def test_a_shard_literally() -> None:
    assert make_shard("s", SPEC) == Shard(
        "s",
        (
            Run("bf16", True, (Param("a", (3, 5), 0, 15), Param("b", (64,), 64, 64), Param("e", (2,), 128, 2))),
            Run("fp32", True, (Param("c", (1,), 0, 1),)),
            Run("bf16", False, (Param("d", (7,), 0, 7),)),
        ),
    )
    shard = make_shard("s", SPEC)
    assert shard.numel == 15 + 64 + 1 + 7 + 2 and shard.trainable
    run = shard.runs[0]
    assert (run.numel, run.padded) == (192, 2048)
    assert run.gaps() == [(15, 64), (130, 2048)]
    assert (run.weights_nbytes, run.state_nbytes) == (4096, 20480)
    assert (shard.weights_nbytes, shard.state_nbytes) == (4096 + 8192 + 4096, 20480 + 16384)
    assert [shard.run_offset(i) for i in range(3)] == [0, 4096, 12288]
    assert shard.grads_nbytes(4) == 2 * 8192 and [shard.grads_offset(i, 4) for i in range(3)] == [0, 8192, 16384]


def test_moments() -> None:
    """The optimizer's planes follow the master's; a store that names none has Adam's, under the fingerprint it always had."""
    of = {
        moments: Model((make_shard("a", [("a.w", (8,), "fp32", True), ("a.v", (8,), "bf16", True)], moments),), PIECE) for moments in ((), ("m",), ("m", "v"))
    }
    assert [r.mode.planes for r in of["m",].shards[0].runs] == [(("m", "fp32"),), (("lo", "int16"), ("m", "fp32"))]
    assert [(r.has_state, r.state_nbytes) for r in of[()].shards[0].runs] == [(False, 0), (True, 2 * PIECE)]
    assert [key[:3] for key in place(of[()]).places] == [(WEIGHTS, 0, 0), (WEIGHTS, 0, 1), (STATE, 0, 1)]
    assert "moments" not in of["m", "v"].to_json() and Model.from_json(of["m", "v"].to_json()) == of["m", "v"]
    assert all(Model.from_json(json.loads(json.dumps(m.to_json()))) == m for m in of.values())
    assert len({m.fingerprint() for m in of.values()}) == 3
    assert of["m", "v"].fingerprint() == "e529ba9c2c0b97a1"


def test_bytes_a_parameter() -> None:
    assert {name: (mode(name).weights_bytes, mode(name).state_bytes) for name in MASTERS} == {"bf16": (2, 10), "fp16": (2, 12), "fp32": (4, 8)}


def test_chunks_literally() -> None:
    run = make_shard("s", [("a", (5000,), "bf16", True)]).runs[0]
    assert run.padded == 6144
    assert run.chunks(4096) == [Chunk(0, 0, 4096, 4096), Chunk(1, 4096, 2048, 5056 - 4096)]
    assert run.chunks(1 << 20) == [Chunk(0, 0, 6144, 5056)]


def test_placement_literally() -> None:
    model = Model((make_shard("s", [("a", (5000,), "bf16", True), ("f", (10,), "bf16", False)]),), 4096)
    placement = place(model, (1.0, 1.0))
    assert placement.places == {
        (WEIGHTS, 0, 0, 0): (Place(0, "weights", 0, 8192), Place(0, "weights", 8192, 8192)),
        (WEIGHTS, 0, 0, 1): (Place(1, "weights", 0, 4096), Place(1, "weights", 4096, 4096)),
        (STATE, 0, 0, 0): (Place(1, "state", 0, 40960), Place(1, "state", 40960, 40960)),
        (STATE, 0, 0, 1): (Place(0, "state", 0, 20480), Place(0, "state", 20480, 20480)),
        (WEIGHTS, 0, 1, 0): (Place(0, "frozen", 0, 4096),),
    }
    assert placement.sizes == ({"weights": 16384, "state": 40960, "frozen": 4096}, {"weights": 8192, "state": 81920})
    assert [placement.nbytes(i) for i in (0, 1)] == [61440, 90112]
    assert place(model, (1.0, 1.0), versions=1).sizes == ({"weights": 8192, "state": 20480, "frozen": 4096}, {"weights": 4096, "state": 40960})


@quick
@given(params)
def test_parameters_never_overlap_and_gaps_are_the_rest(spec: list) -> None:
    shard = make_shard("s", spec)
    assert sorted(p.name for run in shard.runs for p in run.params) == sorted(name for name, *_ in spec)
    assert len({(run.dtype, run.trainable) for run in shard.runs}) == len(shard.runs)
    for run in shard.runs:
        owner = [0] * run.padded
        for p in run.params:
            assert p.offset % PARAM_ALIGN == 0 and p.numel == math.prod(p.shape)
            for i in range(p.offset, p.offset + p.numel):
                owner[i] += 1
        for start, end in run.gaps():
            assert start < end
            for i in range(start, end):
                owner[i] += 1
        assert set(owner) == {1}
        assert run.padded % PIECE == 0 and 0 <= run.padded - run.numel < PIECE


@quick
@given(models, st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(1, 2))
def test_places_tile_their_files(model: Model, shares: list[float], versions: int) -> None:
    placement = place(model, shares, versions)
    assert placement == place(Model.from_json(json.loads(json.dumps(model.to_json()))), shares, versions)
    taken: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for (kind, s, r, c), places in placement.places.items():
        run = model.shards[s].runs[r]
        mode = run.mode
        length = run.chunks(model.chunk)[c].length * (mode.weights_bytes if kind == WEIGHTS else mode.state_bytes)
        assert run.trainable or kind == WEIGHTS
        assert len(places) == (versions if run.trainable else 1)
        assert {p.file for p in places} == {kind if run.trainable else "frozen"}
        assert len({p.path for p in places}) == 1
        for p in places:
            assert p.length == length and p.offset % PAGE == 0 and length % PAGE == 0
            taken.setdefault((p.path, p.file), []).append((p.offset, p.offset + p.length))
    for (path, file), ranges in taken.items():
        at = 0
        for start, end in sorted(ranges):
            assert start == at  # neither hole nor overlap
            at = end
        assert at == placement.sizes[path][file]
    assert sum(map(len, placement.sizes)) == len(taken)
    expected = {
        (k, s, r, c.index)
        for s, shard in enumerate(model.shards)
        for r, run in enumerate(shard.runs)
        for c in run.chunks(model.chunk)
        for k in (WEIGHTS, STATE)
    }
    assert set(placement.places) == {(k, s, r, c) for k, s, r, c in expected if k == WEIGHTS or model.shards[s].runs[r].trainable}


@quick
@given(models, st.integers(0, 20))
def test_chunks_tile_their_run(model: Model, _: int) -> None:
    for s, shard in enumerate(model.shards):
        for r, run in enumerate(shard.runs):
            at = 0
            for i, chunk in enumerate(model.chunks(s, r)):
                assert (chunk.index, chunk.start) == (i, at) and 0 < chunk.count <= chunk.length <= model.chunk
                assert chunk.start % PIECE == 0 and chunk.length % PIECE == 0
                at += chunk.length
            assert at == run.padded and chunk.start + chunk.count == run.numel


@pytest.mark.parametrize("shares", [(1.0,), (1.0, 1.0), (3.0, 1.0), (1.0, 2.0, 5.0)])
def test_stripes_follow_the_shares(shares: tuple[float, ...]) -> None:
    model = Model((make_shard("s", [("a", (2048 * 300,), "bf16", True)]),), PIECE)
    placement = place(model, shares)
    total = sum(placement.nbytes(i) for i in range(len(shares)))
    for i, share in enumerate(shares):
        assert abs(placement.nbytes(i) - total * share / sum(shares)) <= 2 * 20480  # one chunk of state in two versions


@pytest.mark.parametrize("shares", [(), (1.0, 0.0), (-1.0,)])
def test_shares_must_be_positive(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="shares must be positive"):
        place(Model((make_shard("s", SPEC),), PIECE), shares)


@quick
@given(models)
def test_json_round_trip_keeps_the_fingerprint(model: Model) -> None:
    again = Model.from_json(json.loads(json.dumps(model.to_json())))
    assert again == model and again.fingerprint() == model.fingerprint()


def test_fingerprint_sees_all_but_the_chunk_size() -> None:
    base = Model((make_shard("s", SPEC),), PIECE)
    assert base.fingerprint() == "f09edc044222fbd1"  # on every machine, in every version that reads this format
    assert Model(base.shards, 2 * PIECE).fingerprint() == base.fingerprint()
    changed = [
        Model((make_shard("t", SPEC),), PIECE),
        Model((make_shard("s", SPEC), make_shard("s2", SPEC)), PIECE),
        Model(base.shards, PIECE, 1, 2),
        *(
            Model((make_shard("s", [*SPEC[:1], new, *SPEC[2:]]),), PIECE)
            for new in (("x", (64,), "bf16", True), ("b", (8, 8), "bf16", True), ("b", (64,), "fp16", True), ("b", (64,), "bf16", False))
        ),
        Model((make_shard("s", [SPEC[1], SPEC[0], *SPEC[2:]]),), PIECE),
    ]
    assert len({m.fingerprint() for m in [base, *changed]}) == len(changed) + 1


@pytest.mark.parametrize("chunk", [0, -2048, 1000, 2049])
def test_chunk_size_is_checked(chunk: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_size is {chunk} elements"):
        Model((make_shard("s", SPEC),), chunk)


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(ValueError, match=r"parameter w has dtype int8; zinf streams bf16, fp16, fp32"):
        make_shard("s", [("w", (3,), "int8", True)])
    with pytest.raises(ValueError, match=r"parameter w has shape \(3, 0\), that is no elements"):
        make_shard("s", [("w", (3, 0), "bf16", True)])
    assert make_shard("s", [("scalar", (), "fp32", True)]).runs[0].params[0].numel == 1
