"""Reads and writes score files in the formats of the challenges, and checks them against a protocol.

Formats: `utterance attack key score` (written by the 2019 baselines), `utterance score` (submissions of 2019 and
2021), and a table `filename<tab>cm-score` with that header (ASVspoof 5).
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from trainyard.errors import UserError
from trainyard.files import write_atomically
from trainyard.foreign import read_lines
from trainyard.text import compose_letters, join_names

from . import metrics
from .metrics import AsvRates
from .protocols import BONAFIDE, SPOOF, Trial

FORMATS = ("asv2019", "asv2021", "asv5")
KNOWN = {  # ASVspoof 2019 LA (Wang et al. 2020, arXiv:1911.01601, table 3): trials by name prefix
    "LA_T_": ("ASVspoof 2019 LA training", 2580, 22800),
    "LA_D_": ("ASVspoof 2019 LA development", 2548, 22296),
    "LA_E_": ("ASVspoof 2019 LA evaluation", 7355, 63882),
}


@dataclass(frozen=True)
class Line:
    """One line of a score file."""

    utterance: str
    score: float
    bonafide: bool | None = None  # None: the format has no key
    attack: str = "-"


@dataclass(frozen=True)
class Verdict:
    """The result of checking a score file."""

    trials: int
    faults: list[str] = field(default_factory=list)  # each makes the file invalid
    notes: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # see `metrics.compute_metrics`; empty without keys


def write(path: Path, lines: Sequence[Line], *, form: str) -> None:
    """Write a score file that `read` reads back equal, apart from keys and attacks where the format has none.

    Raises:
        UserError: there are no lines, the format needs keys and a line has none, or the format cannot hold a name.
            No file is written then.
    """
    if not lines:
        raise UserError(f"{path}: there are no scores to write. Predict a folder of recordings first.")
    rows = [_format_line(line, form) for line in lines]
    header = ["filename\tcm-score"] if form == "asv5" else []
    write_atomically(path, "".join(f"{row}\n" for row in [*header, *rows]))


def read(path: Path) -> tuple[str, list[Line]]:
    """Return the format of a score file, one of `FORMATS`, and its lines.

    With a header whose columns a tab separates, names may contain spaces.

    Raises:
        UserError: the file is missing, empty or not UTF-8, or a line has another format than the first.
    """
    if not path.is_file():
        raise UserError(
            f"{path}: no such score file. Expected lines of 'utterance score' or 'utterance attack key score'; "
            "trainyard predict and score-file write one."
        )
    rows = read_lines(path)
    header = rows[0][1].split() if rows else []
    has_header = bool(header) and header[0].lower() == "filename" and not _is_number(header[-1])
    separator = "\t" if has_header and "\t" in rows[0][1] else None  # None: any white space
    split_rows = [(number, line.split(separator)) for number, line in rows[has_header:]]
    if not split_rows:
        raise UserError(f"{path}: the score file is empty.")
    form = "asv5" if has_header else "asv2019" if len(split_rows[0][1]) == 4 else "asv2021"
    return form, [_parse_line(path, number, words, 4 if form == "asv2019" else 2) for number, words in split_rows]


def check(form: str, lines: Sequence[Line], *, protocol: Sequence[Trial] | None, asv: AsvRates | None) -> Verdict:
    """Check that a score file is complete and that high scores mean bona fide, and compute its metrics.

    Args:
        form: its format, as returned by `read`.
        protocol: expected trials; None: use the file's own keys, and check completeness only if the names belong to a
            known set.
        asv: for the t-DCF; None: no t-DCF.
    """
    verdict = Verdict(len(lines))
    faults, notes = verdict.faults, verdict.notes
    counts = Counter(line.utterance for line in lines)
    duplicates = [name for name, count in counts.items() if count > 1]
    if duplicates:
        faults.append(f"{len(duplicates)} utterances have more than one score: {join_names(duplicates, most=5)}")
    non_finite = [line.utterance for line in lines if not np.isfinite(line.score)]
    if non_finite:
        faults.append(f"{len(non_finite)} scores are not finite numbers: {join_names(non_finite, most=5)}")
    if protocol is not None:
        lines = _check_against_protocol(lines, protocol, verdict)
    else:
        _check_against_known_sets(lines, counts, verdict)
        if form != "asv2019":
            notes.append("no keys: pass --protocol FILE to get error rates and to check the sign of the scores")
    keyed = [line for line in lines if line.bonafide is not None and np.isfinite(line.score)]
    if len({line.bonafide for line in keyed}) < 2:
        if keyed:
            faults.append("all trials are of one class: error rates need both")
        return verdict
    _score(keyed, asv, verdict)
    return verdict


def _score(lines: Sequence[Line], asv: AsvRates | None, verdict: Verdict) -> None:
    values = np.array([line.score for line in lines])
    genuine = np.array([bool(line.bonafide) for line in lines])
    attack = [line.attack for line in lines]
    distinct = len(np.unique(values))
    if distinct < 2:
        verdict.faults.append(f"all scores are {values[0]:g}")
        return
    verdict.metrics.update(metrics.compute_metrics(values, genuine, attack, asv=asv))
    inverted_eer = metrics.eer(-values[genuine], -values[~genuine])
    if verdict.metrics["eer"] > 0.5 > inverted_eer:
        verdict.faults.append(
            f"inverted: high must mean bona fide. The EER is {100 * verdict.metrics['eer']:.2f} %, and "
            f"{100 * inverted_eer:.2f} % with the sign of every score changed"
        )
    if distinct < 0.5 * len(values):
        verdict.notes.append(f"only {distinct} distinct scores in {len(values)} trials: ties count against the system")
    if values.min() >= 0 and values.max() <= 1:
        verdict.notes.append(
            "scores are in 0..1, so they are probabilities, not log-odds: cllr and act_dcf are meaningless"
        )


def _check_against_protocol(lines: Sequence[Line], protocol: Sequence[Trial], verdict: Verdict) -> list[Line]:
    """Compare a file with its protocol; return its lines with the protocol's keys."""
    lines = [replace(line, utterance=compose_letters(line.utterance)) for line in lines]
    protocol = [replace(trial, utterance=compose_letters(trial.utterance)) for trial in protocol]
    listed = {trial.utterance: trial for trial in protocol}
    given = {line.utterance for line in lines}
    missing = [name for name in listed if name not in given]
    unknown = [line.utterance for line in lines if line.utterance not in listed]
    if missing:
        verdict.faults.append(
            f"{len(missing)} of {len(listed)} utterances have no score: {join_names(missing, most=5)}"
        )
    if unknown:
        verdict.faults.append(f"{len(unknown)} utterances are not in the protocol: {join_names(unknown, most=5)}")
    wrong = [
        line.utterance
        for line in lines
        if line.utterance in listed and {line.bonafide, listed[line.utterance].bonafide} == {True, False}
    ]
    if wrong:
        verdict.faults.append(f"{len(wrong)} keys differ from the protocol's: {join_names(wrong, most=5)}")
    if not verdict.faults and [line.utterance for line in lines] != list(listed):
        verdict.notes.append("the order differs from the protocol's; no official tool needs it")
    phases = {trial.phase for trial in protocol}
    if len(phases) > 1 and "eval" in phases:
        verdict.notes.append("error rates are for the eval phase, as in the challenge; completeness is for all phases")
        phases = {"eval"}
    keyed = []
    for line in lines:
        if line.utterance in listed and listed[line.utterance].phase in phases:
            trial = listed[line.utterance]
            bonafide = line.bonafide if trial.bonafide is None else trial.bonafide
            keyed.append(
                Line(line.utterance, line.score, bonafide, line.attack if trial.attack == "-" else trial.attack)
            )
    return keyed


def _check_against_known_sets(lines: Sequence[Line], counts: Counter[str], verdict: Verdict) -> None:
    """Compare a file with the size of the set that its names belong to."""
    prefix = lines[0].utterance[:5] if lines else ""
    if prefix not in KNOWN or any(not name.startswith(prefix) for name in counts):
        verdict.notes.append("the names match no known set: pass --protocol FILE to check that the file is complete")
        return
    name, bonafide, spoof = KNOWN[prefix]
    kinds = Counter(line.bonafide for line in lines)
    if None in kinds:
        found, expected = (f"{count:,} trials" for count in (len(counts), bonafide + spoof))
    else:
        found = f"{kinds[True]:,} bona fide and {kinds[False]:,} spoofed trials"
        expected = f"{bonafide:,} bona fide and {spoof:,} spoofed trials"
    if found == expected:
        verdict.notes.append(f"as many trials as the {name} set: {found}")
    elif len(lines) > bonafide + spoof:
        verdict.notes.append(f"more trials than the {name} set. Which set is it? Pass --protocol FILE")
    else:
        verdict.faults.append(f"{found}, but the {name} set has {expected}. Is it another set? Pass --protocol FILE")


def _parse_line(path: Path, number: int, words: list[str], fields: int) -> Line:
    if len(words) != fields:
        formats = {4: "utterance attack key score", 2: "utterance score"}
        raise UserError(
            f"{path}, line {number}: expected {fields} fields ({formats[fields]}), found {len(words)}: "
            f"'{' '.join(words)}'. Fix the line, or write the file again: trainyard score-file TABLE.csv {path}"
        )
    try:
        score = float(words[-1])
    except ValueError:
        raise UserError(f"{path}, line {number}: '{words[-1]}' is not a score.") from None
    if fields == 2:
        return Line(words[0], score)
    if words[2] not in (BONAFIDE, SPOOF):
        raise UserError(f"{path}, line {number}: key '{words[2]}': expected {BONAFIDE} or {SPOOF}.")
    return Line(words[0], score, words[2] == BONAFIDE, words[1])


def _format_line(line: Line, form: str) -> str:
    _check_writable("name", line.utterance, form)
    if form != "asv2019":
        return f"{line.utterance}{chr(9) if form == 'asv5' else ' '}{line.score!r}"
    _check_writable("attack", line.attack, form)
    if line.bonafide is None:
        raise UserError(
            f"{line.utterance}: the asv2019 format needs a key on every line. Pass --protocol, or "
            "use another format: --form asv2021 or asv5."
        )
    return f"{line.utterance} {line.attack} {BONAFIDE if line.bonafide else SPOOF} {line.score!r}"


def _check_writable(what: str, text: str, form: str) -> None:
    """Raise a UserError if a name or an attack would read back as another one."""
    separators = r"\t\r\n" if form == "asv5" else r"\s\ufeff"  # a byte order mark at the start is not read
    found = re.search(rf"[{separators}\ud800-\udfff]", text)  # UTF-8 holds no surrogates
    if text and not found:
        return
    fault = f"contains {found[0]!a}" if found else "is empty"
    place = "recording and predict again" if what == "name" else "attack in the protocol"
    remedy = f"Rename the {place}" + (", or write --form asv5, which takes spaces." if form != "asv5" else ".")
    raise UserError(f"The {what} {text!a} {fault}, so the {form} format cannot hold it. {remedy}")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
