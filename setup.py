"""The compiled kernels: optional, so that an install without a compiler works (with torch's operators)."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "forebay.engine.kernels._native",
            [f"forebay/engine/kernels/{name}.c" for name in ("attend", "linear", "program", "sample")],
            depends=[f"forebay/engine/kernels/{name}.h" for name in ("common", "tile", "attend", "rows")],
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=fast", "-Wno-psabi", "-g0"],
            optional=True,
        )
    ]
)
