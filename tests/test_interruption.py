"""Ctrl-C and SIGTERM in the three ways in which work here meets them."""

import os
import signal
import threading

import pytest

from wideflat import committee, training
from wideflat.energy.profile import Interrupted as EnergyInterrupted
from wideflat.entropy.measure import Interrupted as EntropyInterrupted
from wideflat.interruption import Interrupted, stop_requests, terminated_like_interrupted, undisturbed
from wideflat.volume.free_entropy import Interrupted as VolumeInterrupted


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "kind", [committee.Interrupted, EnergyInterrupted, EntropyInterrupted, VolumeInterrupted, training.Interrupted]
)
def test_there_is_one_class(kind):
    assert issubclass(kind, Interrupted) and issubclass(kind, KeyboardInterrupt)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_request_is_noted_and_the_second_interrupts(number):
    before = signal.getsignal(number)
    with stop_requests() as stop:
        assert stop == []
        send(number)
        assert stop == [number]
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert signal.getsignal(number) is before


def test_sigterm_is_ctrl_c():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminated_like_interrupted():
        send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_is_put_back_is_put_back_whole(number):
    done = []
    with pytest.raises(KeyboardInterrupt), terminated_like_interrupted(), undisturbed():
        send(number)
        done.append(True)
    assert done == [True]


def test_a_signal_that_nobody_answers_ends_the_process_at_once():
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with undisturbed():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_threads_leave_the_signals_alone():
    seen = []

    def work():
        with stop_requests() as stop, terminated_like_interrupted(), undisturbed():
            seen.append(list(stop))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [[]]
