"""Build the optional native libraries; everything else is in setup.cfg."""

from setuptools import Extension, setup

core = Extension(
    "h5chunk.native._core",
    [f"h5chunk/native/{name}.c" for name in ("core", "rows", "augment", "draws", "jpeg", "cuda")],
    libraries=["m"],
    depends=["h5chunk/native/augment.h"],
    extra_compile_args=["-O3", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"],
    extra_link_args=["-pthread", "-ldl"],
    optional=True,
)
filters = Extension(
    "h5chunk.native._filters",
    ["h5chunk/native/filters.c"],
    extra_compile_args=["-O3", "-fvisibility=hidden"],
    optional=True,
)
setup(ext_modules=[core, filters])
