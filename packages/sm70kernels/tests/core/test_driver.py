"""Launching: how arguments are laid out, what is refused, and on a GPU that launches follow torch's stream and its graphs."""

import struct

import pytest
import torch

from sm70kernels import driver, rms_norm
from sm70kernels.cuda import compile_source
from sm70kernels.driver import LaunchError, parameters
from sm70kernels.testing import same_bits

SOURCE = """
extern "C" __global__ void mixed(const float* x, bool flag, double d, int n, unsigned char* y, float f, long long big) {
    y[0] = flag ? n : static_cast<int>(d + f + x[0] + big);
}
extern "C" __global__ void add_one(float* x) { x[threadIdx.x] += 1.0f; }
"""
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_parameters_are_read_from_the_ptx() -> None:
    ptx = compile_source(SOURCE).ptx
    assert parameters(ptx, "mixed") == ("Q", "B", "d", "I", "Q", "f", "Q")
    assert parameters(ptx, "add_one") == ("Q",)
    with pytest.raises(LaunchError, match=r'other: the compiled source has no such entry; declare it extern "C" __global__'):
        parameters(ptx, "other")


def test_arguments_lie_where_the_driver_reads_them() -> None:
    formats = ("Q", "B", "d", "I", "Q", "f", "Q")
    assert driver._offsets(formats) == [0, 8, 16, 24, 32, 40, 48]
    packed = struct.pack("<" + "".join(driver._padded(formats)), 1, True, 2.5, 3, 4, 0.5, 5)
    for kind, offset, value in zip(formats, driver._offsets(formats), (1, 1, 2.5, 3, 4, 0.5, 5), strict=True):
        assert struct.unpack_from("<" + kind, packed, offset) == (value,)


def call(rows: int = 5) -> dict[str, object]:
    return rms_norm.make(dict(M=rows, E=2560), 1, torch.float16, device="cuda")


@pytest.mark.gpu
@on_gpu
def test_a_graph_replays_what_was_launched_in_it() -> None:
    arguments = call()
    eager = rms_norm(**arguments)
    out = torch.full_like(eager, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rms_norm(**arguments, out=out)
    assert out.isnan().all()
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(out, eager)


@pytest.mark.gpu
@on_gpu
def test_launches_go_to_the_current_stream() -> None:
    arguments = call(64)
    expected = rms_norm(**arguments)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    out = torch.empty_like(expected)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        rms_norm(**arguments, out=out)
        done = torch.cuda.Event()
        done.record()
    assert not done.query(), "the launch did not wait behind what its stream was doing"
    done.synchronize()
    assert same_bits(out, expected)


@pytest.mark.gpu
@on_gpu
def test_a_refused_launch_names_the_kernel_and_what_was_asked() -> None:
    function = driver.load(compile_source(SOURCE), "add_one", 0)
    x = torch.zeros(32, device="cuda")
    function.launch(1, 32, (x,))
    assert x.sum().item() == 32
    with pytest.raises(LaunchError, match=r"add_one on cuda:0: 2 arguments for 1 parameters"):
        function.launch(1, 32, (x, 3))
    with pytest.raises(LaunchError, match=r"add_one on cuda:0: grid 1, block 2048, 0 bytes of shared memory: CUDA_ERROR_INVALID_VALUE"):
        function.launch(1, 2048, (x,))
    with pytest.raises(LaunchError, match=r"add_one on cuda:0: 1000000 bytes of shared memory: CUDA_ERROR_INVALID_VALUE"):
        function.launch(1, 32, (x,), 1_000_000)


@pytest.mark.gpu
@on_gpu
def test_a_view_at_an_odd_address_is_refused_before_the_launch() -> None:
    arguments = call()
    wide = torch.zeros(5 * 2560 + 1, dtype=torch.float16, device="cuda")
    with pytest.raises(ValueError, match="rms_norm: x: expected an address that is a multiple of 16"):
        rms_norm(**arguments | dict(x=wide[1:].view(5, 2560)))
