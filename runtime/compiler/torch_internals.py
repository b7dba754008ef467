"""Private API of torch that building uses. It is looked for first.

In another torch one of them may be gone or called otherwise. That would fail somewhere in the export, and be taken for
a model that cannot be exported.
"""

import inspect
import pkgutil
from typing import NoReturn

import torch

from runtime.util.errors import SpecDecError

_TESTED = "2.13"
# Each with the parameters that it is called with by name.
PRIVATE: dict[str, tuple[str, ...]] = {
    "torch._check": (),
    "torch._dispatch.python.enable_python_dispatcher": (),
    "torch._ops.OpOverload": (),
    "torch._subclasses.fake_tensor.FakeTensor": (),
    "torch._subclasses.fake_tensor.FakeTensorMode.dispatch": (),
    "torch._subclasses.fake_tensor.FakeTensorMode.from_tensor": (),
    "torch._dynamo.config.fake_tensor_cache_enabled": (),
    "torch._dynamo.config.patch": (),
    "torch._inductor.aot_compile": ("options",),
    "torch._inductor.aoti_compile_and_package": ("package_path", "inductor_configs"),
    "torch._inductor.config.always_keep_tensor_constants": (),
    "torch._inductor.config.patch": (),
    "torch._inductor.config.freezing": (),
    "torch._inductor.config.cpp.cxx": (),
    "torch._inductor.config.cpp.threads": (),
    "torch._inductor.config.cpp.min_chunk_size": (),
    "torch._inductor.config.cpp.dynamic_threads": (),
    "torch._inductor.config.cpp_cache_precompile_headers": (),
    "torch._inductor.config.aot_inductor.enable_line_tables": (),
    "torch._inductor.config.aot_inductor.metadata": (),
    "torch._inductor.config.aot_inductor.package": (),
    "torch._inductor.config.aot_inductor.package_cpp_only": (),
    "torch._inductor.config.aot_inductor.precompile_headers": (),
    "torch._inductor.config.aot_inductor.package_constants_in_so": (),
    "torch._inductor.config.aot_inductor.package_constants_on_disk_format": (),
    "torch._inductor.config.aot_inductor.custom_ops_to_c_shims": (),
    "torch._inductor.config.aot_inductor.custom_op_libs": (),
    "torch._inductor.codegen.cpp.WorkSharing.close": (),
    "torch._inductor.codegen.cpp.WorkSharing.parallel": (),
    "torch._inductor.cpp_builder.CppBuilder.get_command_line": (),
    "torch._inductor.cpp_builder.CppBuilder.get_target_file_path": (),
    "torch._inductor.cpp_builder.CppTorchDeviceOptions": (
        "aot_mode",
        "compile_only",
        "device_type",
        "vec_isa",
    ),
    "torch._inductor.cpp_builder.is_gcc": (),
    "torch._inductor.cpu_vec_isa.VecISA.build_arch_flags": (),
    "torch._inductor.cpu_vec_isa.VecISA.check_build": (),
    "torch._inductor.cpu_vec_isa.pick_vec_isa": (),
    "torch.export.pt2_archive._package.package_pt2": ("aoti_files", "extra_files"),
    "torch.export.pt2_archive._package_weights.Weights": (),
    "torch.fx.config.do_not_emit_stack_traces": (),
    "torch.fx.experimental._config.patch": (),
    "torch.fx.experimental._config.use_duck_shape": (),
    "torch.fx.experimental.proxy_tensor.ProxyTorchDispatchMode": (),
    "torch.fx.experimental.symbolic_shapes.statically_known_true": (),
    "torch.fx.node.map_aggregate": (),
    "torch.utils._pytree.TreeSpec": (),
    "torch.utils._pytree.tree_flatten": (),
    "torch.utils._pytree.tree_leaves": (),
    "torch.utils._pytree.tree_unflatten": (),
    "torch.utils._python_dispatch.TorchDispatchMode": (),
    "torch._C.DispatchKey.PreDispatch": (),
    "torch._C._TorchDispatchModeKey.PROXY": (),
    "torch._C._aoti.AOTIModelPackageLoader.run": (),
}


def check_torch() -> None:
    """`check_names`, of another torch than what was tested: looking imports all of Inductor."""
    if not torch.__version__.startswith(f"{_TESTED}."):
        check_names()


def check_names() -> None:
    """SpecDecError, with torch's version, if one of them is missing or is not called as it was."""
    for name, parameters in PRIVATE.items():
        try:
            found = pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            _refuse(f"has no `{name}`")
        if lacking := [one for one in parameters if one not in inspect.signature(found).parameters]:
            _refuse(f"has a `{name}` without `{lacking[0]}`")


def _refuse(what: str) -> NoReturn:
    raise SpecDecError(
        f"torch {torch.__version__} cannot be built with: it {what}",
        hint=f"install torch {_TESTED}",
        code="other_torch",
    )
