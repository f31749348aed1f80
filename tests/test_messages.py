"""A command's messages are nothing but their text."""

import re
import resource
import subprocess
import sys

from trainyard.errors import format_failure

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


def test_an_error_for_want_of_memory_names_the_limit_of_the_shell_if_there_is_one():
    before = resource.getrlimit(resource.RLIMIT_AS)
    error, other = MemoryError("std::bad_alloc"), ValueError("another")
    assert "ulimit" not in format_failure(error)
    resource.setrlimit(resource.RLIMIT_AS, (2**46, before[1]))
    try:
        sentence = r"MemoryError: std::bad_alloc: .* 65536\.0 GiB .*: ulimit -v unlimited.*"
        assert re.fullmatch(sentence, format_failure(error))
        assert "ulimit" not in format_failure(other)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
