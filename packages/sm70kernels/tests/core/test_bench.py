"""Benchmarks without a GPU: what is timed and how, on a device that only pretends; what is refused; the estimate instead of a time."""

import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sm70kernels import build, driver, hyper_inject, inputs, kv_store, linear_skinny, lm_head_top1, rms_norm, roofline
from sm70kernels.__main__ import main
from sm70kernels.bench import Cases, NoCases, arguments, cases, collect, machine, overhead, read_only, report, run, timing
from sm70kernels.bench.timing import BUFFER, NotCold, Stopwatch
from sm70kernels.cuda import Kernel, emulated
from sm70kernels.driver import Function
from sm70kernels.emulator import emulate

CASES = Cases(rms_norm, (1, 5), dict(hidden=dict(E=2560)), given=dict(unit_offset=True))
LAUNCH, BYTE, START = 3.0, 1e-4, 10.0
"""Microseconds of a launch, of a byte read, and of starting a graph on the pretended device."""


class Pretended:
    """Runs captured launches in the emulator once, and answers with times that follow from what was launched."""

    name = "pretended"
    capability = (9, 0)
    torch_device = "cpu"

    def __init__(self, cache: int = 200_000, free: int = 1 << 30) -> None:
        self.cache = cache
        self._free = free
        self._reads: list[int] = []
        self.starts: list[int] = []
        self.graphs: list[tuple[int, int]] = []

    def free(self) -> int:
        return self._free

    def read(self, start: int, size: int) -> None:
        assert 0 <= start <= start + size <= BUFFER
        assert start % 16 == size % 16 == 0
        self._reads.append(size)
        self.starts.append(start)

    def capture(self, work: Callable[[], object]) -> Callable[[], float]:
        self._reads = []
        with emulated(check=True) as counters:
            work()
        self.graphs.append((len(counters), sum(self._reads)))
        ideal = START + LAUNCH * len(counters) + BYTE * sum(self._reads) + LAUNCH * len(self._reads)
        times = iter(ideal * (1 + 0.01 * (number % 5 - 2)) for number in range(1000))
        return lambda: next(times)


@pytest.fixture(autouse=True)
def _launches_reach_the_emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with emulated(check=False):  # the launch that loads kernels, before a capture
        yield


def test_a_case_is_timed_over_copies_that_displace_the_cache() -> None:
    device = Pretended()
    only = next(CASES.each())
    found = Stopwatch(device).measure(only)
    moved = rms_norm.bytes(dict(M=1, E=2560))
    assert found.copies == 2 * device.cache // moved + 1
    assert found.touched >= 2 * device.cache
    assert found.bytes == moved
    assert found.time.median == pytest.approx(LAUNCH, rel=0.03)
    assert found.time.low <= found.time.median <= found.time.high
    assert found.read_only.median == pytest.approx(LAUNCH + BYTE * moved, rel=0.03)
    assert found.of_read_only == pytest.approx(found.read_only.median / found.time.median)
    assert found.gb_s == pytest.approx(moved / found.time.median / 1e3)
    assert not found.emulated_mma
    assert device.graphs == [(0, 16), (found.copies, 16), (0, found.copies * moved + 16)]
    json.dumps(found.record())


def test_where_copies_are_too_many_a_read_displaces_the_rest() -> None:
    device = Pretended(cache=50_000_000)
    found = Stopwatch(device).measure(next(CASES.each()))
    assert found.copies == timing.MOST_COPIES
    assert found.touched == pytest.approx(2 * device.cache, abs=16)
    rest = found.touched - found.copies * found.bytes
    assert device.graphs == [(0, rest), (found.copies, rest), (0, found.copies * found.bytes + rest)]
    assert found.time.median == pytest.approx(LAUNCH, rel=0.2)


def test_the_read_only_kernel_is_timed_once_for_each_size() -> None:
    device = Pretended()
    stopwatch = Stopwatch(device)
    stopwatch.measure(next(CASES.each()))
    before = len(device.graphs)
    stopwatch.measure(next(CASES.each()))
    assert len(device.graphs) == before + 1


@pytest.mark.parametrize(
    ("moved", "size", "free", "copies"),
    [(1000, 1000, 1 << 30, 256), (100_000, 100_000, 1 << 30, 5), (1 << 20, 1 << 20, 1 << 30, 1), (10_000, 1 << 20, 10 << 20, 4)],
)
def test_copies_displace_the_cache_as_far_as_they_fit(moved: int, size: int, free: int, copies: int) -> None:
    assert Stopwatch(Pretended(free=free)).copies(moved, size) == copies


def test_arguments_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(NotCold, match="3000 bytes of arguments, 4000 bytes of memory are free"):
        Stopwatch(Pretended(free=4000)).copies(10, 3000)


def test_kernels_with_mma_on_a_newer_device_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "fetch", lambda op, defines: build.Image("mma.sync.aligned", b"", "", ""))
    device = Pretended()
    found = Stopwatch(device, samples=3).measure(next(CASES.each()))
    assert found.emulated_mma
    assert report.row(found.record(), dict(copy_gb_s=100.0)).endswith(report.EMULATED)
    device.capability = (7, 0)
    assert not Stopwatch(device, samples=3).measure(next(CASES.each())).emulated_mma


def test_every_declared_configuration_can_be_timed() -> None:
    declared = Cases(hyper_inject, (2,), dict(streams=dict(S=4)))
    found = list(run.timed(Stopwatch(Pretended(cache=4000), samples=3), [declared], (1, 3), every_config=True))
    assert len(hyper_inject.configs) > 1
    assert [(each["rows"], each["config"]) for each in found] == [(rows, str(config)) for rows in (1, 3) for config in hyper_inject.configs]


def test_arguments_leave_nothing_to_chance() -> None:
    made = arguments.make(hyper_inject, dict(M=3))
    assert list(made) == [arg.name for arg in hyper_inject.args]
    assert made["weight"] is not None
    assert made["n"].shape == (3, 4, 2560)
    assert all(item.is_contiguous() for item in made.values() if isinstance(item, torch.Tensor))
    assert made["h"].dtype is torch.float16
    without = arguments.make(hyper_inject, dict(M=3), dict(weight=None))
    assert without["weight"] is None
    assert without["n"] is None
    hyper_inject.contract.bind(tuple(without.values()), kernel=True)


def test_arguments_are_given_by_value_or_by_maker() -> None:
    made = arguments.make(lm_head_top1, dict(M=2, V=64, K=40), dict(vocab_start=7, valid=inputs.integers("V", "V")))
    assert (made["vocab_start"], made["valid"]) == (7, 64)


@pytest.mark.parametrize(
    ("storage", "dtype", "scale"), [("f16", torch.float16, None), ("u8", torch.uint8, "k_scale"), ("i8", torch.int8, "k_scales")]
)
def test_the_cache_has_the_storage_asked_for(storage: str, dtype: torch.dtype, scale: str | None) -> None:
    made = arguments.make(kv_store, dict(M=2, HK=1, B=2, P=4), storage=storage)
    assert made["k_cache"].dtype is dtype
    given = {name for name in ("k_scale", "k_scales") if made[name] is not None}
    assert given == ({scale} if scale else set())
    kv_store.contract.bind(tuple(made.values()), kernel=True)


def test_large_tensors_repeat_their_own_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "LARGE", 1 << 12)
    w = arguments.make(linear_skinny, dict(M=1, N=640, K=160))["w"]
    rows = (1 << 12) // 160
    assert w.shape == (640, 160)
    assert torch.equal(w[:rows], w[rows : 2 * rows])
    assert float(w.float().std()) == pytest.approx(0.25, rel=0.1)
    assert w[:rows].unique().numel() > 1000


def test_copies_of_arguments_share_no_memory() -> None:
    first = arguments.make(rms_norm, dict(M=2, E=2560))
    second = arguments.copy(first)
    assert torch.equal(first["x"], second["x"])
    assert first["x"].data_ptr() != second["x"].data_ptr()
    assert arguments.size(first) == 2 * 2 * 2560 * 2 + 2560 * 2


@pytest.mark.parametrize("op", build.launching(), ids=lambda op: op.name)
def test_every_op_with_a_kernel_declares_cases_that_can_be_called(op: Any) -> None:
    declared = cases.load(op.name)
    assert {case.rows for each in declared for case in each.each()} >= {5}
    named = [case.name for each in declared for case in each.each()]
    assert len(set(named)) == len(named)
    for each in declared:
        for case in each.each((1,)):
            assert case.bytes > 0
            assert not set(each.given) - {arg.name for arg in op.args}
            sizes = op.sizes(case.dims)
            for name, dim in op.dims.items():
                if isinstance(dim, build.Spec):
                    assert sizes[name] in dim.values, f"{op.name} {case.name}: {name}"


def test_cases_that_are_not_there_say_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(NoCases, match=r"rms_norm: there is no .*bench_rms_norm\.py; benchmarks are run from a clone"):
        cases.load("rms_norm", tmp_path)
    (tmp_path / "bench_rms_norm.py").write_text("x = 1\n")
    with pytest.raises(NoCases, match="declares no Cases of rms_norm"):
        cases.load("rms_norm", tmp_path)
    standing = cases.standing(rms_norm, tmp_path)
    assert {case.dims["E"] for each in standing for case in each.each()} == {2560, 10240}


def test_an_op_with_a_red_test_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "packages" / "sm70kernels" / "tests"
    folder.mkdir(parents=True)
    (folder / "test_good.py").write_text("def test_it():\n    pass\n")
    (folder / "test_bad.py").write_text("def test_it():\n    assert 1 == 2\n")
    run.verify("good", folder)
    with pytest.raises(run.RedTest, match=r"(?s)bad: .*test_bad\.py is red, so it is not timed.*assert 1 == 2"):
        run.verify("bad", folder)
    with pytest.raises(run.RedTest, match="missing"):
        run.verify("missing", folder)


def test_the_tests_of_all_ops_run_before_any_is_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    events: list[str] = []

    def check(op: str) -> None:
        events.append(f"test {op}")
        if op == "moe_route":
            raise run.RedTest("moe_route: red")

    def measure(self: Stopwatch, case: Any, config: Any = None) -> Any:
        events.append(f"time {case.op.name}")
        return original(self, case, config)

    original = Stopwatch.measure
    monkeypatch.setattr(run, "verified", lambda names: run_verified(names, 1, check))
    monkeypatch.setattr(Stopwatch, "measure", measure)
    monkeypatch.setattr(run, "Cuda", Pretended)
    ceilings = dict(copy_gb_s=4000.0, read_only_gb_s=3000.0, read_only_of_copy=0.75, matmul_tflop_s=600.0)
    monkeypatch.setattr(machine, "ceilings", lambda device: ceilings)
    monkeypatch.setattr(overhead, "measure", lambda op, dims: overhead.Overhead("rms_norm", 5.0, 5.5, 7.0))
    target = tmp_path / "deep" / "out.json"
    status = run.on_gpu(["moe_route", "rms_norm"], [1], target, False, "abc", said.append)
    assert status == 1  # moe_route was refused, and the yardstick is slow
    assert events == ["test moe_route", "test rms_norm", "time rms_norm", "time rms_norm"]
    record = json.loads(target.read_text())
    assert {each["op"] for each in record["results"]} == {"rms_norm"}
    assert record["refused"] == {"moe_route": "moe_route: red"}
    assert record["commit"] == "abc"
    assert record["overhead"]["checked"] == 7.0
    assert record["machine"]["torch"] == torch.__version__
    assert target.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    text = "\n".join(said)
    for part in ("moe_route: red", "75% of it", "below 85%", "function 5.50 us (1.10x, met)", "checked op 7.00 us (1.40x, MISSED)"):
        assert part in text


run_verified = run.verified


def test_without_a_gpu_counts_and_a_labelled_estimate_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["bench", "rms_norm", "--rows", "1"]) == 0
    text = capsys.readouterr().out
    assert "no CUDA device: nothing is timed" in text
    assert roofline.LABEL in text
    assert "rms_norm             hidden-M1" in text
    assert "15,360 bytes touched" in text


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["bench"], 2, "name an op, or say --all"),
        (["bench", "rmsnorm"], 2, "did you mean rms_norm"),
        (["bench", "linear_prefill"], 1, "linear_prefill: there is no"),
    ],
)
def test_what_cannot_be_timed(words: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == status
    assert message in capsys.readouterr().err


def test_there_is_no_way_around_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "rms_norm", "--no-verify"])
    assert "unrecognized arguments" in capsys.readouterr().err


@pytest.mark.parametrize("words", [1, 1000, 5000])
def test_the_read_only_kernel_reads_every_byte_and_writes_none(words: int) -> None:
    data = torch.arange(4 * words, dtype=torch.int32)
    found = torch.zeros(1, dtype=torch.int32)
    grid = read_only.grid(words, 1)
    counters = emulate(read_only.image().ptx, read_only.NAME, grid, read_only.THREADS, data, words, 12345, found)
    assert counters.global_bytes_read == 16 * words
    assert counters.global_bytes_written == 0
    assert counters.sectors == counters.minimum_sectors


def test_no_word_is_left_out_by_the_read_only_kernel() -> None:
    words = 3000
    for place in (0, 1023, 1024, 2999):
        data = torch.zeros(4 * words, dtype=torch.int32)
        data[4 * place + 2] = 77
        found = torch.zeros(1, dtype=torch.int32)
        emulate(read_only.image().ptx, read_only.NAME, 3, read_only.THREADS, data, words, 77, found)
        assert found.item() == 77, place


def test_ways_to_launch_take_turns() -> None:
    called: list[int] = []
    drained: list[int] = []
    ways = [lambda number=number: called.append(number) for number in range(3)]
    found = overhead.turns(ways, lambda: drained.append(len(called)), launches=4, count=2)
    assert called == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4 + [1] * 4 + [2] * 4
    assert drained == [0, 4, 8, 12, 16, 20, 24]
    assert all(0 < each < 1000 for each in found)


def test_the_bare_call_passes_what_the_function_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def launch(*passed: Any) -> tuple[Any]:
        seen.append(passed)
        return ("success",)

    # cuda.bindings is there only where a GPU is.
    monkeypatch.setattr(driver, "bindings", lambda: bindings)
    monkeypatch.setattr(overhead, "bindings", lambda: bindings)
    bindings = SimpleNamespace(cuLaunchKernel=launch, CUresult=SimpleNamespace(CUDA_SUCCESS="success"))
    function = Function("kernel", 7, ("Q", "I"), 3, lambda device: 96 + device)
    monkeypatch.setattr(Kernel, "function", lambda kernel, defines, device: function)
    called = ((3, 2), 64, (None, 5), 0)
    with overhead.observed() as observed:
        Kernel("rms_norm").function({}, 3).launch(*called)
    assert observed == [(function, called)]
    overhead.bare(function, called)()
    assert seen[0] == seen[2] == (7, 3, 2, 1, 64, 1, 1, 0, 99, function.buffers[-1].pointers, 0)
    assert overhead.Overhead("op", 4.0, 5.0, 6.0).checked_ratio == 1.5
    assert overhead.Overhead("op", 4.0, 5.0, 6.0).function_ratio == 1.25


def test_a_plot_is_drawn_from_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Stopwatch(Pretended(), samples=3).measure(next(CASES.each())).record()
    path = tmp_path / "record.json"
    report.save(path, dict(machine=dict(device="pretended"), commit="abc", results=[found]))
    assert main(["bench", "--draw", str(path)]) == 0
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_names_itself_and_its_commit(tmp_path: Path) -> None:
    found = machine.describe()
    assert found["torch"] == torch.__version__
    assert "commit abc" in machine.line(found, "abc")
    assert machine.commit(tmp_path) == "unknown"


class Stand:
    """What pytest-benchmark's fixture is to a test."""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}
        self.times: list[float] = []

    def pedantic(self, work: Callable[[], float], rounds: int, warmup_rounds: int) -> None:
        self.times = [work() for _ in range(rounds + warmup_rounds)]


def test_pytest_benchmark_times_the_captured_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    device, stand = Pretended(), Stand()
    monkeypatch.setattr(collect, "_device", lambda: device)
    test = collect.benchmark(CASES, CASES)
    marks = {mark.name: mark for mark in test.pytestmark}  # type: ignore[attr-defined]
    assert set(marks) == {"gpu", "skipif", "parametrize"}
    assert [case.name for case in marks["parametrize"].args[1]] == ["hidden-M1", "hidden-M5"] * 2
    only = next(CASES.each())
    test(stand, only)
    assert len(stand.times) > 10
    assert stand.extra_info["bytes"] == only.bytes
    assert stand.extra_info["calls"] * LAUNCH == pytest.approx(statistics.median(stand.times) - START, rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_case_is_timed_on_a_gpu() -> None:
    found = Stopwatch(timing.Cuda()).measure(next(CASES.each()))
    assert 0.1 < found.time.median < 1000
    assert found.touched > torch.cuda.get_device_properties(0).L2_cache_size
    assert statistics.median([found.time.low, found.time.median, found.time.high]) == found.time.median
