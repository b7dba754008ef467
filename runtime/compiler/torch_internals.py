"""Private API of torch that building uses.

Another version of torch may lack a name, and a build would fail somewhere in the middle. So the names are looked up
before a build, unless torch has the version that was tested.
"""

import pkgutil

import torch

from runtime.util.errors import SpecDecError

_TESTED = "2.13"
PRIVATE = (
    "torch._check",
    "torch._dispatch.python.enable_python_dispatcher",
    "torch._ops.OpOverload",
    "torch._subclasses.fake_tensor.DataDependentOutputException",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
    "torch._subclasses.fake_tensor.FakeTensor",
    "torch._subclasses.fake_tensor.FakeTensorMode.dispatch",
    "torch._subclasses.fake_tensor.FakeTensorMode.from_tensor",
    "torch._inductor.config.patch",
    "torch._inductor.config.cpp.cxx",
    "torch._inductor.config.cpp_cache_precompile_headers",
    "torch._inductor.cpu_vec_isa.VecISA.build_arch_flags",
    "torch._inductor.cpu_vec_isa.VecISA.check_build",
    "torch.fx.config.do_not_emit_stack_traces",
    "torch.fx.experimental._config.patch",
    "torch.fx.experimental._config.use_duck_shape",
    "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode",
    "torch.fx.node.map_aggregate",
    "torch.utils._pytree.TreeSpec",
    "torch.utils._pytree.tree_flatten",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._pytree.tree_unflatten",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._C.DispatchKey.PreDispatch",
    "torch._C._TorchDispatchModeKey.PROXY",
)


def check_torch() -> None:
    """`check_names`, which imports all of Inductor, unless torch has the version that was tested."""
    if not torch.__version__.startswith(f"{_TESTED}."):
        check_names()


def check_names() -> None:
    """SpecDecError, with torch's version, if a name of the private API is missing."""
    for name in PRIVATE:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            raise SpecDecError(
                f"torch {torch.__version__} cannot be built with: it has no `{name}`",
                hint=f'install torch {_TESTED}, or use no compiler: `compiler="none"`',
                code="other_torch",
            ) from None
