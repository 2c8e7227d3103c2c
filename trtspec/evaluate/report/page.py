"""The page a report is written on: its style sheet and the few HTML elements it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

STYLE = """
:root{--bg:#fff;--card:#f6f7f9;--ink:#16191d;--soft:#4d5661;--rule:#d5dae0;--good:#116b3c;--bad:#a3161a;--warn:#7a4b00;
--c0:#1d5fbf;--c1:#b4540a;--c2:#0f766e;--c3:#7a3fc4;--c4:#a1235f;--c5:#566173;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--bg:#101316;--card:#191e23;--ink:#e8ebee;--soft:#aab4bf;--rule:#38414a;
--good:#6fd69b;--bad:#ff9b93;--warn:#f0bd6a;--c0:#79aefa;--c1:#f4a261;--c2:#52cfc0;--c3:#c3a3fa;--c4:#f490bd;--c5:#a8b3c2}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1080px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.65rem;line-height:1.2;margin:0 0 4px}
h2{font-size:1.15rem;margin:40px 0 4px;padding-top:14px;border-top:1px solid var(--rule)}
h3{font-size:1rem;margin:20px 0 4px}
p{margin:4px 0 12px;max-width:72ch}
.soft,caption,figcaption{color:var(--soft)}
.wide{max-width:none}
.headline{font-size:1.15rem;line-height:1.4;margin:6px 0;max-width:none}
.reasons{margin:2px 0 14px;padding-left:20px}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
.good,.bad,.warn{font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,165px),1fr));gap:10px;
margin:16px 0 8px;padding:0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
.tile dt{color:var(--soft);font-size:.84rem}
.tile dd{margin:0}
.tile .big{font-size:1.5rem;font-weight:650;line-height:1.25}
.tile .small{color:var(--soft);font-size:.84rem}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:12px 28px;align-items:start}
figure{margin:8px 0}
figcaption{font-size:.9rem;margin-bottom:4px}
svg{width:100%;height:auto;display:block;max-width:560px}
svg text{font-size:12px;fill:var(--soft)}
svg .value{fill:var(--ink);font-weight:600}
svg .axis{fill:var(--soft)}
svg .grid{stroke:var(--rule);stroke-width:1}
svg .origin{stroke:var(--ink);stroke-width:1.4}
svg .line{fill:none;stroke-width:2.4}
.s0{fill:var(--c0)}.s1{fill:var(--c1)}.s2{fill:var(--c2)}.s3{fill:var(--c3)}.s4{fill:var(--c4)}.s5{fill:var(--c5)}
.l0{stroke:var(--c0)}.l1{stroke:var(--c1);stroke-dasharray:7 3}.l2{stroke:var(--c2);stroke-dasharray:2 3}
.l3{stroke:var(--c3);stroke-dasharray:9 3 2 3}.l4{stroke:var(--c4);stroke-dasharray:4 4}.l5{stroke:var(--c5)}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 4px;padding:0;list-style:none;font-size:.88rem}
.legend svg{display:inline-block;width:22px;height:10px;margin-right:6px;vertical-align:baseline}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.92rem;margin:8px 0;min-width:min(100%,480px)}
.pair table{width:100%;min-width:0}
caption{text-align:left;font-size:.9rem;padding-bottom:4px}
th,td{padding:4px 10px 4px 0;text-align:right;border-bottom:1px solid var(--rule);vertical-align:top}
th:first-child,td:first-child{text-align:left}
table.words td,table.words th{text-align:left}
table.words td{overflow-wrap:anywhere}table.words th{min-width:7.5em}
thead th{color:var(--soft);font-weight:600}
tbody th{font-weight:500;min-width:6.5em}
td{white-space:nowrap}table.words td{white-space:normal}
pre{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px;
overflow-x:auto;font-size:.86rem;white-space:pre-wrap;overflow-wrap:anywhere}
.terms{columns:2 330px;column-gap:32px;font-size:.9rem}
.terms div{break-inside:avoid;padding:0 0 12px}
.terms dt{font-weight:600}.terms dd{margin:0}
details{margin:8px 0}
summary{cursor:pointer;color:var(--soft)}
a:focus-visible,summary:focus-visible,.scroll:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
@media (max-width:520px){main{padding:16px 14px 40px}h1{font-size:1.35rem}.headline{font-size:1.05rem}
.tiles{grid-template-columns:1fr 1fr}.tile .big{font-size:1.25rem}table{font-size:.86rem}th,td{padding-right:8px}}
@media print{:root{--bg:#fff;--card:#fff;--ink:#000;--soft:#333;--rule:#bbb;--good:#0b5a30;--bad:#8d0f13;--warn:#664000;
--c0:#1d5fbf;--c1:#b4540a;--c2:#0f766e;--c3:#7a3fc4;--c4:#a1235f;--c5:#566173}
main{max-width:none;padding:0}body{font-size:11pt}figure,table,.tile{break-inside:avoid}h2,h3{break-after:avoid}
.pair{grid-template-columns:1fr 1fr}.scroll{overflow:visible}td{white-space:normal}
details::details-content{content-visibility:visible;block-size:auto}}
"""


def page(title: str, body: str) -> str:
    """A whole document. Its policy forbids every request, so nothing can be loaded from anywhere."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def table(
    caption: str,
    head: Sequence[str],
    body: Iterable[Sequence[str]],
    *,
    words: bool = False,
    raw: bool = False,
) -> str:
    """A table whose first column heads its rows. words: text aligned left. raw: cells are HTML already."""
    spell = (lambda text: text) if raw else escape
    columns = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{spell(first)}</th>{"".join(f"<td>{spell(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in body
    )
    kind = ' class="words"' if words else ""
    name = escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table{kind}><caption>{name}</caption>'
        f"<thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def figure(caption: str, svg: str, legend: Sequence[str] = (), *, lines: bool = False) -> str:
    """A chart with its caption and, for several series, a legend."""
    return f"<figure><figcaption>{escape(caption)}</figcaption>{_legend(legend, lines)}{svg}</figure>"


def pair(*parts: str) -> str:
    """Parts side by side where the page is wide enough, one below the other where it is not."""
    return f'<div class="pair">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def section(title: str, *parts: str, note: str = "") -> str:
    """A headed part of the page; `note` explains how to read it."""
    words = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{words}{''.join(parts)}</section>"


def folded(title: str, part: str) -> str:
    """A part that opens on demand, and in print."""
    return f"<details><summary>{escape(title)}</summary>{part}</details>"


def tiles(rows: Iterable[tuple[str, str, str]]) -> str:
    """Key figures: (name, value, small print)."""
    return (
        '<dl class="tiles">'
        + "".join(
            f'<div class="tile"><dt>{escape(name)}</dt><dd class="big">{escape(value)}</dd>'
            f'<dd class="small">{escape(small)}</dd></div>'
            for name, value, small in rows
        )
        + "</dl>"
    )


def terms(entries: Iterable[tuple[str, str, Sequence[tuple[str, str]]]]) -> str:
    """A glossary: (term, meaning, named details)."""
    body = "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(meaning)}"
        + "".join(f'<br><span class="soft">{escape(name)}:</span> {escape(text)}' for name, text in details)
        + "</dd></div>"
        for term, meaning, details in entries
    )
    return f'<dl class="terms">{body}</dl>'


def _legend(names: Sequence[str], lines: bool) -> str:
    if len(names) < 2:
        return ""
    mark = (
        '<line class="line l{}" x1="0" x2="22" y1="5" y2="5"/>'
        if lines
        else '<rect class="s{}" width="22" height="10" rx="2"/>'
    )
    items = "".join(
        f'<li><svg viewBox="0 0 22 10" aria-hidden="true">{mark.format(i % 6)}</svg>{escape(name)}</li>'
        for i, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'
