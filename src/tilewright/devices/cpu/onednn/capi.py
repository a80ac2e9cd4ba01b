"""oneDNN's C API in ctypes: the library, memory descriptors, attributes, primitive descriptors, primitives.

Names follow the oneDNN 3.x C API without its ``dnnl_`` prefix. Constants are plain ints. Every object frees
its C counterpart when Python drops it. Nothing here is loaded before the first call of :func:`load`.

Two conventions differ from the C API, because theirs invite mistakes: ``dilation`` counts as in the
literature (1 is dense; oneDNN's own is one less), and the scratchpad always belongs to the caller (mode
``user``), so that one buffer per thread serves all primitives.

Source: oneDNN 3.x developer guide, "Basic concepts" and the C API reference (oneapi-src/oneDNN).
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

# ------------------------------------------------------------------------------------------- constants

UNDEF, F16, BF16, F32, S32, S8, U8, F64 = range(8)
DTYPES = {"f16": F16, "bf16": BF16, "f32": F32, "s32": S32, "s8": S8, "u8": U8, "f64": F64}
_DTYPE_NAMES = {code: name for name, code in DTYPES.items()}


def _numbered(first: int, names: str, suffix: str = "") -> dict[str, int]:
    return {name + suffix: value for value, name in enumerate(names.split(), first)}


# A tag's letters are the logical axes from outermost to innermost; a capital letter is split into blocks.
TAGS = _numbered(1, "any a ab abc abcd abcde abcdef")
TAGS |= _numbered(14, "ba acb bac bca cab cba abdc acbd acdb adbc adcb bacd bcda cdab cdba dcab")
TAGS |= _numbered(30, "abced abdec acbde acdeb adecb bacde bcdea cdeab cdeba decab")
TAGS |= _numbered(40, "abcdfe abdefc abdfce acbdef adefcb defcab")
TAGS |= {"aBc16b": 56, "aBc8b": 69, "aBcd16b": 78, "aBcd8b": 102, "aBcde16b": 121, "aBcde8b": 142}
TAGS |= {"ABcd16b16a": 79, "Abcde16a": 114, "Abcde8a": 138}

FORMAT_UNDEF, FORMAT_ANY, FORMAT_BLOCKED, FORMAT_OPAQUE = range(4)

FORWARD_TRAINING, FORWARD_INFERENCE = 64, 96
BACKWARD, BACKWARD_DATA, BACKWARD_WEIGHTS = 128, 160, 192

CONVOLUTION = {"direct": 1, "winograd": 2, "auto": 3}
DECONVOLUTION = {"direct": 0xA, "winograd": 0xB}

ELTWISE = _numbered(0x20, "relu tanh elu square abs sqrt linear soft_relu hardsigmoid logistic exp")
ELTWISE |= _numbered(0x2B, "gelu_tanh swish log clip clip_v2 pow gelu_erf round mish hardswish")
ELTWISE |= _numbered(0x100, "relu tanh elu sqrt logistic exp clip_v2", "_use_dst")  # gradient from the result
POOLING = {"max": 0x1FF, "avg_include_padding": 0x2FF, "avg_exclude_padding": 0x3FF}
BINARY = _numbered(0x1FFF0, "add mul max min div sub ge gt le lt eq ne")
RESAMPLING = _numbered(0x2FFF0, "nearest linear")
REDUCTION = _numbered(0x2FFF2, "max min sum mul mean norm_lp_max norm_lp_sum")
REDUCTION |= _numbered(0x2FFF9, "norm_lp_power_p_max norm_lp_power_p_sum")
SOFTMAX = {"accurate": 0x30000, "log": 0x30001}

USE_GLOBAL_STATS, USE_SCALE, USE_SHIFT, FUSE_NORM_RELU, FUSE_NORM_ADD_RELU = 1, 2, 4, 8, 16

FPMATH = {"strict": 0, "bf16": 1, "f16": 2, "any": 3, "tf32": 4}

ARG_SRC = ARG_SRC_0 = 1
ARG_SRC_1 = 2
ARG_DST = 17
ARG_WEIGHTS = 33
ARG_BIAS = 41
ARG_MEAN, ARG_VARIANCE, ARG_SCALE, ARG_SHIFT = 49, 50, 51, 52
ARG_WORKSPACE = 64
ARG_SCRATCHPAD = 80
ARG_DIFF_SRC, ARG_DIFF_SRC_1 = 129, 130
ARG_DIFF_DST = 145
ARG_DIFF_WEIGHTS = 161
ARG_DIFF_BIAS = 169
ARG_DIFF_SCALE, ARG_DIFF_SHIFT = 255, 256
ARG_MULTIPLE_SRC = 1024


def arg_post_op(index: int, arg: int = ARG_SRC_1) -> int:
    """The argument index of post-op ``index``'s operand (binary: ``ARG_SRC_1``, prelu: ``ARG_WEIGHTS``)."""
    return 32768 * (index + 1) | arg


_QUERY_IMPL = 8
_MD_QUERIES = {"src": 129, "diff_src": 130, "weights": 131, "diff_weights": 132, "dst": 133, "diff_dst": 134}
_MD_QUERIES |= {"workspace": 135, "scratchpad": 136}
(
    _QUERY_NDIMS,
    _QUERY_DIMS,
    _QUERY_DTYPE,
    _QUERY_OFFSET,
    _QUERY_PADDED_DIMS,
    _QUERY_PADDED_OFFSETS,
    _QUERY_FORMAT_KIND,
    _QUERY_INNER_NBLKS,
    _QUERY_INNER_BLKS,
    _QUERY_INNER_IDXS,
) = range(256, 266)
_QUERY_STRIDES = 14

STATUS = {
    0: "success",
    1: "out of memory",
    2: "invalid arguments",
    3: "unimplemented",
    4: "no further implementation",
    5: "runtime error",
    6: "not required",
}
_SUCCESS, _UNIMPLEMENTED, _LAST_IMPL = 0, 3, 4

RUNTIMES = {1: "sequential", 2: "openmp", 4: "tbb", 8: "threadpool"}
_MAX_NDIMS = 12
_Dims = c_int64 * _MAX_NDIMS


class OneDNNError(RuntimeError):
    """A call of oneDNN failed; the message names the call, its arguments and the status."""


class Unimplemented(OneDNNError):
    """oneDNN has no implementation of this problem on this machine."""


class OneDNNUnavailable(Exception):
    """oneDNN cannot be loaded; ``reason`` is a sentence that says what was looked for and how to get it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


# ----------------------------------------------------------------------------------------- the library


class _Version(ctypes.Structure):
    _fields_ = [
        ("major", c_int),
        ("minor", c_int),
        ("patch", c_int),
        ("hash", c_char_p),
        ("cpu_runtime", c_uint),
        ("gpu_runtime", c_uint),
    ]


class ExecArg(ctypes.Structure):
    """One argument of an execution: its index and its memory object."""

    _fields_ = [("arg", c_int), ("memory", c_void_p)]


# Argument kinds: p pointer, i int, u unsigned, z size_t, l int64, f float. The result is a status unless
# listed in _RETURNS.
_KINDS = {"p": c_void_p, "i": c_int, "u": c_uint, "z": c_size_t, "l": c_int64, "f": c_float}
_SIGNATURES = {
    "engine_create": "piz",
    "stream_create": "ppu",
    "stream_wait": "p",
    "stream_destroy": "p",
    "set_verbose": "i",
    "set_primitive_cache_capacity": "i",
    "memory_desc_create_with_strides": "pipip",
    "memory_desc_create_with_tag": "pipii",
    "memory_desc_clone": "pp",
    "memory_desc_destroy": "p",
    "memory_desc_query": "pip",
    "memory_create": "pppp",
    "memory_set_data_handle": "pp",
    "memory_destroy": "p",
    "primitive_attr_create": "p",
    "primitive_attr_destroy": "p",
    "primitive_attr_set_scratchpad_mode": "pi",
    "primitive_attr_set_fpmath_mode": "pi",
    "primitive_attr_set_post_ops": "pp",
    "post_ops_create": "p",
    "post_ops_destroy": "p",
    "post_ops_append_sum": "pfii",
    "post_ops_append_eltwise": "piff",
    "post_ops_append_binary": "pip",
    "post_ops_append_prelu": "pi",
    "primitive_desc_query": "piip",
    "primitive_desc_next_impl": "p",
    "primitive_desc_destroy": "p",
    "primitive_create": "pp",
    "primitive_execute": "ppip",
    "primitive_destroy": "p",
    # primitive descriptors: (out, engine, ...)
    "reorder_primitive_desc_create": "pppppp",
    "concat_primitive_desc_create": "pppiipp",
    "sum_primitive_desc_create": "pppippp",
    "binary_primitive_desc_create": "ppipppp",
    "convolution_forward_primitive_desc_create": "ppii" + "p" * 9,
    "convolution_backward_data_primitive_desc_create": "ppi" + "p" * 9,
    "convolution_backward_weights_primitive_desc_create": "ppi" + "p" * 10,
    "deconvolution_forward_primitive_desc_create": "ppii" + "p" * 9,
    "deconvolution_backward_data_primitive_desc_create": "ppi" + "p" * 9,
    "deconvolution_backward_weights_primitive_desc_create": "ppi" + "p" * 10,
    "inner_product_forward_primitive_desc_create": "ppi" + "p" * 5,
    "inner_product_backward_data_primitive_desc_create": "p" * 7,
    "inner_product_backward_weights_primitive_desc_create": "p" * 8,
    "matmul_primitive_desc_create": "p" * 7,
    "eltwise_forward_primitive_desc_create": "ppiippffp",
    "eltwise_backward_primitive_desc_create": "ppipppffpp",
    "softmax_forward_primitive_desc_create": "ppiippip",
    "softmax_backward_primitive_desc_create": "ppipppipp",
    "pooling_forward_primitive_desc_create": "ppii" + "p" * 8,
    "pooling_backward_primitive_desc_create": "ppi" + "p" * 9,
    "prelu_forward_primitive_desc_create": "ppipppp",
    "prelu_backward_primitive_desc_create": "p" * 9,
    "batch_normalization_forward_primitive_desc_create": "ppippfup",
    "batch_normalization_backward_primitive_desc_create": "ppipppfupp",
    "layer_normalization_forward_primitive_desc_create": "ppipppfup",
    "layer_normalization_backward_primitive_desc_create": "ppippppfupp",
    "resampling_forward_primitive_desc_create": "ppiipppp",
    "resampling_backward_primitive_desc_create": "ppippppp",
    "reduction_primitive_desc_create": "ppippffp",
}
_OPTIONAL = {  # absent from some 3.x builds
    "group_normalization_forward_primitive_desc_create": "ppipplfup",  # 3.3
    "group_normalization_backward_primitive_desc_create": "ppippplfupp",  # 3.3
    "primitive_attr_set_deterministic": "pi",  # 3.4
}
_RETURNS = {"memory_desc_equal": (c_int, "pp"), "memory_desc_get_size": (c_size_t, "p")}
_RETURNS |= {"primitive_desc_query_md": (c_void_p, "pii")}


class Lib:
    """The loaded library: ``path``, ``version``, ``runtime``, ``engine`` and the C functions.

    ``c`` holds the functions as they release the interpreter lock, ``held`` the same functions called with
    the lock held: cheaper, and right for calls that only set a field.
    """

    def __init__(self, path: str, cdll: ctypes.CDLL) -> None:
        self.path = path
        self.cdll = cdll
        try:
            get_version = cdll.dnnl_version
        except AttributeError:
            raise OneDNNUnavailable(f"{path} is no oneDNN library: it has no function dnnl_version.") from None
        get_version.restype = ctypes.POINTER(_Version)
        found = get_version().contents
        self.version = (found.major, found.minor, found.patch)
        self.version_string = ".".join(map(str, self.version))
        if found.major != 3:
            raise OneDNNUnavailable(
                f"{path} is oneDNN {self.version_string}, but this library speaks the C API of 3.x: "
                "point TILEWRIGHT_ONEDNN at a 3.x build or run `pip install onednn-cpu-gomp`."
            )
        if not found.cpu_runtime:
            raise OneDNNUnavailable(f"{path} was built without a CPU engine: use a build that has one.")
        if found.cpu_runtime not in RUNTIMES:  # SYCL runs asynchronously on its own queues
            raise OneDNNUnavailable(
                f"{path} runs its CPU code through runtime {found.cpu_runtime:#x}, not through one of {', '.join(RUNTIMES.values())}. {_INSTALL}"
            )
        self.runtime = RUNTIMES[found.cpu_runtime]
        self.c: Any = _functions(cdll, self)
        self.held_dll = ctypes.PyDLL(path, handle=cdll._handle)
        self.held: Any = _functions(self.held_dll, self)
        out = c_void_p()
        check(self.c.engine_create(byref(out), 1, 0), "engine_create(cpu)")
        self.engine: int = out.value or 0

    def has(self, name: str) -> bool:
        """Whether this build has the function ``dnnl_<name>``."""
        return hasattr(self.c, name)

    def __repr__(self) -> str:
        return f"oneDNN {self.version_string} ({self.runtime}) at {self.path}"


def _functions(dll: ctypes.CDLL, lib: Lib) -> Any:
    table = type("functions", (), {})()
    wanted = {name: (c_int, kinds) for name, kinds in (_SIGNATURES | _OPTIONAL).items()} | _RETURNS
    for name, (restype, kinds) in wanted.items():
        try:
            function = dll["dnnl_" + name]
        except AttributeError:
            if name in _OPTIONAL:
                continue
            raise OneDNNUnavailable(f"{lib.path} (oneDNN {lib.version_string}) lacks the function dnnl_{name}: use a full build.") from None
        function.restype = restype
        function.argtypes = [_KINDS[kind] for kind in kinds]
        setattr(table, name, function)
    return table


_load_lock = threading.RLock()
_lib: Lib | None = None
OFF = ("off", "0", "none")  # values of TILEWRIGHT_ONEDNN that forbid it
_failure: tuple[str | None, str] | None = None  # the TILEWRIGHT_ONEDNN it happened under, the reason

_NAMES = {"darwin": ("libdnnl.3.dylib",), "win32": ("dnnl.dll",)}.get(sys.platform, ("libdnnl.so.3",))
_INSTALL = "Run `pip install onednn-cpu-gomp`, or set TILEWRIGHT_ONEDNN to the path of a oneDNN 3.x library."


def _candidates() -> list[str]:
    """Where wheels put the library: the data folder of the environment, user site or ``pip --target``."""
    package = Path(__file__).resolve().parents[3]  # .../tilewright
    roots = [sysconfig.get_path("data"), sys.prefix, site.USER_BASE, str(package.parent)]
    folders = [Path(root) / sub for root in roots if root for sub in ("lib", "Library/bin")]
    return list(dict.fromkeys(str(folder / name) for folder in folders for name in _NAMES))


def _open(path: str) -> Lib:
    try:
        cdll = ctypes.CDLL(path)
    except OSError as error:
        hint = ""
        if "libgomp" in str(error):
            hint = " The GNU OpenMP library is missing: install it (on Debian: `apt-get install libgomp1`)."
        raise OneDNNUnavailable(f"oneDNN at {path} cannot be opened: {error}.{hint}") from None
    return Lib(path, cdll)


def _find() -> Lib:
    asked = os.environ.get("TILEWRIGHT_ONEDNN")
    if asked is not None and asked.lower() in OFF:
        raise OneDNNUnavailable(f"oneDNN is switched off by TILEWRIGHT_ONEDNN={asked}.")
    if asked:
        if not os.path.exists(asked):
            raise OneDNNUnavailable(f"TILEWRIGHT_ONEDNN names {asked}, which does not exist. {_INSTALL}")
        return _open(asked)
    candidates = _candidates()
    for path in candidates:
        if os.path.exists(path):
            return _open(path)
    system = ctypes.util.find_library("dnnl")
    if system:
        return _open(system)
    looked = ", ".join(candidates)
    raise OneDNNUnavailable(f"oneDNN is not installed: looked for {looked} and for the system's dnnl. {_INSTALL}")


def load() -> Lib:
    """The library, opened at the first call and kept.

    Searched at ``TILEWRIGHT_ONEDNN`` (``off`` forbids it), then where the ``onednn-cpu-gomp`` wheel puts
    it (the environment's, the user's or ``pip --target``'s ``lib`` folder), then by the system's loader.

    Raises:
        OneDNNUnavailable: with the reason, where it cannot be used.
    """
    global _lib, _failure
    if _lib is not None:
        return _lib
    with _load_lock:
        if _lib is not None:
            return _lib
        asked = os.environ.get("TILEWRIGHT_ONEDNN")
        if _failure is not None and _failure[0] == asked:
            raise OneDNNUnavailable(_failure[1])
        try:
            lib = _find()
        except OneDNNUnavailable as error:
            _failure = (asked, error.reason)
            raise
        # Plans keep their own primitives, so oneDNN's cache is off. It is also a trap: 3.2 finds an entry by the problem
        # alone, so `next_impl` would stay at an implementation that was used; and a descriptor that comes out of it points
        # into one that is gone, which crashes where its primitive was evicted before another is made of it.
        lib.c.set_primitive_cache_capacity(0)
        _lib = lib
        return lib


def available() -> str | None:
    """None where oneDNN can be used, else the reason why not."""
    try:
        load()
    except OneDNNUnavailable as error:
        return error.reason
    return None


def check(status: int, call: str) -> None:
    """Raise :class:`Unimplemented` or :class:`OneDNNError` naming ``call`` unless ``status`` is success."""
    if status != _SUCCESS:
        kind = Unimplemented if status in (_UNIMPLEMENTED, _LAST_IMPL) else OneDNNError
        raise kind(f"oneDNN {call}: {STATUS.get(status, f'status {status}')}")


def set_verbose(level: int) -> None:
    """oneDNN's own log on standard output: 0 off, 1 executions, 2 also creations."""
    check(load().c.set_verbose(level), f"set_verbose({level})")


# Creating primitives takes oneDNN's global locks and reads the calling thread's OpenMP settings: the runtime
# holds this lock over a fork and puts its thread set-up here.
create_lock = threading.RLock()
enter_thread: Callable[[], Any] = lambda: None
count_threads: Callable[[], int] = lambda: 0


# --------------------------------------------------------------------------------------------- handles


class _Handle:
    """Owns one C object: ``ptr`` is its address, freed with the Python object."""

    __slots__ = ("__weakref__", "_free", "ptr")
    ptr: int

    def __init__(self, ptr: int | None, free: Callable[[int], Any]) -> None:
        self.ptr = ptr or 0
        self._free = free

    def __del__(self) -> None:
        # A constructor that raised leaves no handle.
        if getattr(self, "ptr", 0):
            self._free(self.ptr)
            self.ptr = 0


def _dims(values: Sequence[int], what: str) -> Any:
    values = tuple(int(value) for value in values)
    if len(values) > _MAX_NDIMS:
        raise OneDNNError(f"{what} {values}: oneDNN holds at most {_MAX_NDIMS} axes")
    if any(not -(2**63) < value < 2**63 for value in values):
        raise OneDNNError(f"{what} {values}: a value does not fit in 64 bits")
    return _Dims(*values)


def _dtype(dtype: int | str) -> int:
    code = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if code not in _DTYPE_NAMES:
        raise OneDNNError(f"data type {dtype!r} is none of {', '.join(DTYPES)}")
    return code


class MemoryDesc(_Handle):
    """How a tensor lies in memory: logical ``dims``, data type and layout.

    Args:
        dims: logical sizes (activations N, C, spatial...; weights [G,] O, I, spatial...).
        dtype: ``"f32"``, ``"bf16"``, ... or its code.
        layout: None for dense row-major; ``"any"`` to let the primitive choose; another tag
            (``"acdb"``); or the strides, in elements, one per axis.

    Raises:
        OneDNNError: for a shape, type or layout that oneDNN does not accept.
    """

    __slots__ = ()

    def __init__(self, dims: Sequence[int], dtype: int | str = F32, layout: str | Sequence[int] | None = None) -> None:
        lib = load()
        code = _dtype(dtype)
        sizes = _dims(dims, "dims")
        ndims = len(dims)
        out = c_void_p()
        call = f"memory_desc(dims={tuple(dims)}, dtype={_DTYPE_NAMES[code]}, layout={layout!r})"
        if layout is None:
            layout = [1] * ndims
            for axis in range(ndims - 2, -1, -1):
                layout[axis] = layout[axis + 1] * max(int(dims[axis + 1]), 1)
        if isinstance(layout, str):
            if layout not in TAGS:
                raise OneDNNError(f"{call}: unknown tag {layout!r}; give strides or one of {', '.join(TAGS)}")
            status = lib.held.memory_desc_create_with_tag(byref(out), ndims, sizes, code, TAGS[layout])
        else:
            if len(layout) != ndims:
                raise OneDNNError(f"{call}: {len(layout)} strides for {ndims} axes")
            strides = _dims(layout, "strides")
            status = lib.held.memory_desc_create_with_strides(byref(out), ndims, sizes, code, strides)
        check(status, call)
        super().__init__(out.value, lib.held.memory_desc_destroy)

    @classmethod
    def _own(cls, borrowed: int) -> MemoryDesc:
        """A copy of a descriptor that belongs to somebody else."""
        lib = load()
        out = c_void_p()
        check(lib.held.memory_desc_clone(byref(out), borrowed), "memory_desc_clone")
        self = cls.__new__(cls)
        _Handle.__init__(self, out.value, lib.held.memory_desc_destroy)
        return self

    def clone(self) -> MemoryDesc:
        """An independent copy."""
        return MemoryDesc._own(self.ptr)

    def _query(self, what: int, result: Any) -> Any:
        status = load().held.memory_desc_query(self.ptr, what, byref(result))
        check(status, f"memory_desc_query({what})")
        return result

    def _int(self, what: int) -> int:
        return self._query(what, c_int(0)).value

    def _ints(self, what: int, count: int) -> tuple[int, ...]:
        if not count:
            return ()
        return tuple(self._query(what, ctypes.POINTER(c_int64)())[:count])

    @property
    def ndims(self) -> int:
        return self._int(_QUERY_NDIMS)

    @property
    def dims(self) -> tuple[int, ...]:
        """Logical sizes."""
        return self._ints(_QUERY_DIMS, self.ndims)

    @property
    def padded_dims(self) -> tuple[int, ...]:
        """Sizes with the padding that blocked layouts add."""
        return self._ints(_QUERY_PADDED_DIMS, self.ndims)

    @property
    def dtype(self) -> int:
        """Data type code, one of the values of ``DTYPES``."""
        return self._int(_QUERY_DTYPE)

    @property
    def format_kind(self) -> int:
        """``FORMAT_ANY``, ``FORMAT_BLOCKED`` or ``FORMAT_OPAQUE`` (Winograd's packed weights)."""
        return self._int(_QUERY_FORMAT_KIND)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the outer axes in elements; empty unless the format is blocked."""
        return self._ints(_QUERY_STRIDES, self.ndims) if self.format_kind == FORMAT_BLOCKED else ()

    @property
    def inner_blocks(self) -> tuple[tuple[int, int], ...]:
        """The blocks inside, outermost first, as (axis, size); empty for a plain layout."""
        if self.format_kind != FORMAT_BLOCKED:
            return ()
        count = self._int(_QUERY_INNER_NBLKS)
        return tuple(zip(self._ints(_QUERY_INNER_IDXS, count), self._ints(_QUERY_INNER_BLKS, count), strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes that a buffer of this layout takes, padding included; 0 while the layout is ``any``."""
        return load().held.memory_desc_get_size(self.ptr)

    @property
    def tag(self) -> str:
        """The layout in oneDNN's letters, such as ``acdb`` or ``ABcd16b16a``; ``any`` or ``opaque``."""
        kind = self.format_kind
        if kind != FORMAT_BLOCKED:
            return {FORMAT_ANY: "any", FORMAT_OPAQUE: "opaque"}.get(kind, "undef")
        blocks = self.inner_blocks
        blocked = {axis for axis, _ in blocks}
        outer = list(self.padded_dims)
        for axis, size in blocks:
            outer[axis] //= size
        strides = self.strides
        order = sorted(range(len(strides)), key=lambda axis: (-strides[axis], -outer[axis], axis))
        letters = (chr(ord("A" if axis in blocked else "a") + axis) for axis in order)
        return "".join(letters) + "".join(f"{size}{chr(ord('a') + axis)}" for axis, size in blocks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MemoryDesc):
            return NotImplemented
        return bool(load().held.memory_desc_equal(self.ptr, other.ptr))

    def __hash__(self) -> int:
        return hash((self.dims, self.dtype, self.format_kind, self.inner_blocks))

    def __repr__(self) -> str:
        sizes = "x".join(map(str, self.dims))
        return f"{_DTYPE_NAMES.get(self.dtype, 'undef')}:{sizes}:{self.tag}"


class Attr(_Handle):
    """Attributes of a primitive: the caller's scratchpad, post-ops, arithmetic.

    Post-ops apply to the result in the order they are appended; each ``append_*`` returns the object itself.

    Args:
        fpmath: ``"strict"`` (the default) or the type to which f32 operands may be rounded (``"bf16"``, ...).
        deterministic: ask for bit-for-bit repeatable results. Builds before 3.4 have no such switch; their
            CPU primitives repeat at a given number of threads.
    """

    __slots__ = ("_kept", "_post_ops", "text")

    def __init__(self, *, fpmath: str = "strict", deterministic: bool = False) -> None:
        lib = load()
        out = c_void_p()
        check(lib.held.primitive_attr_create(byref(out)), "primitive_attr_create")
        super().__init__(out.value, lib.held.primitive_attr_destroy)
        check(
            lib.held.primitive_attr_set_scratchpad_mode(self.ptr, 1),
            "primitive_attr_set_scratchpad_mode(user)",
        )
        self._post_ops: _Handle | None = None
        self._kept: list[MemoryDesc] = []
        self.text: list[str] = []
        if fpmath != "strict":
            if fpmath not in FPMATH:
                raise OneDNNError(f"fpmath {fpmath!r} is none of {', '.join(FPMATH)}")
            call = f"primitive_attr_set_fpmath_mode({fpmath})"
            check(lib.held.primitive_attr_set_fpmath_mode(self.ptr, FPMATH[fpmath]), call)
            self.text.append(f"fpmath:{fpmath}")
        if deterministic and lib.has("primitive_attr_set_deterministic"):
            check(lib.held.primitive_attr_set_deterministic(self.ptr, 1), "primitive_attr_set_deterministic")
            self.text.append("deterministic")

    def _append(self, kind: str, text: str, *args: Any) -> Attr:
        lib = load()
        if self._post_ops is None:
            out = c_void_p()
            check(lib.held.post_ops_create(byref(out)), "post_ops_create")
            self._post_ops = _Handle(out.value, lib.held.post_ops_destroy)
        check(getattr(lib.held, f"post_ops_append_{kind}")(self._post_ops.ptr, *args), f"post_ops_append_{text}")
        check(lib.held.primitive_attr_set_post_ops(self.ptr, self._post_ops.ptr), f"set_post_ops({text})")
        self.text.append(text)
        return self

    def append_eltwise(self, alg: int, alpha: float = 0.0, beta: float = 0.0) -> Attr:
        """Apply an element-wise function (a value of ``ELTWISE``)."""
        return self._append("eltwise", f"eltwise({_alg_name(alg)},{alpha:g},{beta:g})", alg, alpha, beta)

    def append_sum(self, scale: float = 1.0) -> Attr:
        """Add ``scale`` times what the destination held before: accumulation."""
        return self._append("sum", f"sum({scale:g})", scale, 0, UNDEF)

    def append_binary(self, alg: int, src1: MemoryDesc) -> Attr:
        """Combine with another tensor (a value of ``BINARY``), passed as ``arg_post_op(i)``."""
        self._kept.append(src1)
        return self._append("binary", f"binary({_alg_name(alg)},{src1!r})", alg, src1.ptr)

    def append_prelu(self, mask: int) -> Attr:
        """Apply PReLU with slopes along the axes in ``mask``, passed as ``arg_post_op(i, ARG_WEIGHTS)``."""
        return self._append("prelu", f"prelu({mask})", mask)

    def __repr__(self) -> str:
        return "+".join(self.text) or "none"


_ALG_NAMES = {
    value: f"{family}_{name}"
    for family, table in {
        "convolution": CONVOLUTION,
        "deconvolution": DECONVOLUTION,
        "eltwise": ELTWISE,
        "pooling": POOLING,
        "binary": BINARY,
        "resampling": RESAMPLING,
        "reduction": REDUCTION,
        "softmax": SOFTMAX,
    }.items()
    for name, value in table.items()
}
_PROP_NAMES = {64: "forward_training", 96: "forward_inference", 128: "backward", 160: "backward_data"}
_PROP_NAMES |= {192: "backward_weights"}


def _alg_name(alg: int) -> str:
    return _ALG_NAMES.get(alg, str(alg))


# ------------------------------------------------------------------------------- primitive descriptors


class PrimitiveDesc(_Handle):
    """An implementation that oneDNN chose for a problem; tells the layouts it wants and what it is called.

    ``threads`` is the number of OpenMP threads it was planned for; it must run with the same number.
    """

    __slots__ = ("hint", "name", "threads")

    def __init__(self, ptr: int | None, name: str, threads: int, hint: PrimitiveDesc | None = None) -> None:
        super().__init__(ptr, load().held.primitive_desc_destroy)
        self.name = name
        self.threads = threads
        self.hint = hint  # oneDNN reads it again in `next_impl`

    def _md(self, what: str, index: int = 0) -> MemoryDesc | None:
        found = load().held.primitive_desc_query_md(self.ptr, _MD_QUERIES[what], index)
        if not found:
            return None
        md = MemoryDesc._own(found)
        return md if md.ndims else None

    def _need(self, what: str, index: int) -> MemoryDesc:
        md = self._md(what, index)
        if md is None:
            raise OneDNNError(f"oneDNN {self.name} ({self.impl}) has no {what} descriptor number {index}")
        return md

    def src_md(self, index: int = 0) -> MemoryDesc:
        return self._need("src", index)

    def weights_md(self, index: int = 0) -> MemoryDesc:
        """Weights (0) or bias (1)."""
        return self._need("weights", index)

    def dst_md(self, index: int = 0) -> MemoryDesc:
        return self._need("dst", index)

    def diff_src_md(self, index: int = 0) -> MemoryDesc:
        return self._need("diff_src", index)

    def diff_weights_md(self, index: int = 0) -> MemoryDesc:
        return self._need("diff_weights", index)

    def diff_dst_md(self, index: int = 0) -> MemoryDesc:
        return self._need("diff_dst", index)

    @property
    def workspace_md(self) -> MemoryDesc | None:
        """What forward hands to backward besides its results; None where nothing."""
        return self._md("workspace")

    @property
    def scratchpad_md(self) -> MemoryDesc | None:
        """Temporary memory for an execution; None where none is needed."""
        return self._md("scratchpad")

    @property
    def impl(self) -> str:
        """The implementation's name, such as ``brgconv:avx512_core``."""
        text = c_char_p()
        check(
            load().held.primitive_desc_query(self.ptr, _QUERY_IMPL, 0, byref(text)),
            f"{self.name}: impl_info_str",
        )
        return (text.value or b"").decode()

    def next_impl(self) -> bool:
        """Move on to oneDNN's next implementation of this problem; False at the end, changing nothing."""
        with create_lock:
            enter_thread()
            status = load().c.primitive_desc_next_impl(self.ptr)
        if status in (_UNIMPLEMENTED, _LAST_IMPL):
            return False
        check(status, f"{self.name}: next_impl")
        return True

    def __repr__(self) -> str:
        return f"PrimitiveDesc({self.name}, {self.impl})"


class Primitive(_Handle):
    """Compiled code for a primitive descriptor; several threads may execute it at once."""

    __slots__ = ("pd",)

    def __init__(self, pd: PrimitiveDesc) -> None:
        lib = load()
        out = c_void_p()
        with create_lock:
            enter_thread()
            check(lib.c.primitive_create(byref(out), pd.ptr), f"primitive_create({pd.name}, {pd.impl})")
        super().__init__(out.value, lib.held.primitive_destroy)
        self.pd = pd

    def __repr__(self) -> str:
        return f"Primitive({self.pd.name}, {self.pd.impl})"


_default_attr: Attr | None = None


def _attr() -> Attr:
    global _default_attr
    if _default_attr is None:
        _default_attr = Attr()
    return _default_attr


def _show(label: str, value: Any) -> str:
    if label == "alg":
        return f"alg={_alg_name(value)}"
    if label == "prop":
        return f"prop={_PROP_NAMES.get(value, value)}"
    if label == "hint":
        return f"hint={value.impl}" if value is not None else "hint=None"
    return f"{label}={value!r}"


def _marshal(label: str, value: Any, name: str) -> Any:
    if isinstance(value, _Handle):
        return value.ptr
    if value is None or isinstance(value, (int, float, ctypes.Array)):
        return value
    if isinstance(value, tuple):  # strides, dilation, padding, kernel: oneDNN's kernels keep them in 32 bits
        if any(not -(2**31) < item < 2**31 for item in value):
            raise Unimplemented(f"oneDNN {name}: {label}={value} passes 32 bits")
        return _Dims(*value)
    raise OneDNNError(f"oneDNN {name}: {label} is a {type(value).__name__}, not a descriptor, tuple or number")


def _create(name: str, /, **args: Any) -> PrimitiveDesc:
    """Call ``dnnl_<name>_primitive_desc_create(out, engine, *args)``, ``args`` in their order."""
    lib = load()
    function = getattr(lib.c, f"{name}_primitive_desc_create", None)
    if function is None:
        raise Unimplemented(f"oneDNN {name}: version {lib.version_string} at {lib.path} does not have it")
    if args["attr"] is None:
        args["attr"] = _attr()
    values = [_marshal(label, value, name) for label, value in args.items()]
    if name != "reorder":  # it names an engine for each side
        values.insert(0, lib.engine)
    out = c_void_p()
    with create_lock:
        enter_thread()
        threads = count_threads()
        status = function(byref(out), *values)
    if status != _SUCCESS:
        shown = ", ".join(_show(label, value) for label, value in args.items() if not isinstance(value, ctypes.Array))
        check(status, f"{name}({shown})")
    return PrimitiveDesc(out.value, name, threads, args.get("hint"))


def _window(stride: Sequence[int], dilation: Sequence[int], padding_l: Sequence[int], padding_r: Sequence[int]) -> dict[str, tuple[int, ...]]:
    return {
        "stride": tuple(stride),
        "dilation": tuple(step - 1 for step in dilation),
        "padding_l": tuple(padding_l),
        "padding_r": tuple(padding_r),
    }


def convolution_forward(
    prop: int,
    alg: int,
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    stride: Sequence[int],
    dilation: Sequence[int],
    padding_l: Sequence[int],
    padding_r: Sequence[int],
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Convolution. ``alg`` is a value of ``CONVOLUTION``; weights are (O, I, ...) or (G, O/G, I/G, ...)."""
    window = _window(stride, dilation, padding_l, padding_r)
    return _create(
        "convolution_forward",
        prop=prop,
        alg=alg,
        src=src,
        weights=weights,
        bias=bias,
        dst=dst,
        **window,
        attr=attr,
    )


def convolution_backward_data(
    alg: int,
    diff_src: MemoryDesc,
    weights: MemoryDesc,
    diff_dst: MemoryDesc,
    stride: Sequence[int],
    dilation: Sequence[int],
    padding_l: Sequence[int],
    padding_r: Sequence[int],
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of a convolution in its input; ``hint`` is the forward descriptor (training)."""
    window = _window(stride, dilation, padding_l, padding_r)
    return _create(
        "convolution_backward_data",
        alg=alg,
        diff_src=diff_src,
        weights=weights,
        diff_dst=diff_dst,
        **window,
        hint=hint,
        attr=attr,
    )


def convolution_backward_weights(
    alg: int,
    src: MemoryDesc,
    diff_weights: MemoryDesc,
    diff_bias: MemoryDesc | None,
    diff_dst: MemoryDesc,
    stride: Sequence[int],
    dilation: Sequence[int],
    padding_l: Sequence[int],
    padding_r: Sequence[int],
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of a convolution in its weights and bias; ``hint`` is the forward descriptor (training)."""
    window = _window(stride, dilation, padding_l, padding_r)
    return _create(
        "convolution_backward_weights",
        alg=alg,
        src=src,
        diff_weights=diff_weights,
        diff_bias=diff_bias,
        diff_dst=diff_dst,
        **window,
        hint=hint,
        attr=attr,
    )


def deconvolution_forward(
    prop: int,
    alg: int,
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    stride: Sequence[int],
    dilation: Sequence[int],
    padding_l: Sequence[int],
    padding_r: Sequence[int],
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Transposed convolution; weights are logically (O, I, ...) with O the channels of ``dst``."""
    window = _window(stride, dilation, padding_l, padding_r)
    return _create(
        "deconvolution_forward",
        prop=prop,
        alg=alg,
        src=src,
        weights=weights,
        bias=bias,
        dst=dst,
        **window,
        attr=attr,
    )


def deconvolution_backward_data(
    alg: int,
    diff_src: MemoryDesc,
    weights: MemoryDesc,
    diff_dst: MemoryDesc,
    stride: Sequence[int],
    dilation: Sequence[int],
    padding_l: Sequence[int],
    padding_r: Sequence[int],
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of a transposed convolution in its input."""
    window = _window(stride, dilation, padding_l, padding_r)
    return _create(
        "deconvolution_backward_data",
        alg=alg,
        diff_src=diff_src,
        weights=weights,
        diff_dst=diff_dst,
        **window,
        hint=hint,
        attr=attr,
    )


def deconvolution_backward_weights(
    alg: int,
    src: MemoryDesc,
    diff_weights: MemoryDesc,
    diff_bias: MemoryDesc | None,
    diff_dst: MemoryDesc,
    stride: Sequence[int],
    dilation: Sequence[int],
    padding_l: Sequence[int],
    padding_r: Sequence[int],
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of a transposed convolution in its weights and bias."""
    window = _window(stride, dilation, padding_l, padding_r)
    return _create(
        "deconvolution_backward_weights",
        alg=alg,
        src=src,
        diff_weights=diff_weights,
        diff_bias=diff_bias,
        diff_dst=diff_dst,
        **window,
        hint=hint,
        attr=attr,
    )


def inner_product_forward(
    prop: int,
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Fully connected layer: src (N, I, ...), weights (O, I, ...), dst (N, O)."""
    return _create("inner_product_forward", prop=prop, src=src, weights=weights, bias=bias, dst=dst, attr=attr)


def inner_product_backward_data(
    diff_src: MemoryDesc,
    weights: MemoryDesc,
    diff_dst: MemoryDesc,
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of a fully connected layer in its input."""
    return _create(
        "inner_product_backward_data",
        diff_src=diff_src,
        weights=weights,
        diff_dst=diff_dst,
        hint=hint,
        attr=attr,
    )


def inner_product_backward_weights(
    src: MemoryDesc,
    diff_weights: MemoryDesc,
    diff_bias: MemoryDesc | None,
    diff_dst: MemoryDesc,
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of a fully connected layer in its weights and bias."""
    return _create(
        "inner_product_backward_weights",
        src=src,
        diff_weights=diff_weights,
        diff_bias=diff_bias,
        diff_dst=diff_dst,
        hint=hint,
        attr=attr,
    )


def matmul(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Matrix product (..., M, K) x (..., K, N) -> (..., M, N); bias has dst's rank, 1 where broadcast."""
    return _create("matmul", src=src, weights=weights, bias=bias, dst=dst, attr=attr)


def batch_normalization_forward(prop: int, src: MemoryDesc, dst: MemoryDesc, epsilon: float, flags: int, attr: Attr | None = None) -> PrimitiveDesc:
    """Batch normalization over axis 1. Training writes mean and (biased) variance, f32 vectors.

    ``FUSE_NORM_RELU`` in training needs a workspace; with ``FUSE_NORM_ADD_RELU`` the addend is ``ARG_SRC_1``.
    """
    return _create(
        "batch_normalization_forward",
        prop=prop,
        src=src,
        dst=dst,
        epsilon=float(epsilon),
        flags=flags,
        attr=attr,
    )


def batch_normalization_backward(
    prop: int,
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    src: MemoryDesc,
    epsilon: float,
    flags: int,
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of batch normalization: ``prop`` BACKWARD (with scale and shift) or BACKWARD_DATA."""
    return _create(
        "batch_normalization_backward",
        prop=prop,
        diff_src=diff_src,
        diff_dst=diff_dst,
        src=src,
        epsilon=float(epsilon),
        flags=flags,
        hint=hint,
        attr=attr,
    )


def layer_normalization_forward(
    prop: int,
    src: MemoryDesc,
    dst: MemoryDesc,
    stat: MemoryDesc | None,
    epsilon: float,
    flags: int,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Layer normalization over the last axis; ``stat`` describes mean and variance (the other axes)."""
    return _create(
        "layer_normalization_forward",
        prop=prop,
        src=src,
        dst=dst,
        stat=stat,
        epsilon=float(epsilon),
        flags=flags,
        attr=attr,
    )


def layer_normalization_backward(
    prop: int,
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    src: MemoryDesc,
    stat: MemoryDesc | None,
    epsilon: float,
    flags: int,
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of layer normalization."""
    return _create(
        "layer_normalization_backward",
        prop=prop,
        diff_src=diff_src,
        diff_dst=diff_dst,
        src=src,
        stat=stat,
        epsilon=float(epsilon),
        flags=flags,
        hint=hint,
        attr=attr,
    )


def group_normalization_forward(
    prop: int,
    src: MemoryDesc,
    dst: MemoryDesc,
    groups: int,
    epsilon: float,
    flags: int,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Group normalization (oneDNN 3.3 and later; Unimplemented before)."""
    return _create(
        "group_normalization_forward",
        prop=prop,
        src=src,
        dst=dst,
        groups=groups,
        epsilon=float(epsilon),
        flags=flags,
        attr=attr,
    )


def group_normalization_backward(
    prop: int,
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    src: MemoryDesc,
    groups: int,
    epsilon: float,
    flags: int,
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of group normalization (oneDNN 3.3 and later; Unimplemented before)."""
    return _create(
        "group_normalization_backward",
        prop=prop,
        diff_src=diff_src,
        diff_dst=diff_dst,
        src=src,
        groups=groups,
        epsilon=float(epsilon),
        flags=flags,
        hint=hint,
        attr=attr,
    )


def pooling_forward(
    prop: int,
    alg: int,
    src: MemoryDesc,
    dst: MemoryDesc,
    stride: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding_l: Sequence[int],
    padding_r: Sequence[int],
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Pooling; ``alg`` is a value of ``POOLING``. Max pooling in training writes a workspace."""
    return _create(
        "pooling_forward",
        prop=prop,
        alg=alg,
        src=src,
        dst=dst,
        stride=tuple(stride),
        kernel=tuple(kernel),
        dilation=tuple(step - 1 for step in dilation),
        padding_l=tuple(padding_l),
        padding_r=tuple(padding_r),
        attr=attr,
    )


def pooling_backward(
    alg: int,
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    stride: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding_l: Sequence[int],
    padding_r: Sequence[int],
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of pooling; max pooling reads the workspace that forward wrote."""
    return _create(
        "pooling_backward",
        alg=alg,
        diff_src=diff_src,
        diff_dst=diff_dst,
        stride=tuple(stride),
        kernel=tuple(kernel),
        dilation=tuple(step - 1 for step in dilation),
        padding_l=tuple(padding_l),
        padding_r=tuple(padding_r),
        hint=hint,
        attr=attr,
    )


def softmax_forward(prop: int, alg: int, src: MemoryDesc, dst: MemoryDesc, axis: int, attr: Attr | None = None) -> PrimitiveDesc:
    """Softmax or log-softmax (a value of ``SOFTMAX``) along ``axis``."""
    return _create("softmax_forward", prop=prop, alg=alg, src=src, dst=dst, axis=axis, attr=attr)


def softmax_backward(
    alg: int,
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    dst: MemoryDesc,
    axis: int,
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of softmax, from its result."""
    return _create(
        "softmax_backward",
        alg=alg,
        diff_src=diff_src,
        diff_dst=diff_dst,
        dst=dst,
        axis=axis,
        hint=hint,
        attr=attr,
    )


def eltwise_forward(
    prop: int,
    alg: int,
    src: MemoryDesc,
    dst: MemoryDesc,
    alpha: float = 0.0,
    beta: float = 0.0,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Element-wise function; ``alg`` is a value of ``ELTWISE``."""
    return _create(
        "eltwise_forward",
        prop=prop,
        alg=alg,
        src=src,
        dst=dst,
        alpha=float(alpha),
        beta=float(beta),
        attr=attr,
    )


def eltwise_backward(
    alg: int,
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    data: MemoryDesc,
    hint: PrimitiveDesc,
    alpha: float = 0.0,
    beta: float = 0.0,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of an element-wise function; ``data`` is its source (its result for ``*_use_dst``)."""
    return _create(
        "eltwise_backward",
        alg=alg,
        diff_src=diff_src,
        diff_dst=diff_dst,
        data=data,
        alpha=float(alpha),
        beta=float(beta),
        hint=hint,
        attr=attr,
    )


def binary(alg: int, src0: MemoryDesc, src1: MemoryDesc, dst: MemoryDesc, attr: Attr | None = None) -> PrimitiveDesc:
    """Binary function (a value of ``BINARY``); axes of size 1 in ``src1`` are broadcast."""
    return _create("binary", alg=alg, src0=src0, src1=src1, dst=dst, attr=attr)


def reduction(alg: int, src: MemoryDesc, dst: MemoryDesc, p: float = 0.0, eps: float = 0.0, attr: Attr | None = None) -> PrimitiveDesc:
    """Reduction (a value of ``REDUCTION``) over the axes that are 1 in ``dst``."""
    return _create("reduction", alg=alg, src=src, dst=dst, p=float(p), eps=float(eps), attr=attr)


def resampling_forward(
    prop: int,
    alg: int,
    src: MemoryDesc,
    dst: MemoryDesc,
    factors: Sequence[float] | None = None,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Nearest or linear resize (half-pixel centres); ``factors`` default to the ratio of sizes."""
    scale = (c_float * len(factors))(*factors) if factors else None
    return _create("resampling_forward", prop=prop, alg=alg, factors=scale, src=src, dst=dst, attr=attr)


def resampling_backward(
    alg: int,
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    hint: PrimitiveDesc,
    factors: Sequence[float] | None = None,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of a resize."""
    scale = (c_float * len(factors))(*factors) if factors else None
    return _create(
        "resampling_backward",
        alg=alg,
        factors=scale,
        diff_src=diff_src,
        diff_dst=diff_dst,
        hint=hint,
        attr=attr,
    )


def prelu_forward(prop: int, src: MemoryDesc, weights: MemoryDesc, dst: MemoryDesc, attr: Attr | None = None) -> PrimitiveDesc:
    """PReLU; axes of size 1 in ``weights`` are broadcast."""
    return _create("prelu_forward", prop=prop, src=src, weights=weights, dst=dst, attr=attr)


def prelu_backward(
    src: MemoryDesc,
    weights: MemoryDesc,
    diff_src: MemoryDesc,
    diff_weights: MemoryDesc,
    diff_dst: MemoryDesc,
    hint: PrimitiveDesc,
    attr: Attr | None = None,
) -> PrimitiveDesc:
    """Gradient of PReLU in its input and slopes."""
    return _create(
        "prelu_backward",
        src=src,
        weights=weights,
        diff_src=diff_src,
        diff_weights=diff_weights,
        diff_dst=diff_dst,
        hint=hint,
        attr=attr,
    )


def _pointers(mds: Sequence[MemoryDesc]) -> Any:
    return (c_void_p * len(mds))(*(md.ptr for md in mds))


def sum_(dst: MemoryDesc | None, scales: Sequence[float], srcs: Sequence[MemoryDesc], attr: Attr | None = None) -> PrimitiveDesc:
    """Weighted sum; sources are ``ARG_MULTIPLE_SRC + i``."""
    if len(scales) != len(srcs):
        raise OneDNNError(f"oneDNN sum: {len(scales)} scales for {len(srcs)} sources")
    scale = (c_float * len(scales))(*scales)
    return _create("sum", dst=dst, n=len(srcs), scales=scale, srcs=_pointers(srcs), attr=attr)


def concat(dst: MemoryDesc | None, axis: int, srcs: Sequence[MemoryDesc], attr: Attr | None = None) -> PrimitiveDesc:
    """Concatenation along ``axis``; sources are ``ARG_MULTIPLE_SRC + i``."""
    return _create("concat", dst=dst, n=len(srcs), axis=axis, srcs=_pointers(srcs), attr=attr)


def reorder(src: MemoryDesc, dst: MemoryDesc, attr: Attr | None = None) -> PrimitiveDesc:
    """Copy between layouts and data types, from ``ARG_SRC`` to ``ARG_DST``."""
    engine = load().engine
    return _create("reorder", src=src, src_engine=engine, dst=dst, dst_engine=engine, attr=attr)
