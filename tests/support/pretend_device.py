"""A simulated CUDA device: its tensors hold their numbers on the CPU but obey CUDA's rules.

Inside `pretend_device()` everything that names the device "cuda" gets tensors of the class `Held`.
They report cuda:0, compute on the CPU with the CPU's bits, and refuse what CUDA refuses: operations
that mix devices, indices on the wrong device, generators of the CPU, `numpy()`, products of
integers. So tests find code that forgets to move a tensor, on machines without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

CUDA = torch.device("cuda", 0)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NUMBERS_ELSEWHERE = _words(
    """
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow
    maximum minimum fmax fmin clamp_min clamp_max atan2 copysign nextafter hypot xlogy eq ne lt le
    gt ge not_equal less less_equal greater greater_equal logical_and logical_or logical_xor
    bitwise_and bitwise_or bitwise_xor where masked_fill fill radd rmul rtruediv rpow truediv
    floordiv mod and or xor iadd isub imul itruediv iand ior
    """
)
"""Operations that accept a zero-dimensional CPU tensor as a number: those of two arguments
(`allow_cpu_scalars` of TensorIterator), and some that move it themselves."""
_PRODUCTS = _words("mm bmm matmul rmatmul imatmul linear einsum addmm mv dot tensordot")
_DRAWS = _words(
    """
    rand randn randint randperm rand_like randn_like randint_like normal uniform cauchy exponential
    bernoulli multinomial random geometric log_normal
    """
)
_ABSENT = {
    "numpy": "can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first",
    "array": "can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first",
    "reduce_ex": "a tensor of the device is not sent to other processes",
    "data_ptr": "the pretend device has no addresses",
    "histogram": "not implemented for 'CUDA'",
}
_MOVES = frozenset(("to", "cpu", "cuda"))
_SIZES_ALONE = frozenset(("expand_as", "view_as", "reshape_as"))
"""Operations that use only the size of their second argument, on any device."""
_ANSWERS = {"device": CUDA, "is_cuda": True, "is_cpu": False, "get_device": 0}


class Held(Tensor):
    """A tensor of the simulated device; `inside` is the CPU tensor with its numbers."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Held:
        """Return a tensor of the device over these numbers, which are not copied."""
        made: Held = Tensor._make_wrapper_subclass(
            cls, inside.shape, dtype=inside.dtype, device=CUDA, requires_grad=False
        )
        made.inside = inside
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute on the CPU what the device would compute, or refuse it."""
        return _called(func, args, dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do the same for other tensor subclasses that hold a tensor of the device."""
        return _called(func, args, dict(kwargs or {}))


class _Mode(TorchFunctionMode):
    """Intercept functions without a device tensor among their arguments: `zeros`, and `to`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _called(func, args, dict(kwargs or {}))


@contextmanager
def pretend_device(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Run the body with one CUDA device of this compute capability visible to torch."""
    major, minor = capability
    properties = SimpleNamespace(
        name="pretend", total_memory=2**30, major=major, minor=minor, multi_processor_count=1
    )
    said: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "pretend",
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: None,
        "reset_peak_memory_stats": lambda device=None: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 1,
    }
    with mock.patch.multiple(torch.cuda, **said), _Mode():
        yield


def _called(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch as the device would."""
    name = _name(func)
    given: list[Tensor] = []
    inside = _each(args, given.append), _each(kwargs, given.append)
    own = next((tensor for tensor in given if _other_class(tensor)), None)
    if own is not None:
        kind: Any = type(own)
        return kind.__torch_function__(func, tuple(map(type, given)), args, kwargs)
    if name in _MOVES and given:
        return _moved(func, args, kwargs)
    if name in _SIZES_ALONE:
        given = given[:1]
    held = [tensor for tensor in given if isinstance(tensor, Held)]
    if name == "_has_compatible_shallow_copy_type" and held:
        return len(held) == len(given)
    wanted = kwargs.get("device")
    there = bool(held) if wanted is None else torch.device(wanted).type == "cuda"
    if there and name in _DRAWS:
        raise RuntimeError(f"{name}: drawn on the device, which has other numbers than the CPU")
    if held:
        if name in _ANSWERS:
            return _ANSWERS[name]
        _refuse(name, args, given, held)
    if wanted is not None and there:
        inside[1]["device"] = "cpu"
    if there and name in _KERNELS:
        result = _KERNELS[name](*inside[0], **inside[1])
    else:
        result = func(*inside[0], **inside[1])
    if not there:
        return result
    if name == "iter":
        return iter([Held(part) for part in result])
    if type(result) is Tensor and "out" not in kwargs:
        return args[0] if inside[0] and result is inside[0][0] else Held(result)
    return _outside(result, {id(_inside(tensor)): tensor for tensor in given})


def _other_class(tensor: Tensor) -> bool:
    """Return whether a tensor is of a class with its own arithmetic over device tensors."""
    return type(tensor) not in (Tensor, Parameter, Held) and tensor.device.type == "cuda"


def _name(func: Callable[..., Any]) -> str:
    """Return a function's name without the underscores of in-place and special methods."""
    name = str(getattr(func, "__name__", "")).split(".")[0]
    if name in ("__get__", "__set__", "__delete__"):
        name = str(getattr(func, "__self__").__name__)  # noqa: B009  # of a property of tensors
    return name if name.startswith("_") and not name.startswith("__") else name.strip("_")


def _moved(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a tensor on the requested device and in the requested type.

    Calls that stay off the device go to torch: an export must record each call, including a
    conversion to the same format.
    """
    name, tensor, rest = _name(func), args[0], args[1:]
    inside = _inside(tensor)
    device, dtype = tensor.device, inside.dtype
    like = kwargs.get("other", rest[0] if rest else None)
    if name != "to":
        device = torch.device(name)
    elif isinstance(like, Tensor):
        device, dtype = like.device, like.dtype
    else:
        options = {key: value for key, value in kwargs.items() if key != "copy"}
        found = torch._C._nn._parse_to(*rest, **options)
        device, dtype = found[0] or device, found[1] or dtype
    if device.type != "cuda" and not isinstance(tensor, Held):
        return func(*args, **kwargs)
    same = (device.type == "cuda") == isinstance(tensor, Held)
    if same and dtype == inside.dtype and not kwargs.get("copy"):
        return tensor
    moved = inside.to(dtype, copy=True)
    return Held(moved) if device.type == "cuda" else moved


def _refuse(
    name: str, args: tuple[Any, ...], given: Sequence[Tensor], held: Sequence[Held]
) -> None:
    """Raise the error of CUDA for arguments that it does not take together."""
    if name in _ABSENT:
        raise TypeError(_ABSENT[name])
    if name in _PRODUCTS and not all(tensor.inside.is_floating_point() for tensor in held):
        raise RuntimeError(f'"{name}_cuda" not implemented for integers')
    elsewhere = [tensor for tensor in given if not isinstance(tensor, Held)]
    if not elsewhere or name == "copy":
        return
    if name in ("getitem", "setitem", "index_put"):
        _refuse_index(name, args)
        return
    if name in _NUMBERS_ELSEWHERE and all(tensor.dim() == 0 for tensor in elsewhere):
        return
    raise RuntimeError(
        f"{name}: expected all tensors to be on the same device, but found at least two devices,"
        f" cuda:0 and cpu (of shape {tuple(elsewhere[0].shape)})"
    )


def _refuse_index(name: str, args: tuple[Any, ...]) -> None:
    """Refuse an index of the device into the CPU, and values from elsewhere at given places."""
    whole, places = args[0], [t for t in _tensors(args[1]) if t.dim()]
    if not isinstance(whole, Held) and any(isinstance(place, Held) for place in places):
        raise RuntimeError("indices should be either on cpu or on the same device (cpu)")
    if name == "getitem" or not places:
        return
    value = args[2]
    other = isinstance(value, Tensor) and isinstance(value, Held) != isinstance(whole, Held)
    if other and value.dim():
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")


def _attention(q: Tensor, k: Tensor, v: Tensor, *more: Any, **options: Any) -> Tensor:
    """Compute the result of an enabled CUDA kernel that supports these arguments, else fail.

    The rules are those of sdp_utils.cpp in PyTorch; the result is that of the math kernel.
    """
    half, head = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
    masked = options.get("attn_mask") is not None
    step = 8 if half else 4
    on: Any = torch.backends.cuda
    able = (
        on.flash_sdp_enabled() and half and not masked and head <= 256,
        on.mem_efficient_sdp_enabled() and q.dtype != torch.float64 and head % step == 0,
        on.cudnn_sdp_enabled() and half and head % 8 == 0 and head <= 128 and k.shape[-2] > 1,
        on.math_sdp_enabled(),
    )
    if not any(able):
        raise RuntimeError("No available kernel. Aborting execution.")
    with sdpa_kernel([SDPBackend.MATH]):
        return functional.scaled_dot_product_attention(q, k, v, *more, **options)


def _scaled_product(
    one: Tensor,
    two: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `torch._scaled_mm` where CUDA takes it (ScaledBlas.cpp in PyTorch), else fail."""
    if one.shape[1] % 16 or two.shape[0] % 16 or two.shape[1] % 16:
        raise RuntimeError(f"mat2 shape ({two.shape[0]}x{two.shape[1]}) must be divisible by 16")
    if one.stride(1) != 1 or two.stride(0) != 1:
        raise RuntimeError(
            "Only multiplication of row-major and column-major matrices is supported"
        )
    single = scale_a.numel() == 1 and scale_b.numel() == 1
    rows = scale_a.shape == (one.shape[0], 1) and scale_b.shape == (1, two.shape[1])
    if not single and not (rows and scale_a.is_contiguous() and scale_b.t().is_contiguous()):
        raise RuntimeError("Invalid scaling configuration")
    if bias is not None and (out_dtype == torch.float32 or bias.dtype != out_dtype):
        raise RuntimeError("Bias is not supported when out_dtype is set to Float32")
    return torch._scaled_mm(
        one, two, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out_dtype
    )


_KERNELS: Mapping[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention,
    "_scaled_mm": _scaled_product,
}


def _inside(tensor: Tensor) -> Tensor:
    return tensor.inside if isinstance(tensor, Held) else tensor


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of arguments, however deep."""
    found: list[Tensor] = []
    _each(value, found.append)
    return found


def _each(value: Any, see: Callable[[Tensor], None]) -> Any:
    """Return arguments with what tensors of the device hold in their place; show each tensor."""
    if isinstance(value, Tensor):
        see(value)
        return _inside(value)
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return type(value)([_each(part, see) for part in value])
    if isinstance(value, dict):
        return {key: _each(part, see) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(_each(part, see) for part in (value.start, value.stop, value.step)))
    return value


def _outside(value: Any, known: Mapping[int, Tensor]) -> Any:
    """Return results as tensors of the device; an argument that comes back is itself."""
    if isinstance(value, Tensor):
        return known[id(value)] if id(value) in known else Held(value)
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return type(value)([_outside(part, known) for part in value])
    return value
