"""A command's messages are nothing but their text, and loguru is loaded with the first of them."""

import subprocess
import sys

PROGRAM = """
import sys
from trainyard.messages import logger, print_messages

finders = list(sys.meta_path)
print_messages()
print_messages()
print("loguru" in sys.modules)
from loguru import logger as theirs

theirs.info("a family's: {}", 1)
theirs.debug("not shown")
logger.warning("ours: {}", 2)
print_messages()
logger.info("of a second command in this process")
print(sys.meta_path == finders)
"""


def test_loguru_is_loaded_with_the_first_message_and_set_up_whoever_loads_it():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "False\nTrue\n"
    assert done.stderr == "a family's: 1\nours: 2\nof a second command in this process\n"
