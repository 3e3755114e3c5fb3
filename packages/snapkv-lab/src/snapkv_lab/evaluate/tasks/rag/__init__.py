"""Answering from retrieved documents: the paper's three experiments (Sec. 5.4.2).

The paper ran them with Command-R, two of the three on data of other kinds (Cohere's own, BioASQ);
here all three ask HotpotQA, each of whose questions has two paragraphs that answer it.
"""

from snapkv_lab.evaluate.tasks.rag.citation import RagCitation
from snapkv_lab.evaluate.tasks.rag.pipeline import RagPipeline
from snapkv_lab.evaluate.tasks.rag.position import RagPosition

__all__ = ["RagCitation", "RagPipeline", "RagPosition"]
