# As much of PyTorch's interface as share.py calls, over libcuda by ctypes: so that the script and what the runner makes
# of it are tried without PyTorch. Memory is the driver's; products and graphs take their time and give what is expected.
import ctypes
import time

__version__ = "stand-in"
uint8, float16 = "uint8", "float16"
_cuda = ctypes.CDLL("libcuda.so.1")
_context = ctypes.c_void_p()


class _Version:
    cuda = "stand-in"


version = _Version()


class OutOfMemoryError(RuntimeError):
    pass


def _start():
    if _context:
        return
    assert _cuda.cuInit(0) == 0
    assert _cuda.cuDevicePrimaryCtxRetain(ctypes.byref(_context), 0) == 0
    assert _cuda.cuCtxSetCurrent(_context) == 0


class Tensor:
    def __init__(self, count, size):
        _start()
        self.count, self.value, self.at = count, 0, ctypes.c_uint64()
        result = _cuda.cuMemAlloc_v2(ctypes.byref(self.at), ctypes.c_size_t(max(count * size, 1)))
        if result == 2:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate %d" % (count * size))
        assert result == 0, result

    def __del__(self):
        if self.at.value:
            _cuda.cuMemFree_v2(self.at)

    def numel(self):
        return self.count

    def fill_(self, value):
        assert _cuda.cuMemsetD8_v2(self.at, ctypes.c_ubyte(value), ctypes.c_size_t(self.count)) == 0
        back = (ctypes.c_ubyte * 16)()
        assert _cuda.cuMemcpyDtoH_v2(back, self.at, ctypes.c_size_t(16)) == 0
        self.value = back[15]
        return self

    def sum(self):
        return self

    def item(self):
        return self.count * self.value

    def copy_(self, other):
        return self

    def __matmul__(self, other):
        time.sleep(0.0005)
        return self


def empty(count, dtype=None, device=None):
    return Tensor(count, 1)


def zeros(count, device=None):
    return Tensor(count, 4)


def randn(a, b, device=None, dtype=None):
    return Tensor(a * b, 2)


def manual_seed(seed):
    pass


def allclose(a, b, rtol=0, atol=0):
    return True


class no_grad:
    def __enter__(self):
        return self

    def __exit__(self, *what):
        return False


class nn:
    class Sequential:
        def __init__(self, *layers):
            self.weights = None

        def cuda(self):
            self.weights = Tensor(1 << 20, 4)
            return self

        def __call__(self, x):
            return x

    Linear = staticmethod(lambda a, b: None)
    ReLU = staticmethod(lambda: None)


class cuda:
    OutOfMemoryError = OutOfMemoryError

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def device_count():
        return 1

    @staticmethod
    def mem_get_info():
        _start()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert _cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value, total.value

    @staticmethod
    def get_device_properties(device):
        _start()
        total = ctypes.c_size_t()
        assert _cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0) == 0

        class p:
            name, total_memory = "card", total.value

        return p

    @staticmethod
    def empty_cache():
        pass

    @staticmethod
    def synchronize():
        pass

    @staticmethod
    def memory_reserved():
        return 0

    @staticmethod
    def get_allocator_backend():
        return "native"

    class Stream(no_grad):
        def wait_stream(self, other):
            pass

    @staticmethod
    def current_stream():
        return cuda.Stream()

    @staticmethod
    def stream(s):
        return no_grad()

    class CUDAGraph:
        def replay(self):
            pass

    @staticmethod
    def graph(g):
        return no_grad()
