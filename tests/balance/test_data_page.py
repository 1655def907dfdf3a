"""The page of `csc data`: whatever the names hold, and lengths that are all one."""

from __future__ import annotations

from html.parser import HTMLParser

from csc.reports.data import DataReport, Histogram, page


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "line"):
            assert self.open.pop() == tag


def test_names_are_text_and_every_tag_is_closed() -> None:
    name = "<script>alert(1)</script>\"'&"
    report = DataReport(
        3, {"tokens": {"0%": 7.0, "mean": 7.0}, name: {"0%": 0.0, "mean": 0.0}},
        {"random": 2.0, "sorted": 1.5, "balanced": 1.0, "equal": 0.9}, [(4, 1, 64), (8, 2, 128)], 1, 32, 0.01, 16,
        (name,), {"tokens": Histogram(7.0, 7.0, (3,)), name: Histogram(0.0, 0.0, (0,))},
    )  # fmt: skip
    text, tags = page(report, f"model {name}"), Tags()
    tags.feed(text)
    assert not tags.open and "script" not in tags.seen
    assert tags.seen.count("svg") == 4 and tags.seen.count("circle") == 2
    assert "random, 2.000 × balanced" in text and "3 samples" in text
    empty = DataReport(3, report.distribution, report.seconds, [], 0, 2, 0.0, 16, (), {})
    assert "are compiled: 0" in page(empty, "model")
