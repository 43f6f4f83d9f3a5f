"""A lighthouse that is not there yet is waited for."""

import socket
import threading
import time

import pytest

from wideflat.distributed.lighthouse import wait_for_lighthouse


def test_one_that_comes_later_is_waited_for():
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{place.getsockname()[1]}"
        with pytest.raises(ConnectionError, match="start one there with `torchft_lighthouse"):
            wait_for_lighthouse(address, 0.0)
        threading.Thread(target=lambda: (time.sleep(0.3), place.listen()), daemon=True).start()
        wait_for_lighthouse(address, 60.0)


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ValueError, match="must be an address such as http://HOST:29510"):
        wait_for_lighthouse("http://host:port", 0.0)
