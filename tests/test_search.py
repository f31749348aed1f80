"""Embeddings on disk, search, and identification metrics."""

import json
import math
import os
import tracemalloc

import numpy as np
import pytest

from trainyard import scoring
from trainyard.errors import UserError
from trainyard.runs.pair_scores import FILE, read_validation_scores, write_pair_scores
from trainyard.runs.tensor_file import TensorFileError, create_tensor_file, map_tensor_file
from trainyard.tools import nearest as search_code
from trainyard.tools.embed import read_identities
from trainyard.tools.embeddings import CHECKPOINT, find_table, open_embeddings, write_embeddings
from trainyard.tools.nearest import Nearest, find_nearest_rows
from trainyard.tools.search import compute_identification


def draw_unit_vectors(count: int, dims: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, dims), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def search_by_brute_force(probes: np.ndarray, gallery: np.ndarray, k: int, *, skip_self: bool = False) -> Nearest:
    """Compare every pair in float64 and sort: best first, the lower row first among equals."""
    scores = np.stack([scoring.compare_embeddings(np.broadcast_to(p, gallery.shape), gallery) for p in probes])
    if skip_self:
        np.fill_diagonal(scores, -np.inf)
    rows = np.stack([np.lexsort((np.arange(len(gallery)), -line))[:k] for line in scores])
    return Nearest(rows, np.take_along_axis(scores, rows, axis=1), 0.0)


def draw_tying_vectors(count: int, dims: int, seed: int) -> np.ndarray:
    """Draw vectors of four numbers +-0.5: their products are multiples of 1/4, exact in float32, and often equal."""
    rng = np.random.default_rng(seed)
    vectors = np.zeros((count, dims), dtype=np.float32)
    for vector in vectors:
        vector[rng.choice(dims, 4, replace=False)] = rng.choice([-0.5, 0.5], 4)
    return vectors


@pytest.mark.parametrize("blocks", [(256, 16_384), (5, 64)])
@pytest.mark.parametrize("k", [1, 7, 499])
def test_search_finds_the_best_rows_and_the_lower_row_among_equals(k, blocks, monkeypatch):
    gallery, probes = draw_tying_vectors(500, 16, 1), draw_tying_vectors(33, 16, 2)
    monkeypatch.setattr(search_code, "PROBE_ROWS", blocks[0])
    monkeypatch.setattr(search_code, "GALLERY_ROWS", blocks[1])
    found, expected = find_nearest_rows(probes, gallery, k=k), search_by_brute_force(probes, gallery, k)
    assert np.array_equal(found.rows, expected.rows) and np.array_equal(found.scores, expected.scores)
    ascending = gallery[np.argsort(gallery @ probes[0])]  # each row is nearer to the first probe than the one before
    assert np.array_equal(
        find_nearest_rows(probes, ascending, k=k).rows, search_by_brute_force(probes, ascending, k).rows
    )


def test_scores_are_those_of_float64_to_the_sixth_digit():
    gallery, probes = draw_unit_vectors(500, 512, 1), draw_unit_vectors(33, 512, 2)
    found, expected = find_nearest_rows(probes, gallery, k=7), search_by_brute_force(probes, gallery, 7)
    assert np.allclose(found.scores, expected.scores, rtol=0, atol=1e-6)


@pytest.mark.parametrize("blocks", [(256, 16_384), (64, 5), (5, 64)])
def test_a_gallery_that_searches_itself_finds_no_row_for_itself(blocks, monkeypatch):
    gallery = draw_tying_vectors(500, 16, 1)
    monkeypatch.setattr(search_code, "PROBE_ROWS", blocks[0])
    monkeypatch.setattr(search_code, "GALLERY_ROWS", blocks[1])
    for k in (3, 499):
        found = find_nearest_rows(gallery, gallery, k=k, leave_out_self=True)
        expected = search_by_brute_force(gallery, gallery, k, skip_self=True)
        assert np.array_equal(found.rows, expected.rows) and np.array_equal(found.scores, expected.scores)
        assert not (found.rows == np.arange(500)[:, None]).any()


def test_search_never_holds_the_whole_matrix_of_scores():
    gallery, probes = draw_unit_vectors(60_000, 8, 1), draw_unit_vectors(2_000, 8, 2)  # 480 MB of float32 scores
    tracemalloc.start()
    find_nearest_rows(probes, gallery, k=5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("nan", r"the gallery: the embedding in row 70 is not finite"),
        ("long", r"the probes: the embedding in row 3 is not finite or not of unit length"),
        ("dims", r"the probes has embeddings of 32 numbers, the gallery of 64: they are of different models"),
        ("k", r"k=501: expected 1 to 500"),
    ],
)
def test_search_refuses_vectors_that_have_no_score(case, message):
    gallery, probes, k = draw_unit_vectors(500, 64, 1), draw_unit_vectors(9, 64, 2), 5
    if case == "nan":
        gallery[70, 3] = np.nan
    elif case == "long":
        probes[3] *= 1.01
    elif case == "dims":
        probes = draw_unit_vectors(9, 32, 2)
    else:
        k = 501
    with pytest.raises(UserError, match=message):
        find_nearest_rows(probes, gallery, k=k, names=("the probes", "the gallery"))


def write_file(path, count=6, identities=None):
    vectors = draw_unit_vectors(count, 16, 3)
    keys = [f"{i}.png" for i in range(count - 1)] + ["=1+1.png"]
    write_embeddings(path, [vectors[:4], vectors[4:]], keys, identities=identities, metadata={CHECKPOINT: "ab" * 32})
    return vectors, keys


def test_embeddings_read_back_equal_also_for_other_programs(tmp_path):
    from safetensors.numpy import load_file

    path = tmp_path / "out.safetensors"
    vectors, keys = write_file(path, identities=list("aabbcc"))
    found = open_embeddings(path)
    assert np.array_equal(found.vectors, vectors) and not found.vectors.flags.writeable
    assert (found.keys, found.identities) == (keys, list("aabbcc"))
    assert np.array_equal(load_file(path)["embedding"], vectors)
    assert "'=1+1.png" in find_table(path).read_text(), "a key that is a formula is text in a spreadsheet"
    write_file(tmp_path / "other.npz")
    assert np.array_equal(np.load(tmp_path / "other.npz", allow_pickle=False)["embedding"], vectors)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other.csv", "other.npz", "out.csv", "out.safetensors"]


def test_a_failed_embedding_leaves_no_file(tmp_path):
    def fail():
        yield draw_unit_vectors(2, 16, 1)
        raise RuntimeError("the model is broken")

    with pytest.raises(RuntimeError):
        write_embeddings(tmp_path / "a.safetensors", fail(), list("abcd"), identities=None, metadata={})
    assert list(tmp_path.iterdir()) == []


def rewrite_header(path, change):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    encoded = json.dumps(change(header)).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "No such file"),
        ("link", "it is a link"),
        ("pipe", "not a regular file"),
        ("empty", "header too small"),
        ("short", "file not fully covered"),
        ("long", "file not fully covered"),
        ("huge header", "header too large"),
        ("nested", "invalid JSON"),
        ("huge", "overflow"),
        ("beyond", "file not fully covered"),
        ("gap", "invalid offset"),
        ("no rows", r"'more' is F32 \[0, 16\], expected F32"),
        ("negative", "integer `-6`"),
        ("dtype", r"F64 \[3, 16\], expected F32"),
        ("terminal", r"`\[31mred`"),
        ("list", "invalid type: sequence"),
    ],
)
def test_a_strangers_file_of_embeddings_is_refused_with_a_reason(tmp_path, case, message):
    path = tmp_path / "a.safetensors"
    write_file(path)
    data, entry = path.read_bytes(), {"dtype": "F32", "shape": [6, 16], "data_offsets": [0, 384]}
    headers = {
        "huge": {"embedding": entry | {"shape": [2**40, 2**40]}},
        "beyond": {"embedding": entry | {"shape": [7, 16], "data_offsets": [0, 448]}},
        "gap": {"embedding": entry | {"shape": [5, 16], "data_offsets": [64, 384]}},
        "no rows": {"embedding": entry, "more": entry | {"shape": [0, 16], "data_offsets": [384, 384]}},
        "negative": {"embedding": entry | {"shape": [-6, -16]}},
        "dtype": {"embedding": entry | {"dtype": "F64", "shape": [3, 16]}},
        "terminal": {"embedding": entry | {"dtype": "\x1b[31mred"}},
        "list": [entry],
    }
    if case in ("missing", "link", "pipe"):
        path.rename(tmp_path / "b.safetensors")
    if case == "link":
        path.symlink_to(tmp_path / "b.safetensors")
    elif case == "pipe":
        os.mkfifo(path)
    elif case == "empty":
        path.write_bytes(b"")
    elif case == "short":
        path.write_bytes(data[:-1])
    elif case == "long":
        path.write_bytes(data + b"x")
    elif case == "huge header":
        path.write_bytes((2**40).to_bytes(8, "little") + data[8:])
    elif case == "nested":
        path.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)
    elif case in headers:
        rewrite_header(path, lambda header: headers[case])
    with pytest.raises(TensorFileError, match=f"cannot be used: .*{message}.* trainyard embed RUN FOLDER"):
        open_embeddings(path)


def test_a_table_that_does_not_fit_its_embeddings_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    write_file(path)
    table = find_table(path)
    table.write_text(table.read_text() + "7.png\n")
    with pytest.raises(UserError, match="7 lines for the 6 embeddings"):
        open_embeddings(path)
    table.unlink()
    with pytest.raises(UserError, match=r"a\.csv: no such file\. Write both files again: trainyard embed"):
        open_embeddings(path)
    with create_tensor_file(tmp_path / "b.safetensors", {"weight": (2, 2)}, metadata={}) as arrays:
        arrays["weight"][:] = 1
    with pytest.raises(UserError, match="no file of embeddings"):
        open_embeddings(tmp_path / "b.safetensors")
    assert map_tensor_file(tmp_path / "b.safetensors", remedy="").arrays["weight"].tolist() == [[1, 1], [1, 1]]


def test_identities_come_from_keys_or_the_pattern_is_refused():
    assert read_identities(["anna/01.png", "bea/x/2.png"], "([^/]+)/") == ["anna", "bea"]
    assert read_identities(["101_3.tif", "102_1_2.tif"], "(.+)_") == ["101", "102_1"]
    for pattern, message in (("(", "not a regular expression"), ("a", "one group"), ("([0-9]+)", "the key 'x.png'")):
        with pytest.raises(UserError, match=f"{message}.* For anna/01.png: --identity"):
            read_identities(["1.png", "x.png"], pattern)


def test_identification_rates_are_those_of_their_definition():
    rng = np.random.default_rng(5)
    gallery_identity = [f"p{i % 40}" for i in range(120)]
    probe_identity = [f"p{i}" for i in range(40)] + [f"stranger{i}" for i in range(300)]
    centre = draw_unit_vectors(400, 32, 6)
    gallery = centre[np.arange(120) % 40] + 0.25 * rng.standard_normal((120, 32), dtype=np.float32)
    probes = np.concatenate([centre[:40], centre[60:360]]) + 0.25 * rng.standard_normal((340, 32), dtype=np.float32)
    gallery, probes = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (gallery, probes))
    nearest = find_nearest_rows(probes, gallery, k=4)
    found = compute_identification(nearest, probe_identity, gallery_identity, leave_out_self=False)
    assert (found.mated, found.non_mated, found.list_supported()) == (40, 300, [0.1, 0.01])
    scores = probes @ gallery.T
    own = np.array([[p == g for g in gallery_identity] for p in probe_identity])
    assert found.rank1 == np.mean([own[i, scores[i].argmax()] for i in range(40)])
    for fpir in (0.1, 0.05, 0.01):
        fnir, threshold = found.find_fnir(fpir)
        rounding = 1e-6  # the search sums in another order than `scores`
        assert np.mean(scores[40:].max(axis=1) >= threshold + rounding) <= fpir
        assert np.mean(scores[40:].max(axis=1) >= threshold - rounding) > fpir, "a lower threshold lets one more in"
        own_score = np.where(own[:40], scores[:40], -np.inf)
        rank = np.array([(scores[i] > own_score[i].max()).sum() for i in range(40)])
        assert fnir == np.mean((own_score.max(axis=1) < threshold) | (rank >= 4))
        assert 0 < fnir < 1
    with pytest.raises(UserError, match=r"--fpir 0\.001: needs mated probes, found 40, and 3,000 or more"):
        found.find_fnir(0.001)


def test_in_a_search_of_itself_a_sample_without_another_of_its_identity_is_not_mated():
    nearest = Nearest(np.array([[1], [0], [0]]), np.array([[0.9], [0.9], [0.2]]), 0.0)
    found = compute_identification(nearest, ["a", "a", "b"], ["a", "a", "b"], leave_out_self=True)
    assert (found.mated, found.non_mated, found.rank1) == (2, 1, 1.0)


def write_scores(run, **changes):
    rng = np.random.default_rng(0)
    scores = {"genuine": rng.normal(0.6, 0.2, 500), "twin": rng.normal(0.3, 0.2, 3_000), "random": rng.random(50)}
    write_pair_scores(run / FILE, scores | changes, step=12, precision="fp32")
    return scores


@pytest.mark.parametrize("fmr", [0.001, 0.00123, 0.01, 0.1, 0.5])
def test_the_threshold_of_a_run_accepts_at_most_that_share_of_its_impostors(tmp_path, fmr):
    impostor = np.sort(write_scores(tmp_path)["twin"].astype(np.float32).astype(np.float64))
    recorded = read_validation_scores(tmp_path, step=12, kind="")
    point = recorded.find_point(fmr, command="")
    assert recorded.kind == "twin" and np.mean(impostor >= point.threshold) == point.fmr <= fmr
    assert np.mean(impostor >= impostor[impostor < point.threshold][-1]) > fmr, "a lower one accepts too many"


def test_a_rate_that_the_impostors_cannot_support_is_refused_with_one_that_they_can(tmp_path):
    write_scores(tmp_path)
    recorded = read_validation_scores(tmp_path, step=12, kind="random")
    with pytest.raises(
        UserError, match=r"the 50 impostor trials \(random\).* below 3/50 = 0\.06.* type C --fmr 0\.06$"
    ):
        recorded.find_point(0.01, command="C")
    assert math.isfinite(recorded.find_point(0.06, command="C").threshold)
    for wrong in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(UserError, match="expected a rate between 0 and 1"):
            recorded.find_point(wrong, command="C")
    write_scores(tmp_path, twin=np.ones(3_000), genuine=np.ones(3))
    with pytest.raises(UserError, match="no threshold has this rate"):
        read_validation_scores(tmp_path, step=12, kind="").find_point(0.01, command="C")


def test_scores_of_other_weights_or_none_are_refused_with_what_to_type(tmp_path):
    with pytest.raises(UserError, match=f"holds no scores .* writes them: trainyard resume {tmp_path}"):
        read_validation_scores(tmp_path, step=12, kind="")
    write_scores(tmp_path)
    with pytest.raises(UserError, match="of the weights of step 12, and the weights in use are of step 13"):
        read_validation_scores(tmp_path, step=13, kind="")
    with pytest.raises(UserError, match="--impostors triplet: this run has twin, random"):
        read_validation_scores(tmp_path, step=12, kind="triplet")


def test_the_rule_of_three_is_the_limit_without_an_error():
    for trials in (30, 1_000, 50_000):
        assert (1 - scoring.compute_smallest_rate(trials)) ** trials == pytest.approx(0.05, rel=0.17)
