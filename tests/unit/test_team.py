"""The thread team: order, failures, sleeping and waking, forks, closing; the number of threads."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from metrale._ext.program import Program, Team
from metrale.backends.cpu import cgroup
from metrale.backends.cpu.threads import choose_threads, physical_cores
from metrale.errors import ConfigError, DeviceError
from tests.toys import AFFINE, CHAIN, FAIL_AT, WORDS_OUT


def chain_program(rng: random.Random, cells: np.ndarray, turn: int) -> tuple[Program, list[int]]:
    """Return random ops that each check the one before."""
    program, before, sizes = Program(), 0, []
    for op in range(rng.randint(1, 20)):
        tiles = rng.choice((1, 1, 2, 3, 7, 16, 63))
        program.append(CHAIN, (cells, op, before, turn, rng.randint(0, 300)), tiles, f"op {op}")
        before = tiles
        sizes.append(tiles)
    return program, sizes


@pytest.mark.parametrize(("threads", "spin_us"), [(1, 50.0), (2, 50.0), (2, 0.0), (3, 500.0), (8, 5.0)])
def test_ops_run_in_order_and_each_tile_once(threads, spin_us):
    team = Team(threads, spin_us)
    rng = random.Random(threads)
    cells = np.zeros((20, 64), np.int64)
    for turn in range(1, 400):
        program, sizes = chain_program(rng, cells, turn)
        team.run(program)
        for op, tiles in enumerate(sizes):
            assert (cells[op, :tiles] == turn).all()
        if turn % 50 == 0:
            time.sleep(0.002)  # workers fall asleep and are woken again
    team.close()


def test_one_program_runs_many_times_with_fresh_buffers():
    team = Team(2)
    x, out = np.arange(37, dtype=np.float32), np.full(37, np.nan, np.float32)
    program = Program()
    program.append(AFFINE, (out, x, 37, 2.0, 1.0), 5, "affine")
    program.append(AFFINE, (out, out, 37, 1.0, 0.5), 4, "affine")
    for round_ in range(50):
        x += round_
        team.run(program)
        np.testing.assert_array_equal(out, x * 2 + np.float32(1.5))
    assert len(program) == 2


def test_a_part_of_a_program():
    team = Team(2)
    x = np.zeros(5, np.float32)
    program = Program()
    for shift in (1.0, 10.0, 100.0):
        program.append(AFFINE, (x, x, 5, 1.0, shift), 2, "affine")
    team.run(program, 1, 2)
    assert x[0] == 10
    team.run(program, 2)
    assert x[0] == 110
    team.run(program, 3)
    team.run(Program())
    assert x[0] == 110


def test_arguments_become_words():
    out = np.zeros(4, np.int64)
    x = np.zeros((3, 5), np.float32)
    Team(1).call(WORDS_OUT, (out, x[1:], -7, 2.5, None), 1, "words")
    assert out.tolist() == [x.ctypes.data + 20, -7, np.float64(2.5).view(np.int64), 0]
    program = Program()
    program.append(WORDS_OUT, (out, x, True, 1.0, 2**62), 1, "words")
    name, fn, tiles, words = program.op(0)
    assert (name, fn, tiles) == ("words", WORDS_OUT, 1)
    assert np.frombuffer(words, np.int64).tolist() == [out.ctypes.data, x.ctypes.data, 1, np.float64(1).view(np.int64), 2**62]
    assert program.kept_args(0)[1] is x


@pytest.mark.parametrize("bad", [
    np.zeros((4, 6))[:, ::2], np.zeros((4, 6)).T, np.zeros(3)[::-1], np.zeros(6)[::2], np.int64(3),
    np.zeros((2, 3, 4))[:, :, :2],
])
def test_arrays_without_contiguous_rows_are_refused(bad):
    with pytest.raises(DeviceError) as caught:
        Team(1).call(WORDS_OUT, (np.zeros(4, np.int64), bad, 0, 0, 0), 1, "words")
    assert caught.value.code == "op.layout"
    assert "words" in str(caught.value)


def test_rows_may_have_a_stride_of_their_own():
    out, qkv = np.zeros(4, np.int64), np.zeros((3, 40), np.float32)
    q = qkv[:, 8:24].reshape(3, 4, 4)
    assert q.base is not None
    Team(1).call(WORDS_OUT, (out, q, 0, 0, 0), 1, "words")
    assert out[0] == qkv.ctypes.data + 32
    Team(1).call(WORDS_OUT, (out, np.zeros((0, 3), np.float32), 0, 0, 0), 1, "words")


@pytest.mark.parametrize(("fn", "args", "tiles", "code"), [
    (0, (), 1, "op.args"), (WORDS_OUT, (), -1, "op.args"), (WORDS_OUT, (), 1 << 24, "op.args"),
    (WORDS_OUT, (0,) * 65, 1, "op.args"), (WORDS_OUT, ("text",), 1, "op.args"),
])
def test_bad_ops_are_refused(fn, args, tiles, code):
    for take in (Team(1).call, Program().append):
        with pytest.raises(DeviceError) as caught:
            take(fn, args, tiles, "bad")
        assert caught.value.code == code
    with pytest.raises(OverflowError):
        Team(1).call(WORDS_OUT, (2**63,), 1, "bad")


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_failed_tile_stops_the_program_and_is_named(threads):
    team = Team(threads)
    calls, later = np.zeros(9, np.int64), np.zeros(9, np.int64)
    program = Program()
    program.append(FAIL_AT, (calls, 99, 5), 9, "first")
    program.append(FAIL_AT, (calls, 2, 5), 9, "second")
    program.append(FAIL_AT, (later, 99, 5), 9, "third")
    for _ in range(20):
        with pytest.raises(DeviceError, match=r"second: .* got 5 in tile \d of 9 \(op 1\)") as caught:
            team.run(program)
        assert caught.value.code == "device.kernel"
    assert not later.any()
    assert (calls[:2] >= 20).all()
    with pytest.raises(DeviceError, match="tile 0 of 1"):
        team.call(FAIL_AT, (calls, 0, -3), 1, "alone")
    team.run(program, 2)  # the team is usable afterwards
    assert (later == 1).all()


def test_the_first_failing_tile_is_named_with_one_thread():
    calls = np.zeros(9, np.int64)
    with pytest.raises(DeviceError, match="tile 4 of 9"):
        Team(1).call(FAIL_AT, (calls, 4, 5), 9, "op")
    assert calls.tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0]


def test_two_python_threads_share_a_team():
    team = Team(2)
    errors = []

    def work(seed):
        rng, cells = random.Random(seed), np.zeros((20, 64), np.int64)
        try:
            for turn in range(1, 100):
                team.run(chain_program(rng, cells, turn)[0])
        except DeviceError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_closed_team_refuses_work_and_closes_twice():
    team = Team(2)
    out = np.zeros(4, np.int64)
    team.call(FAIL_AT, (out, 9, 1), 4, "op")
    team.close()
    team.close()
    program = Program()
    program.append(FAIL_AT, (out, 9, 1), 4, "op")
    for use in (lambda: team.run(program), lambda: team.call(FAIL_AT, (out, 9, 1), 1, "op")):
        with pytest.raises(DeviceError) as caught:
            use()
        assert caught.value.code == "device.closed"


@pytest.mark.parametrize("threads", [0, 5000])
def test_a_wrong_number_of_threads(threads):
    with pytest.raises(DeviceError) as caught:
        Team(threads)
    assert caught.value.code == "device.threads"


# The copying kernel of one rank serves as a toy here: without Numba a process starts at once. All tiles copy the same.
SCRIPT = """
import os, signal, sys
import numpy as np
from metrale._ext.comm_kernels import all_gather_address
from metrale._ext.program import Team
from metrale.errors import DeviceError
signal.alarm(60)
team, out, ones = Team(3), np.zeros(8, np.int64), np.ones(8, np.int64)
def use():
    out[:] = 0
    team.call(all_gather_address(), (0, 0, out, ones, 1, 64), 8, "copy")
{body}
"""


def run_script(body: str) -> str:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(body=body)], capture_output=True, text=True, timeout=120,
                          cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_fork_after_use_is_refused_not_hung():
    assert run_script("""
use()
if os.fork() == 0:
    try:
        use()
    except DeviceError as error:
        print(error.code, flush=True)
    team.close()
    os._exit(0)
os.wait()
use()
print(out.sum())
""").split() == ["device.fork", "8"]


def test_a_fork_before_use_gives_the_child_a_team_of_its_own():
    assert run_script("""
if os.fork() == 0:
    use()
    print("child", out.sum(), flush=True)
    os._exit(0)
os.wait()
use()
print("parent", out.sum())
""").split() == ["child", "8", "parent", "8"]


def test_workers_start_with_the_first_shared_op_and_end_with_the_team():
    assert run_script("""
def show():
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    print(names.count("metrale-worker"))
team.call(all_gather_address(), (0, 0, out, ones, 1, 64), 1, "copy")
show()
use()
show()
del team
show()
""").split() == ["0", "2", "0"]


def test_the_interpreter_ends_without_close():
    assert run_script("use(); print('used')") == "used"
    assert run_script("use(); sys.modules['kept'] = team; print('used')") == "used"


# --- the number of threads ---------------------------------------------------------------------------------------------


def machine(root: Path, siblings: dict[int, str], **files: str) -> Path:
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_one_thread_a_physical_core(tmp_path):
    root = machine(tmp_path, {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5", 7: "6-7"})
    assert physical_cores({0, 1, 4, 5, 7}, root) == 3
    assert physical_cores({0, 4}, root) == 1
    assert physical_cores({20, 21}, root) == 2  # no topology known
    choice = choose_threads(root=root, processors={0, 1, 4, 5})
    assert choice.count == 2
    assert "2 physical cores" in choice.reason


@pytest.mark.parametrize(("quota", "count"), [("150000 100000", 1), ("250000 100000", 2), ("5000 10000", 1), ("max 10000", 4)])
def test_cgroup_2_quota(tmp_path, quota, count):
    put(tmp_path, "proc/self/cgroup", "0::/box/inner\n")
    put(tmp_path, "sys/fs/cgroup/cgroup.controllers", "cpu memory")
    put(tmp_path, "sys/fs/cgroup/box/cpu.max", quota)
    put(tmp_path, "sys/fs/cgroup/box/inner/cpu.max", "900000 100000")
    assert choose_threads(root=tmp_path, processors={0, 1, 2, 3}).count == count


def test_cgroup_1_quota_in_a_container_that_sees_only_its_own_mount(tmp_path):
    put(tmp_path, "proc/self/cgroup", "3:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "300000")
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert cgroup.cpu_quota(tmp_path) == 3.0
    choice = choose_threads(root=tmp_path, processors=set(range(8)))
    assert choice.count == 3
    assert "quota 3" in choice.reason
    put(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1")
    assert cgroup.cpu_quota(tmp_path) is None


def test_memory_limits(tmp_path):
    put(tmp_path, "proc/meminfo", "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\n")
    assert cgroup.memory(tmp_path) == (800 * 1024, 1000 * 1024)
    put(tmp_path, "proc/self/cgroup", "4:memory:/a\n")
    put(tmp_path, "sys/fs/cgroup/memory/a/memory.limit_in_bytes", "500000")
    put(tmp_path, "sys/fs/cgroup/memory/a/memory.usage_in_bytes", "400000")
    put(tmp_path, "sys/fs/cgroup/memory/a/memory.stat", "cache 3\ntotal_inactive_file 50000\n")
    put(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2**63 - 4096))
    put(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1")
    assert cgroup.memory(tmp_path) == (150000, 500000)


def test_the_user_decides_first(tmp_path, monkeypatch):
    root = machine(tmp_path, {0: "0"})
    monkeypatch.setenv("METRALE_THREADS", "5")
    assert choose_threads(3, root=root, processors={0}).count == 3
    assert choose_threads(root=root, processors={0}).count == 5
    for text in ("many", "-1", "100000"):
        monkeypatch.setenv("METRALE_THREADS", text)
        with pytest.raises(ConfigError) as caught:
            choose_threads(root=root, processors={0})
        assert caught.value.code == "engine.threads"
    with pytest.raises(ConfigError):
        choose_threads(0)
