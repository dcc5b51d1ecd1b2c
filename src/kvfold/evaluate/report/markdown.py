"""The tables as Markdown, for files that are read in a repository."""

from __future__ import annotations

from kvfold.evaluate.report import words
from kvfold.evaluate.report.aggregate import Report
from kvfold.evaluate.report.levels import levels
from kvfold.evaluate.report.page import columns, models, remark, scope, sizes
from kvfold.evaluate.report.settings import Entry, Setting
from kvfold.evaluate.report.statistics import Estimate


def to_markdown(report: Report) -> str:
    """Summary, one table a setting, and the runs.

    Parameters
    ----------
    report : Report
    """
    lines: list[str] = []
    for model in models(report):
        for place in model.places:
            lines += [f"## {_plain(model.name)}: {place.overview.protocol}", ""]
            lines += _summary(place.overview)
            for setting in (place.overview, *place.settings):
                lines += [f"### {_plain(scope(setting))}", "", *_table(setting), ""]
    if report.notes:
        lines += ["## Notes", "", *(f"- {_plain(note)}" for note in report.notes), ""]
    lines += [
        'Brackets: 95 % bootstrap intervals; "minus full" is paired with the full cache on the same samples.',
        "",
        "## Runs",
        "",
    ]
    for run in report.runs:
        versions = ", ".join(f"{key} {version}" for key, version in sorted(run.versions.items()))
        lines += [
            f"{run.started}, {run.hardware}, {run.dtype}, seed {run.seed}; {versions}",
            "",
            *("    " + line for line in run.command.splitlines()),
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def _summary(setting: Setting) -> list[str]:
    found = levels(setting)
    if not found:
        return []
    rows = [
        [
            words.share(level.ratio),
            _named(level.by_score, level.by_score.score if level.by_score else None, words.score),
            _named(level.by_kl, level.by_kl.kl if level.by_kl else None, words.number),
        ]
        for level in found
    ]
    head = ["bytes up to", f"best {setting.metric or 'score'}", "least KL"]
    full = setting.full
    reference = (
        [f"Full cache: {words.score(full.score.mean)} {words.interval(full.score, words.score)}".rstrip(), ""]
        if full and full.score
        else []
    )
    return [*reference, *_grid(head, rows, left=(1, 2)), ""]


def _named(entry: Entry | None, estimate: Estimate | None, write: object) -> str:
    return f"{_cell(estimate, write)} {_plain(entry.method)}" if entry else words.NONE


def _table(setting: Setting) -> list[str]:
    has = columns(setting)
    head = ["method", "budget", "bytes"]
    head += [setting.metric, "minus full"] if has.score else []
    head += ["KL", "same top token", "logit error", "perplexity"] if has.kl else []
    head += ["fold", "a token"] if has.speed else []
    head += ["samples"]
    rows = []
    for _, entries in sizes(setting):
        for entry in entries:
            samples = f"{entry.n} of {entry.expected}" if entry.n < entry.expected else str(entry.n)
            row = [_plain(entry.method), _plain(entry.budget), words.share(entry.ratio)]
            row += (
                [_cell(entry.score, words.score), _cell(entry.difference, words.signed)] if has.score else []
            )
            if has.kl:
                row += [
                    _cell(entry.kl, words.number),
                    _cell(entry.top1, words.share),
                    _cell(entry.logit_error, words.number),
                    _cell(entry.perplexity, words.number),
                ]
            row += (
                [words.seconds(entry.fold_seconds), words.seconds(entry.decode_seconds)] if has.speed else []
            )
            rows.append([*row, f"{samples}: {_plain(remark(entry))}" if remark(entry) else samples])
    return _grid(head, rows, left=(0, 1))


def _grid(head: list[str], rows: list[list[str]], left: tuple[int, ...]) -> list[str]:
    rule = ["---" if index in left else "---:" for index in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def _cell(estimate: Estimate | None, write: object) -> str:
    assert callable(write)
    if estimate is None:
        return words.NONE
    return f"{write(estimate.mean)} {words.interval(estimate, write)}".strip()


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
