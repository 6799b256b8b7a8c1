"""What memory is left, from the kernel's files in all their forms."""

import pytest

from revolta_serve.memory import available_bytes, resident_bytes

GIB = 1 << 30
MEMINFO = f"MemTotal:       {64 * GIB >> 10} kB\nMemFree:         {1 * GIB >> 10} kB\nMemAvailable:   {32 * GIB >> 10} kB\n"


@pytest.fixture
def machine(tmp_path):
    """write(path, text): a file of the machine; 32 GiB are available."""

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    write("proc/meminfo", MEMINFO)
    return write


def group(write, folder, limit, used, cached, *, version):
    """The files of a control group."""
    names = ("memory.max", "memory.current", "inactive_file") if version == 2 else (
        "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    )  # fmt: skip
    write(f"{folder}/{names[0]}", f"{limit}\n")
    write(f"{folder}/{names[1]}", f"{used}\n")
    write(f"{folder}/memory.stat", f"anon 17\n{names[2]} {cached}\nunevictable 0\n")


def test_without_groups_it_is_what_the_machine_has(machine, tmp_path):
    assert available_bytes(tmp_path) == 32 * GIB
    machine("proc/self/cgroup", "0::/\n")
    assert available_bytes(tmp_path) == 32 * GIB


def test_a_group_without_a_limit_changes_nothing(machine, tmp_path):
    machine("proc/self/cgroup", "0::/user.slice\n")
    group(machine, "sys/fs/cgroup/user.slice", "max", 5, 0, version=2)
    assert available_bytes(tmp_path) == 32 * GIB


def test_the_tightest_group_around_the_process_decides(machine, tmp_path):
    machine("proc/self/cgroup", "0::/pod/server\n")
    group(machine, "sys/fs/cgroup/pod/server", 20 * GIB, 2 * GIB, 0, version=2)
    group(machine, "sys/fs/cgroup/pod", 24 * GIB, 16 * GIB, 1 * GIB, version=2)
    group(machine, "sys/fs/cgroup/other", 1 * GIB, 0, 0, version=2)
    assert available_bytes(tmp_path) == 9 * GIB, "of the pod 8 GiB are free and one is cache that nobody uses"


def test_version_1_and_a_path_that_only_the_host_knows(machine, tmp_path):
    machine("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/0815\n0::/\n")
    group(machine, "sys/fs/cgroup/memory", 6 * GIB, 1 * GIB, GIB // 2, version=1)
    assert available_bytes(tmp_path) == 5 * GIB + GIB // 2


def test_a_group_of_another_controller_has_no_say(machine, tmp_path):
    machine("proc/self/cgroup", "3:cpuset:/here\n")
    group(machine, "sys/fs/cgroup/memory/here", 1, 0, 0, version=1)
    assert available_bytes(tmp_path) == 32 * GIB


def test_this_machine_and_this_process():
    assert 1 << 20 < resident_bytes() < available_bytes() + resident_bytes()
    held = bytearray(64 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    grown = resident_bytes()
    del held
    assert grown - resident_bytes() > 32 << 20
