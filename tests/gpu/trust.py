"""Says in a few lines what a card can be trusted with, from the results of its checks."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.gpu.check import IMPOSSIBLE

OK, FAILED, NOT_RUN = "ok", "failed", "not run"

DECODING = "decoding on the GPU"
QUESTIONS: Mapping[str, Sequence[str]] = {
    "kernels and products": ("torch_has_kernels", "products_agree", "a_step_that_overflows"),
    "bitwise resume, 1 and 2 ranks": ("a_stopped_run_ends", "a_stopped_run_on_two_ranks"),
    "two ranks on one card (gloo)": ("*[gloo]", "gradients_of_two_ranks"),
    "two cards (NCCL, copies)": ("*[nccl]", "copies_between_cards"),
    DECODING: ("decoding_in_the_background",),
    "copies, overlap, clock": ("copies_to_and_from", "copies_overlap", "the_clock"),
    "predicted memory": ("a_step_takes",),
    "CUDA graphs": ("gradients_with_cuda_graphs", "a_stopped_run_with_cuda_graphs"),
}
"""What users ask, and how the names of the checks begin (*: end) that answer it."""


def describe_trust(lines: Sequence[Mapping[str, Any]], *, sm: int | None) -> list[str]:
    """Return one line for each question, and one for the precisions.

    Args:
        lines: of the result file.
        sm: the card's compute capability; None: the CPU.
    """
    answers = {question: _answer(_select(lines, names)) for question, names in QUESTIONS.items()}
    if sm is None and answers[DECODING].startswith("yes"):
        answers[DECODING] = f"{IMPOSSIBLE} (it needs a card)"
    elif answers[DECODING].startswith("yes"):
        decoded = [line for line in _select(lines, QUESTIONS[DECODING]) if line.get("decoders") == "mixed"]
        formats = ", ".join(sorted({line["format"] for line in decoded})) or "no images"
        answers[DECODING] += f", given {formats}; all but jpeg is decoded on the host"
    first, *others = (f"{question}: {answer}" for question, answer in answers.items())
    return [first, f"precisions: {', '.join(_describe_precisions(lines, sm))}", *others]


def _select(lines: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[Mapping[str, Any]]:
    return [line for line in lines if any(_is_named(line["check"], name) for name in names)]


def _is_named(check: str, name: str) -> bool:
    return check.endswith(name[1:]) if name.startswith("*") else check.startswith(name)


def _answer(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the worst that is known: one check that failed is a no, whatever else was ok."""
    by_status = {
        status: [line for line in lines if line["status"] == status] for status in (FAILED, NOT_RUN, OK, IMPOSSIBLE)
    }
    good = f"{len(by_status[OK])} of {len(lines) - len(by_status[IMPOSSIBLE])} checks ok"
    if failed := by_status[FAILED]:
        return f"NO: {failed[0]['check']}: {failed[0]['error'][:120]} ({good})"
    if missed := by_status[NOT_RUN]:
        return f"not run: {missed[0]['reason'][:80]} ({good})"
    if by_status[OK]:
        return f"yes, {good}"
    return f"{IMPOSSIBLE} ({by_status[IMPOSSIBLE][0]['reason'][:80]})" if lines else "not asked"


def _describe_precisions(lines: Sequence[Mapping[str, Any]], sm: int | None) -> list[str]:
    """Return, for each data type, whether first steps in it are finite; TF32 is switched on with fp16 and bf16."""
    steps = _select(lines, ("first_steps",))
    by_type = {
        "fp32": [line for line in steps if line.get("precision") == "fp32"],
        "fp16": [line for line in steps if line.get("precision") == "fp16" or "_in_fp16_" in line["check"]],
        "bf16": [line for line in steps if line.get("precision") == "bf16"],
    }
    if sm is not None and sm < 80:
        by_type.pop("bf16")
    known = [line for own in by_type.values() for line in own]
    others = [line for line in steps if line["status"] in (FAILED, NOT_RUN) and line not in known]
    found = [f"{name} {_answer(own)}" for name, own in by_type.items() if own]
    found += [f"no bf16 (sm_{sm})"] if "bf16" not in by_type else []
    return found + ([_answer(others)] if others else []) or ["not asked"]
