"""How often a run saves, from what a save costs. Loads no torch: plans say it, too."""

import math


def compute_interval_s(save_s: float, *, mtbf_hours: float, max_minutes: float) -> float:
    """Return the seconds of training between two saves for which saving and lost work together cost least.

    Young's first-order optimum sqrt(2 C M) (Young 1974, CACM 17(9), 530-531), for a save of C seconds and a mean
    time M between failures. Daly's higher-order estimate (Daly 2006, FGCS 22(3), 303-312, eq. 37) differs by less
    than 2 % while C < M / 1000, far less than M is known.

    Args:
        save_s: measured cost of a save, seconds, > 0.
        mtbf_hours: mean time between failures of the whole run: that of one node divided by the number of nodes.
        max_minutes: upper bound, even if saving then takes more than a tenth of the time.

    Returns:
        Young's interval, but at least 10 saves long (overhead below a tenth) and at most `max_minutes`.
    """
    assert save_s > 0, save_s
    young = math.sqrt(2 * save_s * mtbf_hours * 3600)
    return min(max(young, 10 * save_s), max_minutes * 60)
