"""Started by srun: holds stop signals back before anything slow is imported, then has submitit call the `RankTask`.

submitit takes part of a second to load, in which a signal would kill the rank, and then handles signals in its own way.
"""

import signal

from trainyard.train.stop import STOP_SIGNALS


def main() -> None:
    """Run the task that submitit pickled into the folder on the command line; `StopFlag` lets the signals through."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    from submitit.core.submission import submitit_main

    submitit_main()


if __name__ == "__main__":
    main()
