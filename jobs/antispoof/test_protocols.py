"""Protocols, raw folders and ASV scores."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.cases.antispoof import SPLIT, write_asvspoof_2019, write_lines, write_recording
from trainyard.errors import UserError

from .config import Config
from .pack import fit_artifacts
from .protocols import find_utterances, read_asv_rates, read_trials


def test_asvspoof_2019_is_read(asvspoof_2019: Path) -> None:
    found = find_utterances(asvspoof_2019, SPLIT)
    assert Counter(utterance.set for utterance in found) == {"train": 4, "val": 4, "test_2019": 4}
    assert found[0].key == "ASVspoof2019_LA_train/flac/LA_T_0000000.flac"
    assert (found[0].bonafide, found[0].attack, found[0].speaker) == (False, "A01", "LA_0000")
    assert (found[1].bonafide, found[1].attack) == (True, "-")
    assert find_utterances(asvspoof_2019.parent, SPLIT)[0].path == found[0].path, "the parent folder gives the same"


def test_each_set_has_its_own_asv_rates(asvspoof_2019: Path) -> None:
    artifacts = json.loads(fit_artifacts(asvspoof_2019, Config())["asv"])
    assert artifacts["val"]["false_alarm_spoof"] == 0.5 and artifacts["test_2019"]["false_alarm_spoof"] == 0.0
    assert sorted(artifacts) == ["test_2019", "val"]


def test_asvspoof_2021_is_read_phase_by_phase_alongside_2019(tmp_path: Path) -> None:
    write_asvspoof_2019(tmp_path / "LA")
    for track, fields in (("LA", "alaw ita_tx A07 spoof notrim"), ("DF", "nocodec asvspoof A14 spoof notrim")):
        more = "" if track == "LA" else " traditional_vocoder - - - -"
        lines = [f"LA_0009 {track}_E_{i:07d} {fields} {('eval', 'progress')[i % 2]}{more}" for i in range(2)]
        lines.append(
            f"LA_0009 {track}_E_0000009 {fields.replace('A07', '-').replace('spoof n', 'bonafide n')} eval{more}"
        )
        write_lines(tmp_path / f"keys/{track}/CM/trial_metadata.txt", *lines)
        write_recording(tmp_path / f"ASVspoof2021_{track}_eval/flac/{track}_E_0000000.flac")
    found = [utterance for utterance in find_utterances(tmp_path, SPLIT) if "2021" in utterance.set]
    assert Counter(utterance.set for utterance in found) == {
        "test_2021_la_eval": 2, "test_2021_la_progress": 1, "test_2021_df_eval": 2, "test_2021_df_progress": 1,
    }  # fmt: skip
    assert (found[0].attack, found[0].bonafide, found[2].bonafide) == ("A07", False, True)
    assert found[0].path is not None and found[2].path is None, "the last one is listed, but missing"


@pytest.mark.parametrize(
    ("bona", "fake"),
    [
        ("T_4850 T_0000000001 F - - - AC3 bonafide bonafide -", "T_4850 T_0000000002 F - - - AC3 A05 spoof -"),
        ("T_4850 T_0000000001 M - - bonafide", "T_4850 T_0000000002 M - A05 spoof"),
    ],
)
def test_asvspoof_5_is_read_with_the_key_in_any_place(tmp_path: Path, bona: str, fake: str) -> None:
    write_lines(tmp_path / "ASVspoof5.train.tsv", bona, fake)
    write_lines(tmp_path / "ASVspoof5.dev.track_1.tsv", bona.replace("T_00", "D_00").replace(" ", "\t"))
    write_recording(tmp_path / "flac_T/T_0000000002.flac")
    found = find_utterances(tmp_path, SPLIT)
    assert [(utterance.set, utterance.bonafide, utterance.attack, utterance.path is None) for utterance in found] == [
        ("train", True, "-", True), ("train", False, "A05", False), ("val", True, "-", True),
    ]  # fmt: skip


def test_fake_or_real_folders_are_read(tmp_path: Path) -> None:
    for part in ("training", "validation", "testing"):
        for name in ("real", "fake"):
            write_recording(tmp_path / "for-2sec" / part / name / "a.wav")
    found = find_utterances(tmp_path, SPLIT)
    assert [(utterance.set, utterance.bonafide) for utterance in found] == [
        ("train", True), ("train", False), ("val", True), ("val", False), ("test", True), ("test", False),
    ]  # fmt: skip
    assert find_utterances(tmp_path / "for-2sec", SPLIT)[0].key == "training/real/a.wav"


def test_an_own_folder_is_split_by_speaker_and_its_folders_name_the_attacks(tmp_path: Path) -> None:
    for speaker in range(24):
        for i in range(2):
            write_recording(tmp_path / f"bonafide/S{speaker}/{speaker}_{i}.wav", seconds=0.01)
            write_recording(tmp_path / f"spoof/TTS/S{speaker}/{speaker}_{i}.wav", seconds=0.01)
    found = find_utterances(tmp_path, SPLIT)
    sets = {
        utterance.speaker: {other.set for other in found if other.speaker == utterance.speaker} for utterance in found
    }
    assert len(found) == 96 and len(sets) == 24 and all(len(names) == 1 for names in sets.values())
    assert {utterance.set for utterance in found} == {"train", "val", "test"}
    assert {utterance.attack for utterance in found if not utterance.bonafide} == {"TTS"}


def test_a_csv_protocol_can_give_every_column(tmp_path: Path) -> None:
    write_lines(tmp_path / "protocol.csv", "path,label,attack,set", "x/a.wav,real,,train", "b.flac,0,VC,test_phone")
    write_recording(tmp_path / "x/a.wav")
    utterance, other = find_utterances(tmp_path, SPLIT)
    assert (utterance.key, utterance.bonafide, utterance.attack, utterance.set) == ("x/a.wav", True, "-", "train")
    assert (other.bonafide, other.attack, other.set, other.path) == (False, "VC", "test_phone", None)


@pytest.mark.parametrize(
    ("name", "lines", "message"),
    [
        ("p.txt", ["LA_1 U_1 - - bonafide", "LA_1 U_2 - A01"], r"p.txt, line 2: expected 5 fields.*found 4"),
        ("p.txt", ["LA_1 U_1 - - bonafide", "LA_1 U_2 - A01 fake"], "line 2: expected bonafide or spoof, found 'fake'"),
        ("p.txt", ["LA_1 U_1 - - bonafide", "LA_1 U_1 - A01 spoof"], "'U_1' is listed twice"),
        ("p.txt", ["LA_1 U_1 bonafide"], r"line 1: found 3 fields.*Expected 5 \(ASVspoof 2019"),
        ("p.txt", [], "the protocol is empty"),
        ("p.csv", ["file,label", "a.wav,1"], "expected a header with path and label"),
        ("p.csv", ["path,label", "a.wav,1,2"], r"line 2: expected 2 fields \(path,label\), found 3"),
        ("p.csv", ["path,label", "a.wav,maybe"], "label 'maybe': expected one of bonafide"),
        ("p.csv", ["path,label,set", "a.wav,1,dev"], "set 'dev': expected train, val, test or test_NAME"),
    ],
)
def test_a_bad_protocol_is_refused_with_the_place(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_trials(write_lines(tmp_path / name, *lines))


def test_a_folder_without_training_data_or_keys_says_what_to_type(tmp_path: Path) -> None:
    write_recording(tmp_path / "ASVspoof2021_LA_eval/flac/LA_E_0000000.flac")
    with pytest.raises(UserError, match=r"its keys are missing.*trainyard predict"):
        find_utterances(tmp_path, SPLIT)
    write_lines(tmp_path / "keys/LA/CM/trial_metadata.txt", "LA_0009 LA_E_0000000 alaw ita_tx A07 spoof notrim eval")
    with pytest.raises(UserError, match=r"No utterance is left to train on.*test_2021_la_eval"):
        find_utterances(tmp_path, SPLIT)


def test_bad_asv_scores_are_refused_with_the_place(tmp_path: Path) -> None:
    for lines, message in (
        (["bonafide target 1.0", "bonafide target"], "line 2: expected 'source target"),
        (["bonafide target x"], "line 1: expected"),
        (["bonafide target 1.0", "bonafide nontarget 0.0"], "no ASV spoof trial"),
    ):
        with pytest.raises(UserError, match=message):
            read_asv_rates(write_lines(tmp_path / "asv.txt", *lines))
