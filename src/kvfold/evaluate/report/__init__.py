"""From a results folder to tables with intervals, charts and one self-contained page."""

from __future__ import annotations

from kvfold.evaluate.report.aggregate import Report, aggregate
from kvfold.evaluate.report.markdown import to_markdown
from kvfold.evaluate.report.page import to_html

__all__ = ["Report", "aggregate", "to_html", "to_markdown"]
