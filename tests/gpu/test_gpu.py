"""What a card must do for this project, the most important first: its time may be over before the last.

Each check runs in a process of its own; those that take a family run for several families at once where there are
cores. Of each family the base preset is checked, or its smoke preset where size does not matter: other presets of a
family are made of the same layers. Without a card checks skip, and `make gpu-check CPU=1` runs what can run there.
tests/gpu/faults.py plants what each of them finds.
"""

import pytest

from tests.gpu import card, decoding, memory, overflow, preset_steps, ranks
from tests.gpu.check import Figures, Sizes
from trainyard.tools.exact_runs import RunsDiffer, compare_runs

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

COLLECTIVES = ["gloo", "nccl"]
GRAPHS = ["compile=graphs"]


def test_torch_has_kernels_for_this_card(check):
    check(card.check_kernels)


def test_products_agree_with_float64(check):
    card.judge_product_rates(check(card.check_products))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_that_overflows_changes_nothing(check, optimizer):
    check(overflow.check_overflow, optimizer=optimizer)


def test_a_stopped_run_ends_bitwise_equal(check, family):
    check(check_exact_runs, family=family, overrides=[])


@pytest.mark.parametrize("collectives", COLLECTIVES)
def test_what_two_ranks_exchange_arrives(check, collectives):
    check(ranks.check_collectives, collectives=collectives)


@pytest.mark.parametrize("collectives", COLLECTIVES)
def test_synchronised_statistics_are_those_of_the_whole_batch(check, collectives):
    check(ranks.compare_statistics, collectives=collectives)


def test_gradients_of_two_ranks_are_summed(check, family):
    check(ranks.compare_gradients, family=family)


def test_a_stopped_run_on_two_ranks_ends_bitwise_equal(check, family):
    check(ranks.compare_stopped_run, family=family)


def test_decoding_in_the_background_gives_the_images_of_a_decoder_that_waits(check, device, base_preset):
    decoding.judge_decoder(check(decoding.compare_decoding, preset=base_preset), device)


def test_first_steps_are_finite(check, base_preset):
    check(preset_steps.take_first_steps, preset=base_preset, overrides=["precision=auto", "compile=off"])


def test_copies_to_and_from_the_card_arrive_fast(needs_card, check):
    card.judge_copies(check(card.check_copies))


def test_copies_overlap_with_products(needs_card, check):
    card.judge_overlap(check(card.check_overlap))


def test_the_clock_is_high_under_load(needs_card, check):
    card.judge_clock(check(card.check_clock))


def test_copies_between_cards_arrive(needs_card, check):
    check(card.check_peers)


def test_a_step_takes_the_predicted_memory(check, base_preset):
    memory.judge_memory(check(memory.compare_memory, preset=base_preset))


def test_first_steps_in_fp16_are_finite(needs_card, check, base_preset):
    check(preset_steps.take_first_steps, preset=base_preset, overrides=["precision=fp16", "compile=off"])


def test_gradients_with_cuda_graphs_are_those_without(needs_card, check, family):
    check(preset_steps.compare_graphs, family=family)


def test_a_stopped_run_with_cuda_graphs_ends_bitwise_equal(needs_card, check, family):
    check(preset_steps.check_settings, family=family, overrides=GRAPHS)
    check(check_exact_runs, family=family, overrides=GRAPHS)


def check_exact_runs(device: object, sizes: Sizes, *, family: str, overrides: list[str]) -> Figures:
    """Compare two runs and a stopped one; this process starts no CUDA, for the runs are forked from it."""
    preset, own = f"{family}_smoke", [f"data.cache={sizes.data}", *overrides]
    try:
        return {"preset": preset, **compare_runs(preset, own, sizes.jobs, sizes.scratch, environ=sizes.environ)}
    except RunsDiffer as error:
        raise AssertionError(str(error)) from error
