"""What only the native driver does."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.driver_programs import WIDTH, Writer

from staticlm.errors import Code, ExecutionError, RunnerError
from staticlm.runtime import libraries, native
from staticlm.runtime.allocators import get_chain
from staticlm.runtime.buffers import Buffer, allocate
from staticlm.runtime.driver import BoundMethod
from staticlm.runtime.native import NativeDriver

Programs = Callable[[str], Path]


pytestmark = pytest.mark.usefixtures("native_driver")


@pytest.fixture(scope="module")
def driver(native_driver: NativeDriver) -> NativeDriver:
    return native_driver


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return functools.cache(Writer(tmp_path_factory.mktemp("native_programs")))


def child(code: str, *arguments: str) -> Any:
    """What a fresh process prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def load(driver: NativeDriver, path: Path, name: str) -> tuple[BoundMethod, list[Buffer]]:
    chain = get_chain()
    method = driver.load(path).load_method(name, chain)
    buffers = [allocate(chain, facts.nbytes) for facts in method.facts.inputs if facts]
    for index, buffer in enumerate(buffers):
        method.bind_input(index, buffer)
    return method, buffers


def test_a_program_runs_without_torch(programs: Programs) -> None:
    seen = child(
        """
        import json, pathlib, sys
        from staticlm.runtime.drivers import get_driver
        from staticlm.runtime.allocators import get_chain
        from staticlm.runtime.buffers import allocate
        driver = get_driver("auto")
        chain = get_chain()
        method = driver.load(pathlib.Path(sys.argv[1])).load_method("decode", chain)
        buffers = [allocate(chain, facts.nbytes) for facts in method.facts.inputs]
        for index, buffer in enumerate(buffers): method.bind_input(index, buffer)
        buffers[0].view("float32", (4,))[:] = 2
        method.execute()
        heavy = [name for name in ("torch", "transformers", "executorch.exir") if name in sys.modules]
        print(json.dumps([driver.name, method.output(0).tolist(), heavy]))
        """,
        str(programs("in_place")),
    )
    assert seen == ["native", [[2.0] * WIDTH], []]


@pytest.mark.parametrize("order", [("native", "stock", "native"), ("stock", "native", "stock")])
def test_both_drivers_live_in_one_process_in_either_order(
    programs: Programs, order: tuple[str, ...]
) -> None:
    seen = child(
        """
        import json, pathlib, sys
        from staticlm.errors import ExecutionError
        from staticlm.runtime.drivers import get_driver
        from staticlm.runtime.allocators import get_chain
        from staticlm.runtime.buffers import allocate
        answers = []
        for name in sys.argv[2:]:
            chain = get_chain()
            program = get_driver(name).load(pathlib.Path(sys.argv[1]))
            method = program.load_method("decode", chain)
            buffers = [allocate(chain, facts.nbytes) for facts in method.facts.inputs]
            for index, buffer in enumerate(buffers): method.bind_input(index, buffer)
            position = buffers[1].view("int64", (1,))
            buffers[2].view("float32", (24,))[:] = 1
            position[0] = 77
            try: method.execute()
            except ExecutionError as error: logged = "Index 77 out of range" in str(error)
            position[0] = 0
            method.execute()
            answers.append([name, float(method.output(0)[0, 0]), logged])
        maps = {line.split()[-1] for line in open("/proc/self/maps") if "libexecutorch.so" in line}
        print(json.dumps([answers, len(maps)]))
        """,
        str(programs("in_place")),
        *order,
    )
    # The log is collected by the native driver even when ExecuTorch's bindings came after it.
    assert seen == [[[name, 6.0, name == "native"] for name in order], 1]


@pytest.mark.parametrize("first", ["bindings", "driver"])
def test_quantized_kernels_are_loaded_when_a_program_needs_them(
    programs: Programs, first: str
) -> None:
    seen = child(
        """
        import json, pathlib, sys
        from staticlm.runtime.native import NativeDriver
        from staticlm.runtime.allocators import get_chain
        from staticlm.runtime.buffers import allocate
        if sys.argv[2] == "bindings":
            import executorch.kernels.quantized
        driver = NativeDriver()
        before = any("embedding_byte" in name for name in driver._lib.operators())
        chain = get_chain()
        method = driver.load(pathlib.Path(sys.argv[1])).load_method("forward", chain)
        if sys.argv[2] == "driver":
            import executorch.kernels.quantized
        ids = allocate(chain, 24)
        ids.view("int64", (3,))[:] = [7, 0, 2]
        method.bind_input(0, ids)
        method.execute()
        print(json.dumps([before, method.output(0).tolist()]))
        """,
        str(programs("quantized")),
        first,
    )
    rows = [[14.0, 14.5, 15.0, 15.5], [0.0, 0.5, 1.0, 1.5], [4.0, 4.5, 5.0, 5.5]]
    assert seen == [first == "bindings", [rows]]


@pytest.mark.parametrize("shared", [True, False])
def test_the_weight_cache_keeps_one_copy_of_the_weights(programs: Programs, shared: bool) -> None:
    resident = child(
        """
        import json, pathlib, sys
        from staticlm.runtime.native import NativeDriver
        from staticlm.runtime.allocators import get_chain
        def kib():
            text = pathlib.Path("/proc/self/status").read_text()
            return int(text.split("RssAnon:")[1].split()[0])
        program = NativeDriver(weight_cache=sys.argv[2] == "True").load(pathlib.Path(sys.argv[1]))
        sizes, kept = [kib()], []
        for name in ("a", "b"):
            kept.append(program.load_method(name, get_chain()))
            sizes.append(kib())
        print(json.dumps(sizes))
        """,
        str(programs("busy")),
        str(shared),
    )
    weights = 6 * 768 * 768 * 4 / 1024
    first, second = resident[1] - resident[0], resident[2] - resident[1]
    assert first > 0.9 * weights
    assert (second < 0.3 * weights) if shared else (second > 0.9 * weights)


def test_methods_that_share_weights_may_be_closed_in_any_order(
    driver: NativeDriver, programs: Programs
) -> None:
    program = driver.load(programs("busy"))
    chain = get_chain()
    source = allocate(chain, 16 * 768 * 4)
    rng = np.random.default_rng(0)
    source.view("float32", (16, 768))[:] = rng.standard_normal((16, 768), dtype=np.float32)

    def run(method: BoundMethod) -> np.ndarray[Any, Any]:
        method.bind_input(0, source)
        method.execute()
        return method.output(0)[:4].copy()

    a, b = program.load_method("a", chain), program.load_method("b", chain)
    expected = run(a)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(run(b), expected, rtol=1e-4, atol=1e-6)
    a.close()
    np.testing.assert_allclose(run(b), expected, rtol=1e-4, atol=1e-6)
    b.close()
    again = program.load_method("a", chain)
    np.testing.assert_array_equal(run(again), expected)
    program.close()


def test_another_thread_runs_during_a_step(driver: NativeDriver, programs: Programs) -> None:
    method, _ = load(driver, programs("busy"), "long")
    driver.set_threads(1)  # leave the other core to the ticker
    method.execute()
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        inside = 0
        for _ in range(5):
            start = time.perf_counter()
            method.execute()
            end = time.perf_counter()
            inside = max(inside, sum(start < at < end for at in ticks))
    finally:
        done.set()
        thread.join()
        driver.set_threads(2)
    assert inside >= 5  # with the GIL held it is 0 or 1
    method.close()


def test_a_second_thread_is_refused_while_a_method_runs(
    driver: NativeDriver, programs: Programs
) -> None:
    method, buffers = load(driver, programs("busy"), "long")
    method.execute()
    running = threading.Event()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            running.set()
            method.execute()

    thread = threading.Thread(target=work)
    thread.start()
    running.wait()
    refused: list[Code] = []
    uses: list[Callable[[], object]] = [
        method.execute,
        lambda: method.bind_input(0, buffers[0]),
        method.close,
    ]
    try:
        for use in uses:
            for _ in range(200):
                time.sleep(0.002)
                try:
                    use()
                except RunnerError as error:
                    refused.append(error.code)
                    break
                if use is method.close:
                    break
    finally:
        stop.set()
        thread.join()
    assert refused == [Code.DRIVER_UNSAFE] * 3
    method.execute()  # nothing was released
    method.close()


def test_outputs_that_are_one_value_are_not_placed_apart(
    driver: NativeDriver, programs: Programs
) -> None:
    method, buffers = load(driver, programs("twice"), "forward")
    assert all(facts and not facts.planned for facts in method.facts.outputs)
    spare = allocate(get_chain(), 64)
    with pytest.raises(RunnerError, match="same value as output 0") as error:
        method.bind_output(1, spare)
    assert error.value.code is Code.DRIVER_UNSAFE
    method.bind_output(0, spare)
    buffers[0].view("float32", (WIDTH,))[:] = [1, 2, 3, 4]
    method.execute()
    assert method.output(0).tolist() == method.output(1).tolist() == [[2.0, 4.0, 6.0, 8.0]]
    assert method.output(1).ctypes.data == spare.address
    method.close()


def test_errors_carry_what_executorch_logged(driver: NativeDriver, programs: Programs) -> None:
    method, buffers = load(driver, programs("in_place"), "decode")
    buffers[1].view("int64", (1,))[0] = -9
    with pytest.raises(ExecutionError, match=r"InvalidArgument \(0x12\): Index -9 out of range"):
        method.execute()
    method.close()


def test_an_allocator_that_fails_at_an_arena_stops_the_load(
    driver: NativeDriver, programs: Programs
) -> None:
    class Failing:
        name = "failing"

        def allocate(self, nbytes: int, alignment: int = 64) -> Buffer | None:
            raise KeyError("broken allocator")

        def bind(self, buffer: Buffer, method: str, direction: str, index: int) -> None: ...

        def free(self, buffer: Buffer) -> None: ...

    class Empty(Failing):
        def allocate(self, nbytes: int, alignment: int = 64) -> Buffer | None:
            return None

    program = driver.load(programs("in_place"))
    with pytest.raises(KeyError, match="broken allocator"):
        program.load_method("decode", Failing())
    with pytest.raises(RunnerError, match="'failing' has no memory") as error:
        program.load_method("decode", Empty())
    assert error.value.code is Code.ALLOCATION_FAILED
    program.close()


def test_backend_options_are_set_or_refused(driver: NativeDriver) -> None:
    driver.set_backend_option("XnnpackBackend", "weight_cache_enabled", True)
    for backend, key, value in [
        ("NoSuchBackend", "weight_cache_enabled", True),
        ("XnnpackBackend", "k" * 64, True),
        ("XnnpackBackend", "weight_cache_enabled", "v" * 300),
    ]:
        with pytest.raises(RunnerError) as error:
            driver.set_backend_option(backend, key, value)
        assert error.value.code is Code.DRIVER_UNAVAILABLE


def test_another_executorch_than_it_was_built_against_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(libraries, "installed_version", lambda: "1.5.9")
    with pytest.raises(
        RunnerError, match=r"built against executorch 1\.5\..*, not 1\.5\.9"
    ) as error:
        NativeDriver()
    assert error.value.code is Code.DRIVER_UNAVAILABLE
    monkeypatch.setattr(libraries, "installed_version", lambda: None)
    with pytest.raises(RunnerError, match="executorch is not installed"):
        native.NativeDriver()
