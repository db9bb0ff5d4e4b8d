"""A crawl as WARC files: pages of many kinds, some of them damaged, with what each of them is known beforehand.

    python -m tests.crawl           writes 2,000 pages into crawl/

The prose is the English of this Python's own documentation; Japanese and Arabic are sentences of few words.
"""

import gzip
import random
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tests.dirty_corpus import paragraphs

JAPANESE = (("私は", "彼女は", "先生が", "友人と"), ("東京で", "図書館で", "昨日", "毎朝"),
            ("本を読みます。", "音楽を聞きました。", "手紙を書いています。"))
ARABIC = (("الكاتب", "المعلم", "الطالب", "المهندس"), ("يقرأ", "يكتب", "يدرس", "يشرح"),
          ("كتابا جديدا.", "رسالة طويلة.", "درسا مهما."))
GERMAN = ("Die Größe der Bücher überrascht viele Leser; natürlich hört man für und wider.",
          "Später fährt der Zug über die Brücke nach Köln.")
PYTHON = "def area(width, height):\n    if width < 0:\n        raise ValueError(width)\n    return width * height\n"


@dataclass
class Page:
    """An HTTP response: its body, its headers, its status, and headers of the WARC record."""

    body: bytes
    headers: dict[str, str]
    status: str = "200 OK"
    record: tuple[str, ...] = ()

    @classmethod
    def of(cls, html: str, charset: str = "utf-8", declared: str | None = None) -> "Page":
        """A page of HTML; declared: the charset in the HTTP header, where that is another or none ("")."""
        named = charset if declared is None else declared
        return cls(html.encode(charset), {"Content-Type": f"text/html; charset={named}" if named else "text/html"})


class Site:
    """Makes pages from one generator of random numbers."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.prose = paragraphs()

    def sentences(self, words: tuple[tuple[str, ...], ...], count: int, space: str = "") -> str:
        return space.join(space.join(map(self.chance.choice, words)) for _ in range(count))

    def paragraphs(self, count: int) -> str:
        return "\n".join(f"<p>{escape(text)}</p>" for text in self.chance.sample(self.prose, count))

    def page(self, title: str, content: str, language: str = "en", extra: str = "") -> str:
        """A page with what stands around an article: a menu, scripts, advertisements, a footer."""
        menu = "".join(f'<li><a href="/{word}">{word.title()}</a></li>' for word in ("home", "news", "about", "login"))
        return (f'<!DOCTYPE html><html lang="{language}"><head><title>{escape(title)}</title>{extra}'
                f'<style>p {{margin: 0}}</style><script>var shown = "<p>no text</p>";</script></head><body>'
                f'<nav><ul>{menu}</ul></nav>'
                f'<div class="ad">Buy now, only today!</div><main><article><h1>{escape(title)}</h1>\n{content}\n'
                f'</article></main><footer>Copyright, imprint, cookies</footer></body></html>')

    def news(self) -> Page:
        date = f'<meta property="article:published_time" content="2025-0{self.chance.randint(1, 9)}-12">'
        return Page.of(self.page("News of the day", self.paragraphs(4), extra=date))

    def forum(self) -> Page:
        posts = "".join(f'<div class="post"><b>user{number}</b>{self.paragraphs(1)}</div>' for number in range(5))
        return Page.of(self.page("Re: a question", posts))

    def shop(self) -> Page:
        items = "".join(f"<li>Article {number} <b>{self.chance.randint(1, 99)}.99</b></li>" for number in range(9))
        return Page.of(self.page("Our offers", f"<ul>{items}</ul>{self.paragraphs(1)}"))

    def manual(self) -> Page:
        code = f"<pre><code>{escape(PYTHON)}</code></pre>"
        return Page.of(self.page("Manual", self.paragraphs(2) + code + self.paragraphs(1)))

    def japanese(self) -> Page:
        text = "".join(f"<p>{self.sentences(JAPANESE, 12)}</p>" for _ in range(3))
        charset, declared = self.chance.choice([("utf-8", None), ("shift_jis", None), ("euc_jp", "")])
        meta = f'<meta charset="{charset.replace("_", "-")}">'
        return Page.of(self.page("日記", text, "ja", meta), charset, declared)

    def arabic(self) -> Page:
        text = "".join(f'<p dir="rtl">{self.sentences(ARABIC, 12, " ")}</p>' for _ in range(3))
        return Page.of(self.page("مدونة", text, "ar"), *self.chance.choice([("utf-8",), ("windows-1256",)]))

    def german(self) -> Page:
        text = "".join(f"<p>{' '.join(self.chance.choices(GERMAN, k=8))}</p>" for _ in range(3))
        return Page.of(self.page("Tagebuch", text, "de", '<meta charset="iso-8859-1">'), "latin-1", "")

    def table(self) -> Page:
        rows = "".join(f"<tr><td>{number}</td><td>{number ** 2}</td><td>{escape(text)}</td></tr>"
                       for number, text in enumerate(self.chance.sample(self.prose, 6)))
        return Page.of(self.page("Figures", f"<table><tr><th>n<th>square<th>remark</tr>{rows}</table>"))

    def broken(self) -> Page:
        html = self.page("Broken", self.paragraphs(3)).replace("</p>", "").replace("</article>", "</b></i></table>")
        return Page.of(html.replace("<h1>", '<h1 class="a" class=b <').replace("&", "&amp;amp;"))

    def large(self) -> Page:
        text = self.paragraphs(20)
        return Page.of(self.page("A very long page", text * (5_000_000 // len(text))))

    def deep(self) -> Page:
        """Elements in elements: resiliparse needs minutes for it, since the time grows with the square."""
        return Page.of(self.page("Deep", "<div>" * 100_000 + self.paragraphs(1)))

    def packed(self) -> Page:
        page = self.news()
        if self.chance.random() < 0.5:
            page.headers["Content-Encoding"], page.body = "gzip", gzip.compress(page.body, mtime=0)
        else:
            parts = page.body[:999], page.body[999:]
            page.headers["Transfer-Encoding"] = "chunked"
            page.body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        return page

    def empty(self) -> Page:
        return Page.of('<html><head><script src="app.js"></script></head><body><div id="root"></div></body></html>')

    def plain(self) -> Page:
        return Page("\n\n".join(self.chance.sample(self.prose, 3)).encode(), {"Content-Type": "text/plain"})

    def image(self) -> Page:
        return Page(b"\x89PNG\r\n\x1a\n" + self.chance.randbytes(500), {"Content-Type": "image/png"})

    def data(self) -> Page:
        return Page(b'{"answer": 42}', {"Content-Type": "application/json"})

    def missing(self) -> Page:
        page = Page.of(self.page("Not found", "<p>There is nothing here.</p>"))
        page.status = "404 Not Found"
        return page

    def moved(self) -> Page:
        headers = {"Location": "https://example.org/elsewhere", "Content-Type": "text/html"}
        return Page(b"", headers, "301 Moved Permanently")

    def cut(self) -> Page:
        page = self.news()
        page.body, page.record = page.body[:len(page.body) // 2], ("WARC-Truncated: length",)
        return page


KINDS = {"news": 400, "forum": 250, "shop": 200, "manual": 250, "japanese": 120, "arabic": 120, "german": 100,
         "table": 120, "broken": 100, "large": 2, "deep": 1, "packed": 80, "empty": 40, "plain": 41, "image": 40,
         "data": 20, "missing": 60, "moved": 40, "cut": 16}
"""Pages of each kind."""
assert sum(KINDS.values()) == 2000


def write_crawl(folder: Path, kinds: dict[str, int] = KINDS, files: int = 4, seed: int = 0) -> Counter[str]:
    """Write the pages in a random order to WARC files `crawl-N.warc.gz`, each with a `warcinfo` and, before each
    response, its request. Some news appear a second time at another address, called "copy". Returns how many pages of
    each kind there are."""
    site = Site(seed)
    order = [kind for kind, count in kinds.items() for _ in range(count)]
    site.chance.shuffle(order)
    pages = [(kind, getattr(site, kind)()) for kind in order]
    pages += [("copy", page) for kind, page in pages if kind == "news"][::20]
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        own = pages[number::files]
        records = [_record("warcinfo", "", b"software: tests.crawl\r\n", "application/warc-fields")]
        for at, (kind, page) in enumerate(own):
            url = f"https://example.org/{kind}/{number * len(pages) + at}"
            request = f"GET {url} HTTP/1.1\r\nHost: example.org\r\n\r\n".encode()
            head = "".join(f"{name}: {value}\r\n" for name, value in page.headers.items())
            response = f"HTTP/1.1 {page.status}\r\n{head}\r\n".encode() + page.body
            records += [_record("request", url, request), _record("response", url, response, extra=page.record)]
        (folder / f"crawl-{number}.warc.gz").write_bytes(b"".join(gzip.compress(own, mtime=0) for own in records))
    return Counter(kind for kind, _ in pages)


def _record(kind: str, url: str, block: bytes, media: str = "", extra: tuple[str, ...] = ()) -> bytes:
    name = f"{zlib.crc32(url.encode() + kind.encode()):012x}"
    lines = ["WARC/1.0", f"WARC-Type: {kind}", f"WARC-Record-ID: <urn:uuid:00000000-0000-4000-8000-{name}>",
             "WARC-Date: 2025-11-01T12:00:00Z", *([f"WARC-Target-URI: {url}"] if url else []), *extra,
             f"Content-Type: {media or f'application/http; msgtype={kind}'}", f"Content-Length: {len(block)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + block + b"\r\n\r\n"


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "crawl")
    print(f"{sum(write_crawl(target).values()):,} pages in {target}/")
