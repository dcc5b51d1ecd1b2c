"""The 13 tasks of RULER (Hsieh et al., arXiv 2404.06654), generated here.

Prompt sentences, numbers of keys, values and queries, word and number types, answer prefixes, new tokens and scoring are
those of the published configuration (github.com/NVIDIA/RULER, `synthetic.yaml` and the templates of `constants.py`, a
misprint in one of them included), because scores are compared across papers; the code is not. What differs:

- `tokens` bounds the prompt alone; the published length also counts the answer prefix and the new tokens.
- Essay haystacks are cut from the novel that ships or from `text=PATH`, and begin at another sentence in each sample; the
  published ones all begin with Paul Graham's first essay.
- Keys of one sample differ from each other. (Published keys are drawn with replacement.)
- `qa_1` and `qa_2` ask about facts planted in passages, unless `data=PATH` names the published data.

The prompt is the published one word for word (`Sample.verbatim`): the task's own first sentences are in the document.
"""

from kvfold.evaluate.tasks.ruler.cwe import CommonWords
from kvfold.evaluate.tasks.ruler.fwe import FrequentWords
from kvfold.evaluate.tasks.ruler.niah import (
    NiahMultikey1,
    NiahMultikey2,
    NiahMultikey3,
    NiahMultiquery,
    NiahMultivalue,
    NiahSingle1,
    NiahSingle2,
    NiahSingle3,
)
from kvfold.evaluate.tasks.ruler.qa import QA1, QA2
from kvfold.evaluate.tasks.ruler.vt import VariableTracking

RULER = (
    NiahSingle1,
    NiahSingle2,
    NiahSingle3,
    NiahMultikey1,
    NiahMultikey2,
    NiahMultikey3,
    NiahMultivalue,
    NiahMultiquery,
    VariableTracking,
    CommonWords,
    FrequentWords,
    QA1,
    QA2,
)

__all__ = [
    "QA1",
    "QA2",
    "RULER",
    "CommonWords",
    "FrequentWords",
    "NiahMultikey1",
    "NiahMultikey2",
    "NiahMultikey3",
    "NiahMultiquery",
    "NiahMultivalue",
    "NiahSingle1",
    "NiahSingle2",
    "NiahSingle3",
    "VariableTracking",
]
