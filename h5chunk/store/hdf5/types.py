"""Say why datasets of some types cannot be fields, and how to copy them to datasets that can."""

from __future__ import annotations

import h5py
import numpy as np

from h5chunk.errors import names_text


def type_problem(dtype: np.dtype) -> str:
    """Say why a dataset of this type cannot be a field, and how to copy it to one that can.

    ``x`` stands for the values, as h5py reads them.
    """
    if h5py.check_string_dtype(dtype) is not None:
        return (
            "has strings of variable length, but a field needs numbers or strings of fixed length: copy it (x) "
            "to another dataset, such as file['NEW'] = np.char.encode(np.array(x.asstr()[()], str)), which makes their "
            "length fixed"
        )
    if dtype.kind == "c":
        return (
            f"has complex numbers ({dtype}), but a field needs real numbers: copy it (x) to another dataset of real "
            f"and imaginary parts, such as file['NEW'] = x[:].view('f{dtype.itemsize // 2}').reshape(*x.shape, 2), "
            "which torch.view_as_complex converts back"
        )
    if dtype.names:
        return (
            f"is a table with the columns {names_text(dtype.names)}, but a field is one dataset: copy the columns of "
            f"it (x) to datasets, such as file['NEW'] = x[{dtype.names[0]!r}]"
        )
    return f"has the type {dtype}, but a field needs numbers or strings of fixed length: leave it out"
