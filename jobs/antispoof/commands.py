"""The family's own verbs: `score-check` and `score-file`."""

import argparse
from pathlib import Path
from typing import Any

from trainyard.errors import UserError
from trainyard.tables import read_table
from trainyard.terminal import say
from trainyard.text import compose_letters, quote_path


def add(verbs: Any) -> None:
    """Add the verbs to the command line."""
    check = verbs.add_parser("score-check", help="check that an anti-spoofing score file is complete and not inverted")
    check.add_argument("file", type=Path, help="score file in the format of ASVspoof 2019, 2021 or 5")
    check.add_argument("--protocol", type=Path, help="protocol or key file of its set")
    check.add_argument("--asv", type=Path, help="ASV scores of the same set, for the t-DCF")
    check.set_defaults(command=_check_score_file)

    write = verbs.add_parser("score-file", help="turn the table of `trainyard predict` into an official score file")
    write.add_argument("table", type=Path, help="CSV that `trainyard predict` wrote")
    write.add_argument("out", type=Path, help="score file to write")
    write.add_argument("--form", choices=("asv2019", "asv2021", "asv5"), default="asv2021", help="default: %(default)s")
    write.add_argument(
        "--protocol", type=Path, help="utterances to write, in this order; asv2019 needs it for the keys"
    )
    write.add_argument(
        "--negate", action="store_true", help="change the sign of each score, for tools in which high means spoofed"
    )
    write.set_defaults(command=_write_score_file)


def _check_score_file(args: argparse.Namespace) -> int:
    """Check a score file and print the findings; return 0 if it is valid, 1 if not."""
    from . import protocols, scores

    form, lines = scores.read(args.file)
    verdict = scores.check(
        form,
        lines,
        protocol=None if args.protocol is None else protocols.read_trials(args.protocol),
        asv=None if args.asv is None else protocols.read_asv_rates(args.asv),
    )
    say(f"{args.file}: {verdict.trials:,} scores in the {form} format")
    for fault in verdict.faults:
        say(f"  WRONG  {fault}")
    for note in verdict.notes:
        say(f"  note   {note}")
    for name, value in verdict.metrics.items():
        text = f"{100 * value:.4f} %" if name.startswith("eer") else f"{value:,.5f}".rstrip("0").rstrip(".")
        say(f"  {name:<14} {text}")
    say("not valid: see above" if verdict.faults else "valid, as far as can be checked")
    return 1 if verdict.faults else 0


def _write_score_file(args: argparse.Namespace) -> int:
    from . import protocols, scores

    score_by_name = _read_predictions(args.table)
    trials = (
        [protocols.Trial(name, None) for name in score_by_name]
        if args.protocol is None
        else protocols.read_trials(args.protocol)
    )
    by_letters = {compose_letters(name): score for name, score in score_by_name.items()}
    missing = [trial.utterance for trial in trials if compose_letters(trial.utterance) not in by_letters]
    if missing:
        raise UserError(
            f"{args.table}: {len(missing)} of the {len(trials)} utterances of {args.protocol} have no score, "
            f"for example {missing[0]}. Predict the whole folder: trainyard predict RUN FOLDER OUT.csv"
        )
    sign = -1.0 if args.negate else 1.0
    lines = [
        scores.Line(trial.utterance, sign * by_letters[compose_letters(trial.utterance)], trial.bonafide, trial.attack)
        for trial in trials
    ]
    scores.write(args.out, lines, form=args.form)
    say(
        f"{args.out}: {len(lines):,} scores in the {args.form} format. Check it: trainyard score-check "
        f"{quote_path(args.out)}"
    )
    if args.negate:
        say("High means spoofed in this file; the challenges, and score-check, expect that high means bona fide.")
    return 0


def _read_predictions(path: Path) -> dict[str, float]:
    """Read the table of `trainyard predict`.

    Raises:
        UserError: the file cannot be read, lists two files of one name, or has a score that is not a number.
    """
    score_by_name: dict[str, float] = {}
    for row in read_table(path, columns=("utterance", "score")):
        name, score = row["utterance"], row["score"]
        if name in score_by_name:
            raise UserError(f"{path}: '{name}' is listed twice. Predict a folder of one database.")
        try:
            score_by_name[name] = float(score)
        except ValueError:
            raise UserError(f"{path}: the score of '{name}' is '{score}', expected a number. Fix the line.") from None
    return score_by_name
