"""The memory that is left in the control groups of a process."""

from __future__ import annotations

import pytest

from h5chunk.tools.measure.machine import available_bytes

GIB = 1 << 30


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\n")
    return tmp_path


def test_without_a_limit_all_free_memory_counts(root):
    assert available_bytes(root) == 32 * GIB
    write(root / "proc/self/cgroup", "0::/user.slice/x.scope\n")
    write(root / "sys/fs/cgroup/user.slice/x.scope/memory.max", "max\n")
    assert available_bytes(root) == 32 * GIB
    assert available_bytes() > 0


@pytest.mark.parametrize("limited", ["user.slice", "user.slice/x.scope", ""])
def test_what_is_in_use_is_subtracted_but_for_the_page_cache(root, limited):
    write(root / "proc/self/cgroup", "0::/user.slice/x.scope\n")
    group = root / "sys/fs/cgroup" / limited
    write(group / "memory.max", f"{16 * GIB}\n")
    write(group / "memory.current", f"{15 * GIB}\n")
    write(group / "memory.stat", f"anon {12 * GIB}\nactive_file {GIB}\ninactive_file {GIB}\n")
    assert available_bytes(root) == 3 * GIB
    write(group / "memory.current", f"{20 * GIB}\n")  # the limit was lowered
    assert available_bytes(root) == 0


@pytest.mark.parametrize("path", ["/docker/1234", "/"])
def test_version_1(root, path):
    write(root / "proc/self/cgroup", f"5:cpu,cpuacct:{path}\n4:memory:{path}\n")
    group = root / "sys/fs/cgroup/memory"  # a container may show only its own group, as the root
    write(group / "memory.limit_in_bytes", f"{4 * GIB}\n")
    write(group / "memory.usage_in_bytes", f"{3 * GIB}\n")
    write(group / "memory.stat", f"inactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file 0\n")
    assert available_bytes(root) == 2 * GIB
