"""A command's messages are nothing but their text."""

import subprocess
import sys

PROGRAM = """
from loguru import logger
from trainyard.cli import main

for _ in range(2):
    main(["jobs"])
    logger.info("a family's: {}", 1)
    logger.debug("not shown")
"""


def test_messages_are_plain_text_on_standard_error_also_after_a_second_command(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr == "a family's: 1\na family's: 1\n"
