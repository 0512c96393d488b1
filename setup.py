"""The compiled kernels: optional, so that an install without a compiler works (with torch's operators)."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "forebay.engine.kernels._native",
            ["forebay/engine/kernels/kernels.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-ffp-contract=fast", "-Wno-psabi"],
            optional=True,
        )
    ]
)
