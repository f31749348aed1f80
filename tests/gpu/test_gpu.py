"""What a card must do for this project, the most important first: its time may be over before the last.

Each check runs in a process of its own. Without a card it skips, and `make gpu-check CPU=1` runs what can run there.
tests/test_gpu_check.py plants what each of them finds.
"""

import pytest

from tests.gpu import card, decoding, memory, overflow, preset_steps
from tests.gpu.check import Figures, Sizes
from trainyard.tools.exact_runs import RunsDiffer, compare_runs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

MEMORY = (0.9, 1.1)
"""Predicted / observed memory of a step, as docs/plan.md says: below, a plan's reserve for fragments is too small."""


def test_torch_has_kernels_for_this_card(check):
    check(card.check_kernels)


def test_products_agree_with_float64(check):
    check(card.check_products)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_that_overflows_changes_nothing(check, optimizer):
    check(overflow.check_overflow, optimizer=optimizer)


def test_copies_to_and_from_the_card_arrive(needs_card, check):
    check(card.check_copies)


def test_copies_between_cards_arrive(needs_card, check):
    check(card.check_peers)


def test_a_stopped_run_ends_bitwise_equal(check, family):
    check(check_exact_runs, preset=f"{family}_smoke", overrides=[])


def test_decoding_in_the_background_gives_the_images_of_a_decoder_that_waits(check, base_preset):
    check(decoding.compare_decoding, preset=base_preset)


def test_a_step_takes_the_predicted_memory(check, base_preset):
    figures = check(memory.compare_memory, preset=base_preset)
    assert MEMORY[0] <= figures["predicted_over_observed"] <= MEMORY[1]


def test_first_steps_are_finite(check, preset):
    check(preset_steps.take_first_steps, preset=preset, overrides=["precision=auto", "compile=off"])


def test_losses_with_cuda_graphs_are_those_without(needs_card, check, base_preset):
    check(preset_steps.compare_graphs, preset=base_preset)


def test_a_stopped_run_with_cuda_graphs_ends_bitwise_equal(needs_card, check, family):
    overrides = ["compile=graphs"]
    check(preset_steps.check_settings, preset=f"{family}_smoke", overrides=overrides)
    check(check_exact_runs, preset=f"{family}_smoke", overrides=overrides)


def test_first_steps_in_fp16_are_finite(needs_card, check, preset):
    check(preset_steps.take_first_steps, preset=preset, overrides=["precision=fp16", "compile=off"])


def test_first_compiled_steps_are_finite(needs_card, check, preset):
    check(preset_steps.take_first_steps, preset=preset, overrides=["precision=auto", "compile=on"])


def check_exact_runs(device: object, sizes: Sizes, *, preset: str, overrides: list[str]) -> Figures:
    """Compare two runs and a stopped one; this process starts no CUDA, for the runs are forked from it."""
    try:
        return {
            "preset": preset,
            **compare_runs(
                preset, [f"data.cache={sizes.data}", *overrides], sizes.jobs, sizes.scratch, environ=sizes.environ
            ),
        }
    except RunsDiffer as error:
        raise AssertionError(str(error)) from error
