"""Public data sets with their published prompts and scorers, one file each; read with the package datasets."""

from kvfold.evaluate.tasks.base import Task
from kvfold.evaluate.tasks.datasets.aime import AIME
from kvfold.evaluate.tasks.datasets.infinitebench import InfiniteBench
from kvfold.evaluate.tasks.datasets.longbench import LongBench
from kvfold.evaluate.tasks.datasets.longbench_v2 import LongBenchV2
from kvfold.evaluate.tasks.datasets.mmdu import MMDU

DATASETS: dict[str, type[Task]] = {
    cls.name: cls for cls in (LongBench, LongBenchV2, InfiniteBench, AIME, MMDU)
}
"""Every task on a public data set by its command-line name."""

__all__ = ["AIME", "DATASETS", "MMDU", "InfiniteBench", "LongBench", "LongBenchV2"]
