"""Cores and memory on systems that lack Linux's interfaces."""

import os
import resource
import sys
from types import SimpleNamespace

from densefeed.system.devices import count_cores, peak_rss


def test_cores_are_those_of_this_process_where_the_system_says_so(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert count_cores() == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    assert count_cores() == os.cpu_count()


def test_peak_memory_is_in_bytes_on_linux_and_macos(monkeypatch):
    usage = SimpleNamespace(ru_maxrss=2_000_000)
    monkeypatch.setattr(resource, "getrusage", lambda _: usage)
    monkeypatch.setattr(sys, "platform", "linux")
    assert peak_rss() == 2_000_000 * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_rss() == 2_000_000
