"""The verbs `score-check` and `score-file`, and score files."""

import argparse
import csv
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.antispoof import SCORES, find_shared_audio, write_lines
from trainyard.errors import UserError
from trainyard.tables import write_table

from . import commands, scores
from .scores import Line


def run_verb(*words: str) -> int:
    """Run one of the family's verbs as from the command line."""
    parser = argparse.ArgumentParser()
    commands.add(parser.add_subparsers())
    args = parser.parse_args(words)
    return int(args.command(args))


KEYS = ["S1 U_1 - - bonafide", "S1 U_2 - A01 spoof", "S2 U_3 - - bonafide", "S2 U_4 - A02 spoof"]


RIGHT = ["U_1 - bonafide 2.0", "U_2 A01 spoof -1.0", "U_3 - bonafide 1.0", "U_4 A02 spoof -2.0"]


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        (RIGHT, 0, "eer            0.0000 %"),
        (["U_1 2.0", "U_2 -1", "U_3 1e0", "U_4 -2"], 0, "4 scores in the asv2021 format"),
        (["filename\tcm-score", "U_1\t2", "U_2\t-1", "U_3\t1", "U_4\t-2"], 0, "in the asv5 format"),
        (RIGHT[:3], 1, "1 of 4 utterances have no score: U_4"),
        ([*RIGHT, RIGHT[1]], 1, "1 utterances have more than one score: U_2"),
        ([*RIGHT, "U_5 - bonafide 0"], 1, "1 utterances are not in the protocol: U_5"),
        ([line.replace("-1.0", "nan") for line in RIGHT], 1, "1 scores are not finite numbers: U_2"),
        ([RIGHT[0].replace("- bona", "A01 bona").replace("bonafide", "spoof"), *RIGHT[1:]], 1, "1 keys differ from"),
        (
            ["U_1 -2.0", "U_2 1.0", "U_3 -1.0", "U_4 2.0"],
            1,
            "inverted: high must mean bona fide. The EER is 100.00 %",
        ),
        (["U_1 3", "U_2 3", "U_3 3", "U_4 3"], 1, "all scores are 3"),
        (["U_1 0.9", "U_2 0.1", "U_3 0.8", "U_4 0.2"], 0, "probabilities, not log-odds"),
        (RIGHT[::-1], 0, "the order differs from the protocol's"),
    ],
)
def test_score_check_tells_valid_files_from_invalid_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], code: int, message: str
) -> None:
    path = write_lines(tmp_path / "scores.txt", *lines)
    assert run_verb("score-check", str(path), "--protocol", str(write_lines(tmp_path / "keys.txt", *KEYS))) == code
    assert message in capsys.readouterr().out


def test_a_missing_or_broken_score_file_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"away.txt: no such score file\. Expected lines of .*score-file write one"):
        run_verb("score-check", str(tmp_path / "away.txt"))
    broken = write_lines(tmp_path / "scores.txt", RIGHT[0], "U_2 A01 spoof")
    with pytest.raises(
        UserError, match=r"scores.txt, line 2: expected 4 fields .*, found 3: .* write the file again: "
    ):
        run_verb("score-check", str(broken))


@pytest.mark.slow
def test_a_score_file_of_a_known_set_without_a_trial_is_invalid_even_without_a_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (find_shared_audio("asvspoof2019_scores") / SCORES).read_text().splitlines()
    removed = next(i for i, line in enumerate(text) if " bonafide " in line)
    path = write_lines(tmp_path / "scores.txt", *text[:removed], *text[removed + 1 :])
    assert run_verb("score-check", str(path)) == 1
    assert (
        "7,354 bona fide and 63,882 spoofed trials, but the ASVspoof 2019 LA evaluation set" in capsys.readouterr().out
    )


def test_error_rates_for_2021_use_the_evaluation_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = (("- bonafide", "eval"), ("A07 spoof", "eval"), ("A07 spoof", "progress"), ("- bonafide", "hidden"))
    keys = [f"S LA_E_{i} alaw ita_tx {key} notrim {phase}" for i, (key, phase) in enumerate(kinds)]
    path = write_lines(tmp_path / "scores.txt", "LA_E_0 1.0", "LA_E_1 0.0", "LA_E_2 5.0", "LA_E_3 -5.0")
    assert (
        run_verb("score-check", str(path), "--protocol", str(write_lines(tmp_path / "trial_metadata.txt", *keys))) == 0
    )
    output = capsys.readouterr().out
    assert "for the eval phase" in output and "eer            0.0000 %" in output and "bonafide       1" in output


def test_a_score_file_without_keys_says_that_it_needs_a_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verb("score-check", str(write_lines(tmp_path / "scores.txt", "U_1 2.0"))) == 0
    assert "no keys: pass --protocol" in capsys.readouterr().out
    assert run_verb("score-check", str(write_lines(tmp_path / "scores.txt", "LA_D_1 2.0", "LA_D_2 1.0"))) == 1
    assert "2 trials, but the ASVspoof 2019 LA development set has 24,844 trials" in capsys.readouterr().out


def test_a_list_of_names_reveals_missing_scores_and_the_files_own_keys_are_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = write_lines(tmp_path / "names.txt", "U_1", "U_2", "U_3", "U_4")
    assert run_verb("score-check", str(write_lines(tmp_path / "scores.txt", *RIGHT)), "--protocol", str(names)) == 0
    assert "eer            0.0000 %" in capsys.readouterr().out
    assert run_verb("score-check", str(write_lines(tmp_path / "scores.txt", *RIGHT[1:])), "--protocol", str(names)) == 1
    assert "1 of 4 utterances have no score: U_1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["U_1 2.0", "U_2"], r"line 2: expected 2 fields \(utterance score\), found 1"),
        ([*RIGHT, "U_5 1.0"], r"line 5: expected 4 fields \(utterance attack key score\), found 2"),
        (["U_1 high"], "line 1: 'high' is not a score"),
        (["filename\tcm-score"], "the score file is empty"),
        (["U_1 - real 1.0"], "line 1: key 'real': expected bonafide or spoof"),
        ([], "the score file is empty"),
    ],
)
def test_an_invalid_score_file_is_refused_with_the_place(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        scores.read(write_lines(tmp_path / "scores.txt", *lines))


@pytest.mark.parametrize("form", scores.FORMATS)
def test_a_written_score_file_reads_back_equal(tmp_path: Path, form: str) -> None:
    lines = [Line("U_1", 2.25, True), Line("U_2", -0.1, False, "A01")]
    scores.write(tmp_path / "scores.txt", lines, form=form)
    found_form, found_lines = scores.read(tmp_path / "scores.txt")
    assert found_form == form
    assert found_lines == (lines if form == "asv2019" else [Line(line.utterance, line.score) for line in lines])


_NAMES = st.text(st.sampled_from("ab \t\n\r\x0b\x85\xa0\u2028\ufeff\ud800\u00e9=-'") | st.characters(), max_size=6)
_LINES = st.builds(Line, _NAMES | st.just("filename"), st.floats(allow_nan=False), st.booleans(), _NAMES | st.just("-"))


@settings(max_examples=300)
@given(st.lists(_LINES, min_size=1, max_size=3), st.sampled_from(scores.FORMATS))
def test_a_score_file_holds_any_name_or_refuses_it_before_anything_is_written(
    tmp_path_factory: pytest.TempPathFactory, lines: list[Line], form: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile-scores.txt"
    path.unlink(missing_ok=True)
    try:
        scores.write(path, lines, form=form)
    except UserError as error:
        assert re.fullmatch(r"The (name|attack) .*, so the \w+ format cannot hold it\. Rename .*\.", str(error))
        assert not path.exists()
    else:
        kept = lines if form == "asv2019" else [Line(line.utterance, line.score) for line in lines]
        assert scores.read(path) == (form, kept)


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("my voice", "asv2021", "The name 'my voice' contains ' ', so the asv2021 format cannot hold it. Rename the "
         "recording and predict again, or write --form asv5, which takes spaces."),
        ("a\tb", "asv5", r"The name 'a\tb' contains '\t', so the asv5 format cannot hold it. Rename the recording and "
         "predict again."),
        ("", "asv5", "The name '' is empty"),
    ],
)  # fmt: skip
def test_a_name_that_no_line_can_hold_is_refused_when_the_score_file_is_written(
    tmp_path: Path, name: str, form: str, message: str
) -> None:
    table, out = tmp_path / "out.csv", tmp_path / "scores.txt"
    with table.open("w", newline="", encoding="utf-8") as file:
        write_table(file, ["utterance", "score"], [{"utterance": name, "score": 1.0}])
    with pytest.raises(UserError, match=re.escape(message)):
        run_verb("score-file", str(table), str(out), "--form", form)
    assert not out.exists()


def test_names_with_spaces_and_formulas_pass_from_the_table_through_the_score_file_to_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, out = tmp_path / "out.csv", tmp_path / "scores.txt"
    names = ["my voice", "=1+1", "caf\u00e9 \u00a0", "filename"]
    with table.open("w", newline="", encoding="utf-8") as file:
        rows = [{"path": f"{name}.wav", "utterance": name, "score": -0.5 + i} for i, name in enumerate(names)]
        write_table(file, ["path", "utterance", "score"], rows)
    assert run_verb("score-file", str(table), str(out), "--form", "asv5") == 0
    assert [line.utterance for line in scores.read(out)[1]] == names
    assert run_verb("score-check", str(out)) == 0
    assert "4 scores in the asv5 format" in capsys.readouterr().out


def test_a_table_without_scores_or_with_a_word_as_score_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "out.csv"
    for content, message in (("", "there are no scores to write"), ("a,high\n", "score of 'a' is 'high'")):
        table.write_text(f"utterance,score\n{content}")
        with pytest.raises(UserError, match=message):
            run_verb("score-file", str(table), str(tmp_path / "scores.txt"))


def test_predictions_become_an_official_score_file_in_the_order_of_the_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, keys = tmp_path / "out.csv", write_lines(tmp_path / "keys.txt", *KEYS)
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["path", "utterance", "score"])
        writer.writeheader()
        for i in (4, 2, 3, 1):
            writer.writerow({"path": f"x/U_{i}.flac", "utterance": f"U_{i}", "score": i % 2})
    out = tmp_path / "scores.txt"
    assert run_verb("score-file", str(table), str(out), "--form", "asv2019", "--protocol", str(keys)) == 0
    assert out.read_text().splitlines()[:2] == ["U_1 - bonafide 1.0", "U_2 A01 spoof 0.0"]
    assert run_verb("score-check", str(out), "--protocol", str(keys)) == 0
    capsys.readouterr()
    with pytest.raises(UserError, match=r"needs a key on every line. Pass --protocol"):
        run_verb("score-file", str(table), str(out), "--form", "asv2019")
    write_lines(keys, *KEYS, "S3 U_9 - - bonafide")
    with pytest.raises(UserError, match=r"1 of the 5 utterances of .* have no score, for example U_9"):
        run_verb("score-file", str(table), str(out), "--protocol", str(keys))


def test_names_of_a_score_file_may_be_composed_otherwise_than_those_of_the_protocol(tmp_path: Path) -> None:
    keys = write_lines(tmp_path / "keys.txt", "S1 \u00e91 - - bonafide", "S1 \u00e92 - A01 spoof")
    table = write_lines(tmp_path / "out.csv", "utterance,score", "e\u03011,1", "e\u03012,0")  # from a Mac
    out = tmp_path / "scores.txt"
    assert run_verb("score-file", str(table), str(out), "--form", "asv2019", "--protocol", str(keys)) == 0
    scores_of_a_mac = write_lines(tmp_path / "mac.txt", "e\u03011 - bonafide 1.0", "e\u03012 A01 spoof 0.0")
    for file in (out, scores_of_a_mac):
        assert run_verb("score-check", str(file), "--protocol", str(keys)) == 0


def test_negated_scores_are_those_of_the_table_with_the_other_sign_and_said_to_be_inverted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, keys = tmp_path / "out.csv", write_lines(tmp_path / "keys.txt", *KEYS)
    with table.open("w", newline="", encoding="utf-8") as file:
        write_table(
            file, ["utterance", "score"], [{"utterance": f"U_{i}", "score": (i % 2) - 0.25} for i in range(1, 5)]
        )
    for form in scores.FORMATS:
        plain, negated = (tmp_path / f"{name}-{form}.txt" for name in ("plain", "negated"))
        typed = [str(table), "--form", form, "--protocol", str(keys)]
        assert run_verb("score-file", typed[0], str(plain), *typed[1:]) == 0
        assert "High means spoofed" not in capsys.readouterr().out
        assert run_verb("score-file", typed[0], str(negated), *typed[1:], "--negate") == 0
        assert "High means spoofed in this file" in capsys.readouterr().out
        assert [line.score for line in scores.read(negated)[1]] == [-line.score for line in scores.read(plain)[1]]
        assert run_verb("score-check", str(plain), "--protocol", str(keys)) == 0
        assert run_verb("score-check", str(negated), "--protocol", str(keys)) == 1
        assert "inverted: high must mean bona fide" in capsys.readouterr().out
