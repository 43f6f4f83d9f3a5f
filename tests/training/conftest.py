"""Tests of this folder share `small_trainings`, and a lighthouse for those of jobs that come and go."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def lighthouse():
    """The address of one."""
    elastic = pytest.importorskip("wideflat.distributed.elastic", reason="needs torchft")
    server = elastic.start_lighthouse("127.0.0.1:0", heartbeat_timeout=5.0, join_timeout=60.0)
    try:
        yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    finally:
        server.shutdown()
