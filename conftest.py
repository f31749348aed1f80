"""What holds before any test module loads torch."""

import os

from trainyard.hardware import set_openmp_wait_policy

set_openmp_wait_policy(os.environ)
