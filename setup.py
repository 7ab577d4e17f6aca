"""Build the optional native core; everything else is in setup.cfg."""

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
setup(ext_modules=[core])
