"""The twins family as a whole: a perfect model, used by the tests over all families."""

import numpy as np
import torch

from trainyard.data.order import group_by_identity
from trainyard.data.shards import BadRecord, Sample
from trainyard.errors import UserError
from trainyard.scoring import compute_error_rates
from trainyard.train.module import DataInfo
from trainyard.train.step import enable_activation_checkpointing

from . import protocol
from .config import Config
from .listing import Cut, families, people
from .module import Relation, TwinsModule, arcface_logits, build, pair_loss, triplet_loss
from .network import DualCrossAttention, random_partners, rollout, twin_partners
from .pack import load, samples, splits, synthesize
from .synthesis import DATASET, FAMILY_PICTURES, PAIRS, PICTURES, draw_face, pictures
from .weights import load_weights

SMALL = (
    "data.synthetic=384",
    "image.height_px=32",
    "image.width_px=32",
    "model.dims=24",
    "model.layers=2",
    "model.heads=2",
    "model.patch_px=8",
    "model.pwca_layers=2",
    "model.drop_path=0.1",
    "head.pair_weight=0.1",
    "augment.rotate_deg=0",
    "augment.gain=0",
    "augment.contrast=0",
    "global_batch_size=16",
    "micro_batch_size=0",
    "max_duration=8st",
    "schedule.warmup=0st",
    "eval_every=4st",
    "checkpoint.every=3st",
    "evaluation.bootstrap_draws=5",
    "trackers=[]",
)
"""Makes a run of this family take seconds, for tests that run over all families."""


def perfect_rows(columns: dict[str, np.ndarray], ids: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return a perfect model's predictions for the samples `ids`, and the scores expected of them."""
    rows = {
        "embedding": np.eye(columns["person"].max() + 1, dtype=np.float32)[columns["person"][ids]],
        "sample_id": ids,
    }
    expected = {"eer_twin": 0.0, "auc_twin": 1.0, "eer_random": 0.0, "tar_at_far_1e-2_mixed": 1.0, "accuracy_twin": 1.0}
    return rows, expected


def test_a_small_model_overfits_four_pairs_of_twins() -> None:
    data = make_data()
    module, batch = make_module(data=data), make_batch(data, data.train_ids[:32])
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    for _ in range(60):
        losses = module(batch)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
    embedding = module.eval().predict(batch)["embedding"].detach()
    cosine, relation = embedding @ embedding.T, Relation(batch["person"], batch["family"], batch["sample_id"])
    ranked = cosine[relation.same][:, None] > cosine[relation.different]
    assert float(ranked.float().mean()) > 0.99, "the area under the curve; chance: 0.5"


# Order


def test_an_epoch_encodes_each_picture_once_and_forms_the_pairs_of_whole_families():
    data = small_data(families_of={"train": 12, "val": 2, "test": 2}, per_person=8)
    family = data.columns["family"]
    order = group_by_identity(
        data.train_ids, family[data.train_ids], samples_per_identity=8, seed=0, epoch=3, global_batch_size=32
    )
    assert sorted(order.ids.tolist()) == data.train_ids.tolist()
    module, encoded = small_module(data=data), []
    module.network.patch_embed.register_forward_hook(lambda _, arguments, out: encoded.append(len(arguments[0])))
    for i in range(len(order)):
        ids = order.batch(i)
        assert (family[ids].reshape(-1, 8) == family[ids].reshape(-1, 8)[:, :1]).all()
        module(batch_of(data, ids))
    assert sum(encoded) == len(data.train_ids)


def test_batches_of_whole_families_form_every_pair_of_the_list_with_a_fortieth_of_its_encodings_or_less():
    data = small_data(families_of={"train": 6, "val": 2, "test": 2}, per_person=PICTURES)
    family, train = data.columns["family"], data.train_ids
    listed = {(i, j) for i, j in itertools.combinations(train.tolist(), 2) if family[i] == family[j]}
    size = FAMILY_PICTURES
    order = group_by_identity(
        train, family[train], samples_per_identity=size, seed=0, epoch=0, global_batch_size=2 * size
    )
    formed = [
        tuple(sorted(pair)) for b in range(len(order)) for pair in itertools.combinations(order.batch(b).tolist(), 2)
    ]
    assert sorted(pair for pair in formed if family[pair[0]] == family[pair[1]]) == sorted(listed)
    assert 2 * len(listed) / len(order.ids) == 2 * PICTURES - 1 > 40


def test_the_pair_list_preset_encodes_two_pictures_for_each_pair():
    data = small_data(families_of={"train": 20, "val": 2, "test": 2}, per_person=6)
    module = small_module(small_config(arcface_weight=0.0, pair_weight=1.0, pair_strangers=False), data)
    family, train = data.columns["family"], data.train_ids
    order = group_by_identity(train, family[train], samples_per_identity=2, seed=0, epoch=0, global_batch_size=32)
    losses = module(batch_of(data, order.batch(0)))
    assert float(losses["pairs_per_picture"]) == 0.5
    assert sorted(order.ids.tolist()) == train.tolist()


# Score


def rows_of(data: DataInfo, embedding: np.ndarray, name: str) -> dict[str, np.ndarray]:
    ids = ids_of(data, name)
    unit = embedding / np.linalg.norm(embedding, axis=1, keepdims=True)
    return {"embedding": unit[ids].astype(np.float32), "sample_id": ids}


def test_a_model_that_knows_families_but_no_persons_fails_on_twins_alone():
    data = small_data(families_of={"train": 4, "val": 12}, per_person=6)
    rng = np.random.default_rng(0)
    embedding = np.eye(data.columns["family"].max() + 1)[data.columns["family"]]
    embedding = embedding + 0.05 * rng.normal(size=embedding.shape)
    metrics = small_module(data=data).score(rows_of(data, embedding, "val"))
    assert metrics["eer_random"] == 0.0
    assert 0.42 < metrics["eer_twin"] < 0.58
    assert metrics["eer_twin_low"] < metrics["eer_twin"] < metrics["eer_twin_high"]
    assert 0.42 < metrics["auc_twin"] < 0.58
    assert 0.0 < metrics["eer_mixed"] < metrics["eer_twin"] < metrics["eer_hard_twin"]
    assert metrics["accuracy_random"] > 0.7 and metrics["accuracy_twin"] == pytest.approx(0.5, abs=0.1)
    assert (metrics["pairs_same"], metrics["pairs_twin"]) == (12 * 2 * 15, 12 * 36)


def test_the_threshold_is_learned_from_validation_saved_with_the_weights_and_used_on_the_test_set():
    data = small_data(per_person=6)
    embedding = np.random.default_rng(0).normal(size=(len(data.columns["person"]), 8))
    module = small_module(data=data)
    assert "accuracy_twin" not in module.score(rows_of(data, embedding, "test"))  # before any validation
    module.score(rows_of(data, embedding, "val"))
    copy = small_module(data=data)
    copy.load_state_dict(module.state_dict())
    found = copy.score(rows_of(data, embedding, "test"))
    rows = rows_of(data, embedding, "test")
    scores = copy.exam.scores(rows["embedding"], rows["sample_id"])
    same, twin = scores.of(protocol.SAME).score, scores.of(protocol.TWIN).score
    threshold = float(module.threshold)
    assert found["accuracy_twin"] == pytest.approx(((same >= threshold).mean() + (twin < threshold).mean()) / 2)
    assert float(copy.threshold) == threshold


def test_a_set_without_twins_is_scored_on_strangers():
    data = small_data()
    alone = DataInfo({**data.columns, "family": data.columns["person"]}, data.vocabulary, data.train_ids)
    columns = {**alone.columns}
    texts = [" ".join(w for w in text.split() if w[0] != "t") for text in data.vocabulary["pairs"]]
    module = small_module(data=DataInfo(columns, {**data.vocabulary, "pairs": texts}, data.train_ids))
    assert module.monitor == ("auc_random", "max")
    embedding = np.eye(columns["person"].max() + 1)[columns["person"]]
    metrics = module.score(rows_of(data, embedding, "val"))
    assert metrics["auc_random"] == 1.0 and "auc_twin" not in metrics


# Pairs


def scores_of(rng: np.random.Generator, count: int, kind: int, families_count: int) -> protocol.Scores:
    score = np.round(rng.normal(kind == 0, 1, count), 1)  # with ties
    one = rng.integers(families_count, size=count)
    other = one if kind < 2 else (one + rng.integers(1, families_count, size=count)) % families_count
    return protocol.Scores(score, np.full(count, kind), np.stack([one, other], axis=1))


def test_metrics_are_those_of_the_definitions():
    rng = np.random.default_rng(0)
    genuine, impostor = scores_of(rng, 300, 0, 10), scores_of(rng, 1200, 2, 10)
    found = protocol.metrics(genuine, impostor, suffix="random", draws=0)
    rates = compute_error_rates(genuine.score, impostor.score)
    assert found["eer_random"] == rates.equal_error_rate().rate
    assert found["tar_at_far_1e-3_random"] == rates.tar_at_far(0.001)
    wins = (genuine.score[:, None] > impostor.score) + 0.5 * (genuine.score[:, None] == impostor.score)
    assert found["auc_random"] == pytest.approx(wins.mean(), abs=1e-12)
    few = protocol.metrics(genuine, scores_of(rng, 99, 1, 10), suffix="twin", draws=0)
    assert set(few) == {"eer_twin", "auc_twin", "d_prime_twin"}  # 99 impostors say nothing about one in a hundred


def test_the_bootstrap_draws_families_and_counts_their_pairs_as_often():
    families_of_pairs = np.array([[0, 0], [1, 1], [0, 1], [1, 2], [2, 2]])
    for weight in protocol._resamples(families_of_pairs, 20):
        counts = np.array([weight[0], weight[1], weight[4]])
        assert counts.sum() == 3
        assert weight[2] == counts[0] * counts[1] and weight[3] == counts[1] * counts[2]


def test_each_pair_is_listed_once_with_its_kind_and_strangers_are_spread_evenly():
    person = [f"{i // 4}" for i in range(80)]
    family = [f"{i // 8}" for i in range(80)]
    drawn = protocol.draw(person, family, strangers=6, seed=1)
    listed = [(i, j, kind) for i, found in enumerate(drawn) for kind, j in found]
    assert all(i < j for i, j, _ in listed) and len({(i, j) for i, j, _ in listed}) == len(listed)
    for i, j, kind in listed:
        assert kind == (0 if person[i] == person[j] else 1 if family[i] == family[j] else 2)
    kinds = [kind for _, _, kind in listed]
    assert kinds.count(protocol.SAME) == 20 * 6 and kinds.count(protocol.TWIN) == 10 * 16
    assert kinds.count(protocol.RANDOM) == pytest.approx(80 * 6, rel=0.05)
    in_strangers = np.bincount([k for i, j, kind in listed if kind == 2 for k in (i, j)], minlength=80)
    assert in_strangers.min() >= 4
    assert drawn == protocol.draw(person, family, strangers=6, seed=1)
    assert drawn != protocol.draw(person, family, strangers=6, seed=2)


def test_pairs_survive_packing_and_those_of_a_picture_left_out_are_dropped():
    data = small_data()
    whole = protocol.PairList.read(data.columns, data.vocabulary)
    gone = int(whole.one[0])
    kept = np.delete(np.arange(len(data.columns["number"])), gone)
    columns = {name: values[kept] for name, values in data.columns.items()}
    rest = protocol.PairList.read(columns, data.vocabulary)
    touched = int(((whole.one == gone) | (whole.other == gone)).sum())
    assert len(rest.one) == len(whole.one) - touched < len(whole.one)
    before = {(int(i), int(j)) for i, j in zip(whole.one, whole.other, strict=True)}
    assert {(int(kept[i]), int(kept[j])) for i, j in zip(rest.one, rest.other, strict=True)} <= before
    assert whole.sha256() == protocol.PairList.read(data.columns, data.vocabulary).sha256() != rest.sha256()


def test_pairs_never_cross_sets():
    data = small_data()
    pairs = protocol.PairList.read(data.columns, data.vocabulary)
    sets = data.columns["set"]
    assert np.array_equal(sets[pairs.one], sets[pairs.other])
    assert not np.isin(pairs.one, data.train_ids).any()
    counted = sum(len(pairs.within(ids_of(data, name)).one) for name in ("val", "test"))
    assert counted == len(pairs.one) > 500


# Listing and packing


def raw_folder(root: Path, people_of: dict[str, int], pairs: object, *, side: int = 64) -> Path:
    """Write pictures `root/<person>/<i>.png` with both files of the listing."""
    listing = {}
    for number, (person, count) in enumerate(people_of.items()):
        (root / person).mkdir(parents=True)
        listing[person] = [f"{person}/{i}.png" for i in range(count)]
        for i, name in enumerate(listing[person]):
            Image.new("RGB", (side, side), (number, i, 9)).save(root / name)
    (root / DATASET).write_text(json.dumps(listing))
    (root / PAIRS).write_text(json.dumps(pairs))
    return root


NAMES = [f"9{i:02d}{twin}" for i in range(10) for twin in (4, 5)]
TWINS = [[NAMES[i], NAMES[i + 1]] for i in range(0, 20, 2)]
CUT = Cut(0.2, 0.2, 0)


def packed(raw: Path, config: Config | None = None) -> list[Sample]:
    return list(samples(raw, config or Config()))


def by_person(found: list[Sample]) -> dict[str, tuple[str, str]]:
    return {str(s.columns["person"]): (str(s.columns["family"]), str(s.columns["set"])) for s in found}


def test_the_seeds_files_and_folders_of_persons_give_the_same_people(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 3), TWINS)
    listed = packed(raw)
    (raw / DATASET).unlink()
    assert [(s.key, s.columns) for s in packed(raw)] == [(s.key, s.columns) for s in listed]
    assert len(listed) == 60
    assert listed[0].key == "9004/0.png" and by_person(listed)["9005"][0] == "9004"


def test_paths_of_another_machine_are_found_by_their_tail(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 2), TWINS)
    before = [s.key for s in packed(raw)]
    listing = json.loads((raw / DATASET).read_text())
    moved = {person: [f"/kaggle/input/nd-twin/{path}" for path in paths] for person, paths in listing.items()}
    (raw / DATASET).write_text(json.dumps(moved))
    assert [s.key for s in packed(raw)] == before


def test_no_family_is_in_two_sets_and_a_triplet_is_one_family(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys([*NAMES, "9999"], 2), [*TWINS, ["9999", NAMES[1]]])
    everybody = people(raw, singles="fail", cut=CUT)
    set_of: dict[str, set[str]] = {}
    for person in everybody:
        set_of.setdefault(person.family, set()).add(person.set)
    assert len(set_of) == 10 and all(len(sets) == 1 for sets in set_of.values())
    assert [len([1 for sets in set_of.values() if name in sets]) for name in ("train", "val", "test")] == [6, 2, 2]
    assert {p.name for p in everybody if p.family == NAMES[0]} == {NAMES[0], NAMES[1], "9999"}
    assert families("abcd", [("b", "c"), ("c", "d")]) == {"a": "a", "b": "b", "c": "b", "d": "b"}


def test_sets_that_the_files_name_hold(tmp_path):
    raw = raw_folder(
        tmp_path / "raw", dict.fromkeys(NAMES, 2), {"train": TWINS[:6], "val": TWINS[6:8], "test": TWINS[8:]}
    )
    found = by_person(packed(raw))
    assert [found[pair[0]][1] for pair in TWINS] == ["train"] * 6 + ["val"] * 2 + ["test"] * 2
    (raw / PAIRS).write_text(json.dumps(TWINS))
    listing = json.loads((raw / DATASET).read_text())
    (raw / DATASET).unlink()
    (raw / f"train_{DATASET}").write_text(json.dumps({name: listing[name] for name in NAMES[:16]}))
    (raw / f"external_test_{DATASET}").write_text(json.dumps({name: listing[name] for name in NAMES[16:]}))
    found = by_person(packed(raw))
    assert {name for name, (_, where) in found.items() if where == "test"} == set(NAMES[16:])
    assert sum(where == "val" for _, where in found.values()) == 4


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([*TWINS, ["9004", "9004"]], "pair 11: '9004' is paired with itself"),
        ([*TWINS, ["9005", "9004"]], r"'9005' and '9004' are listed before, in .*pair 1\. Leave one"),
        ([*TWINS, ["9004", "9404x"]], "'9404x' is not in the data set. Nearest: "),
        (TWINS[1:], r"person '9004' has no twin .*\(2 of 20 persons have none\).*packing.singles=keep"),
        ([*TWINS, ["9004"]], r"pair 11: expected two persons.*found \[\"9004\"\]"),
        ({"tset": TWINS}, "unknown set 'tset'. Expected test"),
        ("9004", "expected a list of pairs"),
        ({"train": TWINS, "test": [["9004", "9015"]]}, "person '9004' is in set train and in set test"),
    ],
)
def test_bad_pairs_are_refused_in_one_sentence_with_the_place(tmp_path, pairs, said):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 1), pairs)
    with pytest.raises(UserError, match=said):
        packed(raw)


def test_a_bad_listing_is_refused_with_the_place(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 1), TWINS)
    for content, said in (
        ("{", "not JSON"),
        ("[]", "expected {person"),
        ('{"9004": []}', "person '9004': expected a list of one or more paths"),
    ):
        (raw / DATASET).write_text(content)
        with pytest.raises(UserError, match=said):
            packed(raw)
    (raw / DATASET).rename(raw / f"trian_{DATASET}")
    with pytest.raises(UserError, match=f"expected a name of {DATASET}, train_"):
        packed(raw)


def test_persons_without_a_twin_are_kept_or_left_out_if_asked(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys([*NAMES, "9997", "9998"], 1), TWINS)
    config = Config()
    config.packing.singles = "skip"
    assert len(packed(raw, config)) == 20
    config.packing.singles = "keep"
    assert by_person(packed(raw, config))["9998"][0] == "9998"


def test_too_few_families_to_train_on_is_an_error(tmp_path):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES[:10], 1), TWINS[:5])
    with pytest.raises(UserError, match="5 families, of which 1 are left to train"):
        packed(raw)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("missing", "listed, but there is no such file"),
        ("empty", "the file is empty"),
        ("text", "no image"),
        ("half", "cannot be decoded"),
        ("tiny", r"40 x 64 pixels are no face crop: expected sides of 48 or more"),
        ("strip", r"300 x 64 pixels are no face crop.*at most 1\.6 shorter"),
    ],
)
def test_a_picture_that_is_no_face_crop_is_refused_with_the_reason(tmp_path, content, reason):
    raw = raw_folder(tmp_path / "raw", dict.fromkeys(NAMES, 1), TWINS)
    path = raw / "9004/0.png"
    size = {"tiny": (40, 64), "strip": (300, 64)}.get(content, (64, 64))
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).save(path)
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"a face", "half": data[: len(data) // 2]}.get(content, data))
    if content == "missing":
        path.unlink()
    (sample,) = [s for s in packed(raw) if s.columns["person"] == "9004"]
    with pytest.raises(BadRecord, match=reason):
        sample.load()


def test_jpeg_and_png_are_kept_byte_for_byte_and_others_become_png(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (60, 64), dtype=np.uint8)
    for name, picture, kept in (
        ("a.jpg", Image.fromarray(pixels), True),
        ("b.png", Image.fromarray(pixels).convert("RGB"), True),
        ("c.pgm", Image.fromarray(pixels), False),
        ("d.png", Image.fromarray(pixels).convert("RGBA"), False),
    ):
        picture.save(tmp_path / name)
        stored = load(tmp_path / name, 48, 1.6)["image"]
        assert isinstance(stored, bytes)
        assert (stored == (tmp_path / name).read_bytes()) == kept, name
        if not kept:
            assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored)).convert("L")), pixels)


def test_a_picture_of_16_bits_is_refused_and_not_cut_to_white(tmp_path):
    Image.fromarray(np.full((64, 64), 4000, dtype=np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(BadRecord, match="mode I;16, whose range is unknown"):
        load(tmp_path / "deep.png", 48, 1.6)


def test_orl_faces_pack_as_strangers():
    config = Config()
    config.packing.singles, config.packing.val_share, config.packing.test_share = "keep", 0.25, 0.5
    found = packed(shared_faces(), config)
    assert len(found) == 400
    data = [str(s.columns["pairs"]) for s in found if s.columns["set"] == "test"]
    assert len(data) == 200
    words = " ".join(data).split()
    assert sum(word[0] == "s" for word in words) == 20 * 45
    assert "t" not in {word[0] for word in words}
    with Image.open(io.BytesIO(found[0].load()["image"])) as picture:  # type: ignore[arg-type]
        assert picture.size == (92, 112)


# Synthetic faces


def test_synthetic_faces_are_the_same_whoever_draws_them_and_pack(tmp_path):
    for name in ("once", "twice"):
        synthesize(tmp_path / name, count=2 * FAMILY_PICTURES + 6, seed=3)
    files = sorted(path.relative_to(tmp_path / "once") for path in (tmp_path / "once").rglob("*.jp*g"))
    assert len(files) == 2 * FAMILY_PICTURES + 6
    assert all((tmp_path / "once" / f).read_bytes() == (tmp_path / "twice" / f).read_bytes() for f in files)
    assert json.loads((tmp_path / "once" / PAIRS).read_text()) == [
        ["00010", "00011"],
        ["00020", "00021"],
        ["00030", "00031"],
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["once", "twice"]
    with pytest.raises(UserError, match="already holds files"):
        synthesize(tmp_path / "once", count=48, seed=3)
    with pytest.raises(UserError, match="expected an even number"):
        synthesize(tmp_path / "odd", count=47, seed=3)


def test_twins_share_a_genome_and_have_marks_of_their_own_down_to_difficulty_one():
    one, other = (draw_face(0, 5, twin, 0.3) for twin in (0, 1))
    stranger = draw_face(0, 6, 0, 0.3)
    assert np.array_equal(one.texture, other.texture) and one.moles[:2] == other.moles[:2]
    assert one.moles[2:] != other.moles[2:]
    apart = [sum(abs(one.traits[n] - face.traits[n]) for n in one.traits) for face in (other, stranger)]
    assert 0 < apart[0] < 0.5 * apart[1]
    same, again = (draw_face(0, 5, twin, 1.0) for twin in (0, 1))
    assert same.traits == again.traits and not any(mole.darkness for mole in same.moles[2:])


def test_pictures_of_strangers_differ_more_than_those_of_twins():
    def mean_face(family: int, twin: int) -> np.ndarray:
        shots = itertools.islice(pictures(0, family, twin), 12)
        return np.mean(
            [np.asarray(Image.open(io.BytesIO(shot)).convert("L"), float)[24:76, 24:72] for shot in shots], 0
        )

    found = {(f, t): mean_face(f, t) for f in range(6) for t in range(2)}

    def apart(a: tuple[int, int], b: tuple[int, int]) -> float:
        x, y = (found[k] - found[k].mean() for k in (a, b))
        return float(1 - (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum()))

    twins = np.mean([apart((f, 0), (f, 1)) for f in range(6)])
    strangers = np.mean([apart((f, 0), (g, 0)) for f in range(6) for g in range(f)])
    assert twins < 0.5 * strangers
