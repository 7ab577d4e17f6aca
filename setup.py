"""Build the optional native libraries; everything else is in setup.cfg."""

from setuptools import Extension, setup

core = Extension(
    "h5chunk.native._core",
    [f"h5chunk/native/{name}.c" for name in ("core", "filters", "rows", "augment", "colour", "jpeg", "cuda", "maps")],
    libraries=["m"],
    depends=[f"h5chunk/native/{name}.h" for name in ("augment", "filters", "maps")],
    extra_compile_args=["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread", "-ldl"],
    optional=True,
)
setup(ext_modules=[core])
