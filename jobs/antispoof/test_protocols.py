"""Protocols, raw folders and ASV scores."""

import json
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases.antispoof import SPLIT, write_asvspoof_2019, write_lines, write_recording
from trainyard.config.compose import compose
from trainyard.errors import UserError

from .config import Config
from .pack import fit_artifacts
from .protocols import Utterance, assign_folds, find_utterances, list_utterances, read_asv_rates, read_trials

JOBS = Path(__file__).parents[1]
ACUTE = "\u0301"  # after an e, what a Mac makes of an e with an accent


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
    write_lines(tmp_path / "protocol.csv", "path,label,attack,set", "x/a.wav,real,,train", "b.flac,fake,VC,test_phone")
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
        ("p.csv", ["file,label", "a.wav,real"], "line 1: no column path. It has: file, label"),
        (
            "p.csv",
            ["path,label,kind", "a.wav,real,2"],
            "line 1: expected the columns path, label, and maybe attack, speaker, set; found 'kind'. Rename",
        ),
        ("p.csv", ["path,label", "a.wav,real,2"], "line 2: 3 cells, the header has 2"),
        ("p.csv", ["path,label", ",real"], "line 2: names no file"),
        ("p.csv", ["path,label", "a.wav,maybe"], "label 'maybe': expected one of bonafide"),
        ("p.csv", ["path,label", "a.wav,1"], r"label '1': expected one of .*fake\. Write one of these words\.$"),
        ("p.csv", ["path,label,set", "a.wav,real,dev"], "set 'dev': expected train, val, test or test_NAME"),
    ],
)
def test_a_bad_protocol_is_refused_with_the_place(tmp_path: Path, name: str, lines: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_trials(write_lines(tmp_path / name, *lines))


def test_codes_are_labels_only_once_it_is_said_which_one_means_bona_fide(tmp_path: Path) -> None:
    write_lines(tmp_path / "protocol.csv", "path,label", "real.wav,0", "fake.wav,1")
    with pytest.raises(UserError, match=r"line 2: label '0': .* packing.bonafide_label=0, if this one does") as error:
        list_utterances(tmp_path)
    assert [one.bonafide for one in list_utterances(tmp_path, "0")] == [True, False]
    (remedy,) = (word for word in str(error.value).split() if word.startswith("packing."))
    config = compose("antispoof_smoke", [remedy.rstrip(","), f"data.path={tmp_path}"], JOBS)
    assert isinstance(config, Config)
    found = find_utterances(tmp_path, replace(config.packing, val_share=0, test_share=0))
    assert [one.bonafide for one in found] == [True, False]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_is_read_with_any_separator_and_with_a_byte_order_mark(
    tmp_path: Path, encoding: str, separator: str
) -> None:
    text = "Path,Label\na.wav,real\nb.wav,fake\n".replace(",", separator)
    (tmp_path / "protocol.csv").write_bytes(text.encode(encoding))
    assert [(one.key, one.bonafide) for one in list_utterances(tmp_path)] == [("a.wav", True), ("b.wav", False)]


def test_a_table_in_another_encoding_is_refused_with_the_line_to_type(tmp_path: Path) -> None:
    path = tmp_path / "a b" / "protocol.csv"
    path.parent.mkdir()
    path.write_bytes("path,label\ncaf\u00e9.wav,real\n".encode("cp1252"))
    with pytest.raises(UserError, match=r"line 2: expected UTF-8, found the byte 0xe9.*convert it: iconv") as error:
        list_utterances(path.parent)
    subprocess.run(["bash", "-c", str(error.value).partition("convert it: ")[2]], check=True)
    assert [one.key for one in list_utterances(path.parent)] == ["caf\u00e9.wav"]


def test_paths_in_a_table_stay_in_the_folder_whatever_machine_wrote_them(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    for name in ("raw/x/a.wav", "raw/x/b.wav", "c.wav", f"raw/e{ACUTE}.wav"):
        write_recording(tmp_path / name)
    lines = [f"{raw}/x/a.wav,real", "/somewhere/else/x/b.wav,fake", "\u00e9.wav,fake"]  # the last one composed
    write_lines(raw / "protocol.csv", "path,label", *lines)
    found = list_utterances(raw)
    assert [one.key for one in found] == ["x/a.wav", "x/b.wav", f"e{ACUTE}.wav"] and all(one.path for one in found)
    for name in (f"{tmp_path}/c.wav", "../c.wav"):
        write_lines(raw / "protocol.csv", "path,label", f"{name},real")
        with pytest.raises(UserError, match=f"protocol.csv: '{name}' is outside of {raw}. Move the file into it"):
            list_utterances(raw)
    write_lines(raw / "protocol.csv", "path,label", "x/a.wav,real", "y/../x/a.wav,fake")
    with pytest.raises(UserError, match=r"'x/a.wav' and 'y/../x/a.wav' are one file"):
        list_utterances(raw)


LAYOUTS: dict[str, tuple[dict[str, list[str]], list[str], list[str]]] = {
    "In-the-Wild": (
        {"meta.csv": ["file,speaker,label", "0.wav,Alec Guinness,spoof", "1.wav,Alec Guinness,bona-fide"]},
        ["0.wav", "1.wav"],
        ["0.wav - spoof Alec Guinness", "1.wav + - Alec Guinness"],
    ),
    "ASVspoof 2019 PA": (
        {
            "ASVspoof2019_PA_cm_protocols/ASVspoof2019.PA.cm.train.trn.txt": [
                "PA_0079 PA_T_0000001 aaa - bonafide",
                "PA_0079 PA_T_0005401 aaa AA spoof",
            ]
        },
        [f"ASVspoof2019_PA_train/flac/{name}.flac" for name in ("PA_T_0000001", "PA_T_0005401")],
        [
            "ASVspoof2019_PA_train/flac/PA_T_0000001.flac + - PA_0079 train",
            "ASVspoof2019_PA_train/flac/PA_T_0005401.flac - AA PA_0079 train",
        ],
    ),
    "ASVspoof 5 with a header": (
        {
            "ASVspoof5.train.tsv": [
                "SPEAKER_ID FLAC_FILE_NAME GENDER CODEC CODEC_Q CODEC_SEED ATTACK_TAG ATTACK_LABEL KEY TMP",
                "T_4850 T_0000000000 F - - - AC3 A05 spoof -",
                "T_4851 T_0000000001 F - - - - bonafide bonafide -",
            ]
        },
        ["flac_T/T_0000000000.flac", "flac_T/T_0000000001.flac"],
        ["flac_T/T_0000000000.flac - A05 T_4850 train", "flac_T/T_0000000001.flac + - T_4851 train"],
    ),
    "ADD 2022": (
        {
            "label/train_label.txt": ["ADD_T_00000000.wav genuine", "ADD_T_00000001.wav fake"],
            "label/dev_label.txt": ["ADD_D_00000000.wav fake"],
        },
        ["train/ADD_T_00000000.wav", "train/ADD_T_00000001.wav", "dev/ADD_D_00000000.wav"],
        [
            "dev/ADD_D_00000000.wav - spoof  val",
            "train/ADD_T_00000000.wav + -  train",
            "train/ADD_T_00000001.wav - spoof  train",
        ],
    ),
    "WaveFake": (
        {},
        ["LJSpeech-1.1/wavs/LJ001-0001.wav", "ljspeech_melgan/LJ001-0001_gen.wav", "jsut_real/BASIC5000_0001.wav"],
        [
            "LJSpeech-1.1/wavs/LJ001-0001.wav + - ",
            "jsut_real/BASIC5000_0001.wav + - ",
            "ljspeech_melgan/LJ001-0001_gen.wav - ljspeech_melgan ",
        ],
    ),
}
"""Layouts of public databases: text files, recordings, and how they are read."""


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("below", ["", "database"])
def test_public_layouts_are_read_wherever_they_lie(tmp_path: Path, name: str, below: str) -> None:
    texts, recordings, expected = LAYOUTS[name]
    for path, lines in texts.items():
        write_lines(tmp_path / below / path, *lines)
    for recording in recordings:
        write_recording(tmp_path / below / recording)
    found = list_utterances(tmp_path)
    assert all(one.path for one in found)
    read = [f"{one.key} {'-+'[one.bonafide]} {one.attack} {one.speaker} {one.set}".rstrip(" ") for one in found]
    assert sorted(read) == [f"{below}/{line}".lstrip("/").rstrip(" ") for line in expected]


def test_tables_and_lists_of_something_else_hide_no_folders(tmp_path: Path) -> None:
    for name in ("real/a.wav", "fake/b.wav"):
        write_recording(tmp_path / name)
    write_lines(tmp_path / "meta.csv", "id,title", "1,x")
    write_lines(tmp_path / "labels.txt", "0 real", "1 fake")
    assert [(one.key, one.bonafide) for one in list_utterances(tmp_path)] == [
        ("fake/b.wav", False),
        ("real/a.wav", True),
    ]


def test_recordings_that_are_listed_and_missing_are_named_whatever_machine_wrote_the_list(tmp_path: Path) -> None:
    write_recording(tmp_path / "wav/1.wav")
    write_lines(tmp_path / "label.txt", "1.wav genuine", "/gone/2.wav fake")
    write_lines(tmp_path / "protocol.csv", "path,label", "/gone/3.wav,real")
    found = {one.key: one.path for one in list_utterances(tmp_path)}
    assert found == {"wav/1.wav": tmp_path / "wav/1.wav", "/gone/2.wav": None, "/gone/3.wav": None}


def test_copies_of_a_recording_stay_in_its_set(tmp_path: Path) -> None:
    for number in range(40):
        write_recording(tmp_path / f"LJSpeech-1.1/wavs/LJ001-{number:04d}.wav")
        write_recording(tmp_path / f"ljspeech_melgan/LJ001-{number:04d}_gen.wav")
    sets = {Path(one.key).stem: one.set for one in find_utterances(tmp_path, SPLIT)}
    assert len(set(sets.values())) == 3 and all(sets[name.removesuffix("_gen")] == sets[name] for name in sets)


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


@pytest.mark.parametrize(
    ("bonafide", "spoofed", "together"),
    [
        (["ann", "bob", "eve"], ["tts", "vc"], "speaker"),  # no speaker has both classes
        (["ann", "bob"], ["ann", "bob"], "speaker"),
        (["ann"], ["tts", "vc"], "name"),  # without ann's fold nothing would be bona fide
        ([""], [""], "name"),
    ],
)
def test_every_fold_leaves_both_classes_and_parts_no_group(
    bonafide: list[str], spoofed: list[str], together: str
) -> None:
    given = [
        Utterance(f"{label}/{speaker}/{take}{'_gen' if take == 3 else ''}.wav", None, label, "-", speaker, "train")
        for label, speakers in ((True, bonafide), (False, spoofed))
        for speaker in speakers
        for take in range(9)
    ]
    found = assign_folds([*given, replace(given[0], set="val")], count=5)
    assert found[-1].fold == 0 and {one.fold for one in found[:-1]} <= {1, 2, 3, 4, 5}
    for left_out in {one.fold for one in found[:-1]}:
        assert {one.bonafide for one in found[:-1] if one.fold != left_out} == {True, False}
    groups = {
        (one.speaker if together == "speaker" else one.key[-5], one.fold) for one in found[:-1] if "gen" not in one.key
    }
    assert len(groups) == len({group for group, _ in groups})
