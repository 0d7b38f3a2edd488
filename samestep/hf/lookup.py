"""Why a pass may have looked for a row that a table has not."""

from __future__ import annotations

from typing import Any

import torch

from samestep.data.batch import Batch


def out_of_range(model: Any, batches: list[Any]) -> str | None:
    """What is beyond the table of token ids or that of positions, and what to do; None where nothing is seen to be.

    Args:
        batches: `Batch` or `ModelBatch`.
    """
    if not hasattr(model, "get_input_embeddings"):
        return None
    size = model.get_input_embeddings().num_embeddings
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    for batch in batches:
        is_native = isinstance(batch, Batch)
        tensors = {"input_ids": batch.input_ids, "labels": batch.labels} if is_native else batch.inputs
        ids, labels = tensors.get("input_ids"), tensors.get("labels")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
            continue
        found = {"token id": ids}
        if isinstance(labels, torch.Tensor) and labels.shape == ids.shape and not labels.is_floating_point():
            found["label"] = labels
        for kind, tensor in found.items():
            if int(tensor.max()) >= size:
                return (
                    f"a micro-batch has the {kind} {int(tensor.max())}, but the model knows 0 to {size - 1}\n"
                    "  fix: use the tokenizer of the model, or model.resize_token_embeddings(len(tokenizer))"
                )
        if not is_native and isinstance(positions, int) and ids.shape[1] > positions:
            return (
                f"a row has {ids.shape[1]} tokens, but the model has {positions} positions\n"
                "  fix: cut the rows shorter (max_length of the tokenizer)"
            )
    return None
