"""The head's Triton kernels compiled for a GPU of the Hopper generation, none of which has to be there."""

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from planish.kernels import vocab_triton

FLAGS = {"_fold": ("BIASED", "CAPPED"), "_derive": ("BIASED", "CAPPED", "WEIGHED", "HIT", "UNIFORM")}
TILE = {"ROWS": vocab_triton.ROWS, "COLUMNS": vocab_triton.COLUMNS, "DEPTH": vocab_triton.DEPTH}
SCALARS = {"scale": "fp32", "softcap": "fp32", "floor": "fp32"}


def kind(name, dtype):
    if name.endswith("_ptr"):
        narrow = {"h_ptr", "w_ptr", "b_ptr", "out_ptr"}
        return "*i64" if name == "target_ptr" else f"*{dtype if name in narrow else 'fp32'}"
    return SCALARS.get(name, "i32")


def build(name, dtype, *, on):
    kernel = getattr(vocab_triton, name)
    constants = TILE | dict.fromkeys(FLAGS[name], on) | ({"BLOCK": 1024} if name == "_fold" else {})
    signature = {each: "constexpr" if each in constants else kind(each, dtype) for each in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    built = compile(source, target=GPUTarget("cuda", 90, 32))
    assert "sm_90" in built.asm["ptx"]
    assert len(built.asm["cubin"]) > 0
    assert "libdevice" not in built.asm["llir"]
    assert "__nv_" not in built.asm["llir"]
    return built.metadata.shared


if __name__ == "__main__":
    for name in FLAGS:
        for dtype in ("bf16", "fp32"):
            for on in (False, True):
                assert build(name, dtype, on=on) <= 227 * 1024
    print("compiled")
