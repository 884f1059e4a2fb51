"""Checks both kernels' tensors. Messages name the argument, its value and what is expected."""

import torch

LOGIT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
INDEX_TYPES = (torch.int32, torch.int64)
_MATRIX = 2  # dimensions


def check_logits(logits: torch.Tensor) -> None:
    """Raise ValueError unless ``logits`` is [num_rows, n_cols] with its columns side by side."""
    if logits.ndim != _MATRIX or logits.shape[1] == 0:
        raise ValueError(f"logits has shape {list(logits.shape)}, expected [num_rows, n_cols > 0]")
    if logits.dtype not in LOGIT_TYPES:
        raise ValueError(f"logits is {logits.dtype}, expected float32, bfloat16 or float16")
    if not _has_dense_columns(logits):
        raise ValueError(
            f"logits has strides {list(logits.stride())}, expected 1 for the last dimension"
        )


def check_index(name: str, index: torch.Tensor, logits: torch.Tensor) -> None:
    """Raise ValueError unless ``index`` is a dense vector of integers on the device of logits."""
    if index.ndim != 1:
        raise ValueError(f"{name} has shape {list(index.shape)}, expected [n_rows]")
    if index.dtype not in INDEX_TYPES:
        raise ValueError(f"{name} is {index.dtype}, expected int32 or int64")
    if not index.is_contiguous():
        raise ValueError(f"{name} has stride {index.stride(0)}, expected 1")
    _check_device(name, index, logits)


def check_table(
    name: str, table: torch.Tensor, shape: tuple[int | None, int], logits: torch.Tensor
) -> None:
    """Raise ValueError unless ``table`` is a float32 tensor of this shape beside logits.

    Args:
        name: of the argument.
        table: the argument; rows may be padded.
        shape: rows and columns; None for any number of rows.
        logits: whose device it must share.
    """
    rows, columns = shape
    if table.ndim != _MATRIX or table.shape[1] != columns or rows not in {None, table.shape[0]}:
        first = "any" if rows is None else rows
        raise ValueError(f"{name} has shape {list(table.shape)}, expected [{first}, {columns}]")
    if table.dtype != torch.float32:
        raise ValueError(f"{name} is {table.dtype}, expected torch.float32")
    if not _has_dense_columns(table):
        raise ValueError(
            f"{name} has strides {list(table.stride())}, expected 1 for the last dimension"
        )
    _check_device(name, table, logits)


def _has_dense_columns(matrix: torch.Tensor) -> bool:
    return matrix.stride(1) == 1 or matrix.shape[1] == 1


def _check_device(name: str, tensor: torch.Tensor, logits: torch.Tensor) -> None:
    if tensor.device != logits.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {logits.device} as logits")
