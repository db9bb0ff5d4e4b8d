"""Settings of the stages that make tokens of text: shard, tokenizer, encode."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from contextlib import suppress
from pathlib import PurePath
from typing import Annotated, Literal, get_args

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    SerializeAsAny,
)

from drover.pipeline.config.kinds import Kind
from drover.pipeline.config.section import (
    LocalPath,
    Section,
    SourcePath,
    StoreUrl,
    added,
    execution,
    in_form,
)
from drover.pipeline.config.shipped import FILTERS

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
Format = Literal["txt", "jsonl", "json", "parquet", "csv", "arrow", "html", "warc", "pdf"]
WEB = ("html", "warc", "pdf")
"""Formats of which the text is extracted."""
MEANT = {"md": "txt", "rst": "txt", "tex": "txt", "py": "txt", "tsv": "csv", "htm": "html", "xhtml": "html",
         "wet": "warc"}
"""Endings that mean another format."""
OFFICE = {**{ending: f"pandoc FILE.{ending} --to plain --wrap none --output FILE.txt"
             for ending in ("docx", "odt", "rtf", "epub", "pptx", "xlsx")},
          "doc": "libreoffice --headless --convert-to docx FILE.doc",
          "ipynb": "jupyter nbconvert --to markdown FILE.ipynb"}
"""How files of office programs, and notebooks, are made ones that are read."""


def _encoding(name: str) -> str:
    """An encoding of text under its usual name; UTF-8 with a byte order mark is UTF-8."""
    with suppress(LookupError, ValueError):
        "".encode(name)
        codecs.getincrementaldecoder(name)("replace").decode(b"", final=True)
        return codecs.lookup(name).name.replace("utf-8-sig", "utf-8")
    raise ValueError(f"{name} is no encoding of text that Python knows; utf-8, utf-16, latin-1 and cp1252 are some")


SourceName = Annotated[str, Field(max_length=60), in_form(r"[\w-]+", "letters, digits, - and _")]
"""Name of a source, which is part of names of files."""


Html = Literal["pages", "fields", "keep"]
"""What of a source is HTML."""
Extractor = Literal["resiliparse", "trafilatura"]


class BestShare(Section):
    """The documents of a source with the best scores, after filters and deduplication. Of equal scores the smaller hash
    of the text decides. A document without a number in the field is never among them."""

    by: str
    """Field of the documents' `meta` that holds the score: one of `meta_fields`, or a classifier's, such as
    classifier_score."""
    share: float = Field(gt=0, lt=1)
    """Share of the source's documents to keep, rounded up to a whole document."""

    @property
    def reason(self) -> str:
        """Why the other documents are dropped."""
        return f"below the best {100 * self.share:g}% by {self.by}"


class StdlibSource(Section):
    """The `.py` files of this Python's standard library: over 10 MB of real text without a network."""

    kind: Literal["stdlib"]
    """The standard library of the running Python."""
    name: SourceName = "stdlib"
    """Name of the source in folders, tables and mixtures."""


class FilesSource(Section):
    """Files on this machine, on web servers or objects in a store. Compressed files (.gz, .zst) are decompressed while
    they are read."""

    kind: Literal["files"]
    """Files on this machine, or objects in a store."""
    name: SourceName
    """Name of the source in folders, tables and mixtures."""
    paths: list[SourcePath] = execution(min_length=1)
    """Files, globs or URLs. In globs `**` crosses folders, each once if links lead to it again. A URL (`s3://`,
    `gs://`, `az://`) names an object, a prefix or a wildcard; keys and address come from the environment. An address
    (`https://`) names a file. Matches are sorted, so their order does not depend on the disk. Only the files' content
    and their names below their common folder count, not where they lie."""
    exclude: list[SourcePath] = execution([])
    """Files, globs or URLs that are left out of `paths`; and folders that cannot be read, which else stop the stage."""
    format: Literal["auto"] | Format = "auto"
    """Format of the files. `auto` uses the ending of the file's name, before .gz or .zst. It reads .md, .rst, .tex and
    .py as txt, .tsv as csv, .htm and .xhtml as html, and .wet as warc. `json` is an array of objects or objects one
    after another. `arrow` is an IPC file or stream. `csv` needs a header."""
    separator: str | None = Field(None, min_length=1)
    """For txt: the string between two documents, for example "\\n\\n" or "<|endoftext|>". null: each file is one
    document."""
    text_field: str = "text"
    """Field or column that holds the document's text. `content.text` is the field `text` of the object in `content`."""
    id_field: str | None = None
    """Field or column that holds the document's id. null: the file's name and the line or record number, from 1, as
    `file:7`; in a file that is read in parts the offset, as `file@1234`."""
    meta_fields: list[str] = []
    """Fields or columns to keep as the document's `meta`. One that a record has not is taken from its object `meta`,
    so that text shards keep theirs: [url, title]."""
    encoding: Annotated[str, AfterValidator(_encoding)] = added("utf-8")
    """Encoding of text, JSON and CSV files, such as `latin-1`, `cp1252`, `utf-16` or `shift_jis`: any that Python
    knows. What cannot be decoded is rejected. Files in another encoding than UTF-8 are not read in parts."""
    html: Html = added("pages")
    """Where HTML is, of which the text is extracted. `pages`: in HTML files and the pages of WARC files. `fields`: in
    the field `text_field` of records, too. `keep`: nothing is extracted, and the model learns the markup. Text files
    that begin as a page are rejected, unless it is `keep`."""
    extractor: Extractor = added("resiliparse")
    """What extracts the text of HTML. `resiliparse` takes the main content and is fast. `trafilatura` leaves out more
    that is not prose and takes about ten times as long."""
    delimiter: str | None = added(None, min_length=1, max_length=1)
    """For csv: the character between two values, such as ";" or "|". null: a comma, in .tsv files a tab."""
    quote: str = added('"', max_length=1)
    """For csv: the character around a value that holds a delimiter or a line end. "" if there is none."""
    keep: BestShare | None = added(None)
    """Keep only the documents with the best scores, as in {by: classifier_score, share: 0.1}; null: all."""


class HubSource(Section):
    """A dataset read by `datasets.load_dataset`, from the Hugging Face Hub."""

    kind: Literal["hf"]
    """A dataset of the Hugging Face Hub."""
    name: SourceName
    """Name of the source in folders, tables and mixtures."""
    dataset: LocalPath
    """Hub id, as `roneneldan/TinyStories`."""
    config_name: str | None = None
    """Name of the dataset's configuration, if it has several."""
    split: str = Field("train", pattern=r"^[^\[]+$")
    """Split to read, or several, as train+test. A part of one (train[:10%]) is not read: set `limit`."""
    revision: str | None = None
    """Commit or tag on the Hub. Pin it: an unpinned dataset can change between two runs without notice."""
    text_field: str = "text"
    """Column that holds the document's text."""
    id_field: str | None = None
    """Column that holds the document's id. null: the split and the record number, from 1."""
    meta_fields: list[str] = []
    """Columns to keep as the document's `meta`."""
    limit: PositiveInt | None = None
    """Read only this many records, from the start; null: all."""
    keep: BestShare | None = added(None)
    """Keep only the documents with the best scores, as in {by: classifier_score, share: 0.1}; null: all."""


Source = Annotated[StdlibSource | FilesSource | HubSource, Field(discriminator="kind")]


def file_format(path: PurePath, configured: str = "auto") -> str | None:
    """The format to read `path` as: the configured one, or that of its ending; None if the ending shows none."""
    if configured != "auto":
        return configured
    inner = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    ending = inner.suffix.lower().lstrip(".")
    return ending if ending in get_args(Format) else MEANT.get(ending)


def converter(path: PurePath) -> str:
    """The command that makes text of an office file or a notebook; empty if it is none."""
    return OFFICE.get(path.suffix.lower().lstrip("."), "").replace("FILE", path.stem)


def web_packages(source: Source, names: Iterable[str]) -> list[str]:
    """The optional packages that a source needs which has files of such names or patterns."""
    if not isinstance(source, FilesSource):
        return []
    kinds = {file_format(PurePath(name), source.format) for name in names}
    is_html = source.html == "fields" or (source.html != "keep" and bool(kinds & {"html", "warc"}))
    needed = {"resiliparse": is_html or kinds & {"warc", "pdf"}, "fastwarc": "warc" in kinds,
              "pypdfium2": kinds & {"warc", "pdf"},
              "trafilatura": is_html and source.extractor == "trafilatura"}
    return [package for package, is_needed in needed.items() if is_needed]


DocumentFilter = Annotated[SerializeAsAny[Kind], PlainValidator(FILTERS.read)]


class NearDuplicates(Section):
    """Detection of near-duplicates by MinHash signatures. Documents that share a band are linked, and one document of
    each connected component is kept. Needs the package rensa (the extra `clean`)."""

    preset: Literal["fineweb", "olmo3"] = "fineweb"
    """`fineweb`: shingles of 5 words, 14 bands of 8 rows, for a Jaccard similarity of about 0.75. `olmo3`: shingles of
    5 words, 26 bands of 11 rows, for a similarity of about 0.80. Olmo 3 itself uses shingles of 5 tokens."""
    ngram: int | None = Field(None, ge=1)
    """Words per shingle; null: the preset's number. A document with fewer words is never a near-duplicate."""
    words: Literal["runs", "characters"] = added("runs")
    """What counts as a word. `runs`: letters and digits in a row. `characters`: the same, except in scripts that are
    written without spaces (Chinese and Japanese characters, Thai, Lao, Khmer, Burmese). There each character is a word,
    so that near-duplicates are found in these scripts too. In other scripts both give the same words."""
    bands: int | None = Field(None, ge=1)
    """Bands per signature; null: the preset's number. While the stage works, each band takes 20 bytes per document on
    disk."""
    rows: int | None = Field(None, ge=1)
    """MinHash values per band, all of which must match; null: the preset's number."""
    verify: float | None = Field(None, gt=0, le=1)
    """Drop a near-duplicate only if its Jaccard similarity to a kept document of its component is at least this. Else
    it is kept, too. The similarity is computed on shingles of 3 `words`. null: keep one document of each component.
    With `validation_rule: hash`, all kept documents of a component are in the same split."""


class ShardConfig(Section):
    """Stage 1: filter, deduplicate and split the documents of the sources; write them as WebDataset tar shards."""

    sources: list[Source] = Field([{"kind": "stdlib"}], validate_default=True)
    """Where documents come from. Drover reports each source by its name, up to the validation loss. []: all documents
    are tokens already (`encode.sources`)."""
    shard_mb: PositiveFloat = 64.0
    """Text per shard in MB (10^6 bytes). `encode` works shard by shard: choose a size that gives many shards per
    process."""
    validation_share: float = Field(0.01, gt=0, lt=1)
    """Share of the corpus in the validation set, on which no step trains. `validation_rule` defines what it is a share
    of."""
    validation_rule: Literal["hash", "tail"] = "hash"
    """How the validation set is chosen. `hash`: validation_share of the documents, chosen by the hash of each text.
    Equal texts always fall into the same split. `tail`: validation_share of the characters of each source, from its
    end. Its documents are in order (files by name, then records), without duplicates. Of n characters the first
    int(n * (1 - share)) are trained on. The document at the border is cut in two. Use `tail` for one long text."""
    drop_duplicates: bool = True
    """Exact deduplication: keep the first of the documents with equal text, over all sources. Without it,
    `validation_rule: tail` can put one text into both splits."""
    near_duplicates: NearDuplicates | None = added(None)
    """Also drop near-duplicates, as in {preset: fineweb}; null: drop exact duplicates only. The folder duplicates/ then
    names the kept document for each dropped one, exact duplicates included."""
    filters: list[DocumentFilter] = added([])
    """Filters that drop or change documents, in this order, before deduplication. Each item has a `kind` and the
    settings of that kind, as in {kind: length, min_words: 20}. The kinds are length, repetition, characters, masking,
    c4, gopher_quality, gopher_repetition, fineweb_quality, site, language, classifier, encoding_repair,
    normalization, duplicate_lines and decontamination. Write my_module:MyFilter for one of your own. An item's `name`
    appears in the counts; null: its kind. `sources` names the sources that it sees; null: all. docs/data.md describes
    all kinds."""
    keep_dropped: bool = added(False)
    """Write the documents that filters drop to dropped/ as JSON lines, with the filter's name and the reason. Also name
    the kept document of each duplicate in duplicates/. Both are outputs of the stage. If you change this for a
    finished stage, Drover stops and shows both values; `--force` runs it again."""
    max_document_mb: PositiveFloat = added(128.0)
    """Largest document in MB (10^6 bytes). A document is a line of jsonl, a value of json, parquet or arrow, or a field
    of csv. A txt file without `separator` is one, too. A larger document is rejected by name and never held in memory.
    The rest of a json or csv file after it is lost. Text is measured in UTF-8."""
    dropped_examples: int = added(3, ge=0, le=100)
    """Examples of dropped documents per reason, in manifest and report; 0: none, for text that nobody should read
    there. Each is the document's beginning, as the filter saw it. If a finished stage has another number, Drover stops
    and shows both; `--force` runs it again. The shards stay the same, so later stages stay valid."""
    max_rejected_share: float = execution(0.001, ge=0, le=1)
    """The stage fails if more than this share of all documents, or of the bytes of all files, is rejected. It also
    fails if more than this share of the files break off, since the documents in their rest are lost uncounted. Up to
    this share, rejects are counted and listed in rejected.jsonl. Of at most 10,000 documents 10 may be rejected
    if no more than a tenth of documents, files and bytes is lost; not if this is set to another value than 0.001."""

    @property
    def source_names(self) -> list[str]:
        """Names of the sources of text, in their order."""
        return [source.name for source in self.sources]

    @property
    def best_shares(self) -> dict[str, BestShare]:
        """By name, the sources that keep only the documents with the best scores."""
        return {source.name: source.keep for source in self.sources
                if not isinstance(source, StdlibSource) and source.keep is not None}


LEAST_COVERAGE = 0.98
"""The lowest `character_coverage` with which sentencepiece trains."""


class TokenizerConfig(Section):
    """Stage 2: train a tokenizer, or take a ready one."""

    kind: Literal["sentencepiece", "bpe", "tiktoken", "huggingface", "byte", "char"] = "sentencepiece"
    """`sentencepiece` is trained unless `path` is given. `bpe` is trained: byte-level BPE with Llama 3's
    pre-tokenization. Its file has Llama 3's format, which `tiktoken` reads. `tiktoken` and `huggingface` need `path`.
    `byte` (256 bytes) and `char` (the corpus's characters) are for small experiments."""
    path: LocalPath | None = execution(None)
    """A ready tokenizer: sentencepiece's `.model`, Llama 3's tiktoken `tokenizer.model`, or Hugging Face's
    `tokenizer.json`. It can also be the folder of one, or a name on the Hugging Face Hub (owner/name, or
    owner/name@revision). Its content counts, not its place. A `tokenizer_config.json` next to a tokenizer.json names
    the BOS and EOS tokens. Both are exported unchanged, with the chat template."""
    vocab_size: PositiveInt = 32768
    """Size of a trained vocabulary, with the 256 special ids; a multiple of 128. A ready tokenizer keeps its own
    size."""
    algorithm: Literal["bpe", "unigram"] = "bpe"
    """Model type of sentencepiece. `unigram` encodes faster and trains about 9 times slower. `kind: bpe` ignores this
    and `character_coverage`."""
    character_coverage: float = Field(0.9999, ge=LEAST_COVERAGE, le=1)
    """For sentencepiece: share of the corpus's characters that get a token of their own. The rest are spelled in bytes
    (byte fallback). At least 0.98."""
    train_mb: PositiveFloat = 2000.0
    """Most text to train on in MB, sampled evenly from the shards. sentencepiece needs about 13 times the memory of the
    text that it trains on. If the corpus is over four times `train_mb`, only some shards are read. They are chosen by
    their hashes and keep each source's share of the text; `train.mixture` does not count. More than 5,000 to 20,000 MB
    improve no vocabulary."""
    document_characters: PositiveInt | None = added(None)
    """Sample at most this many characters from the beginning of each document; null: no limit. A few very long
    documents then do not outweigh all others; 10,000 is usual. The sample is then smaller than `train_mb`."""
    check_mb: PositiveFloat = added(64.0)
    """Validation text in MB per source on which the tokenizer is checked. Decoding must give the text back, and the
    exported tokenizer must give equal ids. If there is more text, the beginnings of shards are checked, chosen by their
    hashes."""


UINT16_IDS = 65536
"""So many ids a token of two bytes can be."""


class TokenSource(Section):
    """Files of tokens that another program made with the tokenizer that `tokenizer.path` names. The ending of a file's
    name shows its format: Megatron's .bin with its .idx, .bin of llm.c or without a header (nanoGPT), .npy of OLMo or
    numpy, .ds of datatrove, Parquet and Arrow."""

    name: SourceName
    """Name of the source in folders, tables and mixtures. No source of `shard.sources` may have it."""
    paths: list[LocalPath] = execution(min_length=1)
    """Files or globs, with the endings .bin, .npy, .ds, .parquet or .arrow. Files that belong to one, such as the .idx,
    are found next to it."""
    validation_paths: list[LocalPath] = execution([])
    """Those whose documents are the validation set of this source, as other programs keep it in files of its own. Files
    that `paths` names too are not trained on."""
    validation_share: float = Field(0.01, ge=0, lt=1)
    """Share of the documents in the validation set, chosen by the hash of their ids; 0: none. It counts only without
    `validation_paths`. `shard.validation_share` is for text."""
    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """Type of an id in files that do not say it. `auto`: uint16 if the vocabulary has at most 65,536 ids."""
    column: str = "input_ids"
    """Column of Parquet and Arrow files that holds the ids, a document per row. In Drover's own token shards it is
    `tokens`."""
    separators: list[NonNegativeInt] = []
    """Further ids that separate documents, next to the tokenizer's BOS and EOS."""


class EncodeConfig(Section):
    """Stage 3: tokenize the text shards into token shards."""

    sources: list[TokenSource] = added([])
    """Documents that are tokens already. `tokenizer.path` must name their tokenizer. docs/tokens.md describes what is
    read and checked."""
    copy_to: StoreUrl | None = execution(None)
    """URL in an object store (s3://bucket/prefix, gs://, az://, file://) for an upload of the token shards; null: no
    upload. The stage is done once they are uploaded. `train.tokens_from` downloads them. Keys and addresses come from
    the environment. For a stage that is done already: `drover copy-tokens`."""
    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """Type of a token on disk: 2 or 4 bytes. `auto` takes uint16 up to a vocabulary of 65,536."""
    encoder: Literal["auto", "reference", "fastokens"] = execution("auto")
    """What computes the ids, which are always the same. `reference` is the exported tokenizer, run by the library
    tokenizers. `fastokens` is ten times faster. `auto` takes it if it passes a test against the reference. The test
    compares ids on validation documents, odd strings and random ones. In every shard both encode some documents. If
    they differ, the reference takes over."""
